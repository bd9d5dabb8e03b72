"""A KDC on this machine and what servers and clients need of it: the class Kdc, Hadoop's own MiniKdc in a JVM."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from tests.clusters.artifacts import find_java, minikdc_classpath, spark_home
from tests.clusters.machine import HOST, free_ports
from tests.clusters.processes import watcher

REALM = "EXAMPLE.COM"
SERVICE_HOST = "localhost"  # in the names of services; no name of this machine is looked up
BLOCK_HOST = "127.0.0.2"  # where clients look for DataNodes, which listen on HOST: a Tap stands between them
USER = "alice"
SERVERS = (f"hdfs/{SERVICE_HOST}", f"yarn/{SERVICE_HOST}", f"HTTP/{SERVICE_HOST}")
KRB5_CONF = """\
[libdefaults]
default_realm = {realm}
udp_preference_limit = 1
dns_canonicalize_hostname = false
rdns = false
[realms]
{realm} = {{
  kdc = {host}:{port}
}}
"""


class Kdc:
    """A Kerberos realm with a user and the servers' principals. It takes 2 s to start.

    conf: krb5.conf. user_keytab, server_keytab: keys of the user and of the servers. A context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sharding-kdc-"))
        watcher.watch("folder", self.folder)
        self.conf = self.folder / "krb5.conf"
        self.user_keytab = self.folder / "user.keytab"
        self.server_keytab = self.folder / "servers.keytab"

    def __enter__(self) -> Self:
        classpath = [*minikdc_classpath(), *(spark_home() / "jars").glob("py4j-*.jar")]
        port = launch_gateway(
            classpath=os.pathsep.join(map(str, classpath)),
            java_path=str(find_java()),
            javaopts=["-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"],
            die_on_exit=True,
        )
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))
        self._jvm: Any = self._gateway.jvm
        (kdc_port,) = free_ports(1)
        self.conf.write_text(KRB5_CONF.format(realm=REALM, host=HOST, port=kdc_port))
        settings = self._jvm.org.apache.hadoop.minikdc.MiniKdc.createConf()
        for name, value in {"kdc.port": str(kdc_port), "kdc.bind.address": HOST}.items():
            settings.setProperty(name, value)
        self._kdc = self._jvm.org.apache.hadoop.minikdc.MiniKdc(settings, self._file(self.folder / "work"))
        self._kdc.start()
        self._write_keytab(self.user_keytab, USER)
        self._write_keytab(self.server_keytab, *SERVERS)
        return self

    def __exit__(self, *_: object) -> None:
        self._kdc.stop()
        self._gateway.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, path: Path) -> Any:
        return self._jvm.java.io.File(str(path))

    def _write_keytab(self, path: Path, *principals: str) -> None:
        names = self._gateway.new_array(self._jvm.java.lang.String, len(principals))
        for number, principal in enumerate(principals):
            names[number] = principal
        self._kdc.createPrincipal(self._file(path), names)

    def kinit(self) -> Path:
        """Return a credential cache with a ticket of the user."""
        cache = self.folder / "krb5cc"
        client = self._jvm.org.apache.kerby.kerberos.kerb.client.KrbClient(self._file(self.folder))
        client.init()
        ticket = client.requestTgt(f"{USER}@{REALM}", self._file(self.user_keytab))
        client.storeTicket(ticket, self._file(cache))
        return cache

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        """The environment of a client. cache: its credential cache (default: one that is not there)."""
        return {
            "KRB5_CONFIG": str(self.conf),
            "KRB5CCNAME": f"FILE:{cache or self.folder / 'no-ticket'}",
        }

    @property
    def java_option(self) -> str:
        """The option by which a JVM finds the realm."""
        return f"-Djava.security.krb5.conf={self.conf}"

    def core_settings(self) -> dict[str, str]:
        """The settings of core-site.xml, of servers and clients."""
        return {
            "hadoop.security.authentication": "kerberos",
            "hadoop.rpc.protection": "privacy",
            "hadoop.http.filter.initializers": "org.apache.hadoop.hdfs.web.AuthFilterInitializer",
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.kerberos.principal": f"{SERVERS[2]}@{REALM}",
            "hadoop.http.authentication.kerberos.keytab": str(self.server_keytab),
            "hadoop.http.authentication.kerberos.endpoint.whitelist": "/jmx",  # by which the tests wait for servers
        }

    def hdfs_settings(self) -> dict[str, str]:
        """The settings of hdfs-site.xml: blocks are sent encrypted, and only to those who have a token for them."""
        hdfs, _, http = (f"{name}@{REALM}" for name in SERVERS)
        return {
            "dfs.namenode.kerberos.principal": hdfs,
            "dfs.datanode.kerberos.principal": hdfs,
            "dfs.web.authentication.kerberos.principal": http,
            "dfs.namenode.keytab.file": str(self.server_keytab),
            "dfs.datanode.keytab.file": str(self.server_keytab),
            "dfs.web.authentication.kerberos.keytab": str(self.server_keytab),
            "dfs.permissions.enabled": "false",  # who a user is matters here, not what the user may do
            "dfs.block.access.token.enable": "true",
            "dfs.data.transfer.protection": "privacy",
            "dfs.datanode.hostname": BLOCK_HOST,
            "dfs.client.use.datanode.hostname": "true",
            # A DataNode of a user without privileges would have to serve HTTPS.
            "ignore.secure.ports.for.testing": "true",
        }

    def yarn_settings(self) -> dict[str, str]:
        """The settings of yarn-site.xml."""
        yarn = f"{SERVERS[1]}@{REALM}"
        roles = ("resourcemanager", "nodemanager")
        return {
            f"yarn.{role}.{key}": value
            for role in roles
            for key, value in (("principal", yarn), ("keytab", str(self.server_keytab)))
        }
