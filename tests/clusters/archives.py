"""The classes that Hadoop's servers load, recorded once: a server that maps them starts with two thirds of the work."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clusters.artifacts import class_archive_of, yarn_classpath
from tests.clusters.hdfs import DATANODE, NAMENODE, Hdfs
from tests.clusters.machine import cache_folder, locked
from tests.clusters.servers import Server
from tests.clusters.yarn import NODEMANAGER, RESOURCEMANAGER, Yarn

MAINS = (NAMENODE, DATANODE, RESOURCEMANAGER, NODEMANAGER)
END_S = 60.0  # in which a server writes its archive


class RecordedHdfs(Hdfs):
    """An HDFS whose servers write an archive of their classes into a folder when they end."""

    def __init__(self, archives: Path) -> None:
        super().__init__(datanodes=1)
        self.archives = archives

    def _server(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> Server:
        return super()._server(name, record_classes(command, self.archives), env)


class RecordedYarn(Yarn):
    """A YARN whose servers write an archive of their classes into a folder when they end."""

    def __init__(self, hdfs: Hdfs, archives: Path) -> None:
        super().__init__(hdfs)
        self.archives = archives

    def _server(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> Server:
        return super()._server(name, record_classes(command, self.archives), env)


def record_classes(command: Sequence[str | Path], folder: Path) -> list[str | Path]:
    """Return the command of a server that also writes its class archive into a folder."""
    (main,) = set(MAINS) & set(map(str, command))
    return [command[0], f"-XX:ArchiveClassesAtExit={folder / class_archive_of(main).name}", *command[1:]]


def make_archives() -> list[Path]:
    """Return the class archives of the servers, made anew where one is missing or older than the servers' jars."""
    archives = [class_archive_of(main) for main in MAINS]
    with locked(cache_folder() / "hadoop"):
        newest_jar = max(jar.stat().st_mtime for jar in yarn_classpath())
        if not all(archive.exists() and archive.stat().st_mtime > newest_jar for archive in archives):
            for archive in archives:
                archive.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_folder() / "hadoop") as scratch:
                with RecordedHdfs(Path(scratch)) as hdfs, RecordedYarn(hdfs, Path(scratch)) as yarn:
                    client = hdfs.client()
                    client.write("/file", b"content")
                    with client.read("/file") as reader:
                        reader.read()
                    end([*yarn.servers, *hdfs.servers])
                for archive in archives:
                    (Path(scratch) / archive.name).rename(archive)
    return archives


def end(servers: Sequence[Server]) -> None:
    """End servers in their regular way, which is when they write their archives."""
    for server in servers:
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
    for server in servers:
        assert server.process is not None
        server.process.wait(END_S)
