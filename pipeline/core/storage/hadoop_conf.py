"""Hadoop's configuration files, for programs without a JVM."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import UsageError

AUTHENTICATION = "hadoop.security.authentication"


def read_site(content: bytes) -> dict[str, str]:
    """Parse the properties of a Hadoop ``*-site.xml``, in the encoding that it declares."""
    root = ElementTree.fromstring(content)
    properties = {p.findtext("name", "").strip(): p.findtext("value", "").strip() for p in root.iter("property")}
    return {name: value for name, value in properties.items() if name}


def hadoop_conf(folder: str) -> dict[str, str]:
    """Return the merged settings of core-site.xml and hdfs-site.xml in a folder; empty if it has neither.

    folder: the value of HADOOP_CONF_DIR, or "". Raises UsageError for invalid XML."""
    conf: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        path = Path(folder) / name
        if folder and path.is_file():
            try:
                conf |= read_site(path.read_bytes())
            except (ElementTree.ParseError, LookupError, ValueError) as error:  # the latter two: an unknown encoding
                raise UsageError(f"{path} is no Hadoop configuration: {error}") from error
    return conf


def is_true(value: str) -> bool:
    """True for ``true`` in any case, as Hadoop and Spark read their booleans."""
    return value.strip().lower() == "true"


def is_kerberos(conf: Mapping[str, str]) -> bool:
    """True if Hadoop settings require Kerberos. Hadoop ignores the case of the value."""
    return conf.get(AUTHENTICATION, "").strip().lower() == "kerberos"


def webhdfs_address(authority: str, conf: Mapping[str, str], *, secure: bool) -> str:
    """Return the web address of a NameNode or gateway; for a name service several, joined by semicolons.

    authority: host:port, a host with Hadoop's default port, or a name service of the configuration. secure: by HTTPS."""
    scheme, port = ("https", 9871) if secure else ("http", 9870)
    if ":" in authority:
        return f"{scheme}://{authority}"
    # A name service has one address per NameNode, under keys that end with the name of the NameNode.
    key = f"dfs.namenode.{scheme}-address.{authority}."
    addresses = [value for name, value in sorted(conf.items()) if name.startswith(key)]
    return ";".join(f"{scheme}://{address}" for address in addresses or [f"{authority}:{port}"])
