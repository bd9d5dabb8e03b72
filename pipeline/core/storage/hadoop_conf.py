"""Hadoop's configuration files, for programs without a JVM."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse

from pipeline.core.errors import UsageError


def read_site(text: str) -> dict[str, str]:
    """Parse the properties of a Hadoop ``*-site.xml``."""
    root = ElementTree.fromstring(text)
    properties = {p.findtext("name", "").strip(): p.findtext("value", "").strip() for p in root.iter("property")}
    return {name: value for name, value in properties.items() if name}


def hadoop_conf(folder: str) -> dict[str, str]:
    """Return core-site and hdfs-site of HADOOP_CONF_DIR together; empty without them. Raises UsageError for bad XML."""
    conf: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        path = Path(folder) / name
        if folder and path.is_file():
            try:
                conf |= read_site(path.read_text())
            except ElementTree.ParseError as error:
                raise UsageError(f"{path} is no Hadoop configuration: {error}") from error
    return conf


def webhdfs_address(authority: str, conf: Mapping[str, str]) -> str:
    """Return the WebHDFS address of an hdfs:// authority; for a name service several, joined by semicolons.

    The configuration applies only to its own file systems (the default one and its name services). The NameNode of
    another cluster is expected at Hadoop's default web port."""
    host = authority.partition(":")[0]
    default = urlparse(conf.get("fs.defaultFS", "")).netloc
    services = conf.get("dfs.nameservices", "").replace(",", " ").split()
    if authority not in ("", default, *services):
        return f"http://{host}:9870"
    secure = conf.get("dfs.http.policy", "HTTP_ONLY") == "HTTPS_ONLY"
    scheme, key = ("https", "dfs.namenode.https-address") if secure else ("http", "dfs.namenode.http-address")
    service = authority or default
    # A name service has one address per NameNode, under keys that end with the name of the NameNode.
    own = [value for name, value in sorted(conf.items()) if name.startswith(f"{key}.{service}")]
    addresses = own or ([conf[key]] if key in conf else [f"{service.partition(':')[0]}:{9871 if secure else 9870}"])
    fallback = default.partition(":")[0] or host or "localhost"
    return ";".join(f"{scheme}://{address.replace('0.0.0.0', fallback)}" for address in addresses)
