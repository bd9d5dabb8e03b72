"""The programs that the clusters run: java, pyspark and the jars of the Hadoop servers.

The servers come from hadoop-client-minicluster in the version of pyspark's own Hadoop client. Its 56 MB are downloaded
once into .cache/hadoop. The environment variable SHARDING_CACHE names another folder than .cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import JobError, UsageError
from tests.clusters.machine import ROOT, cache_folder, locked

MINICLUSTER = ("org.apache.hadoop", "hadoop-client-minicluster")
MINIKDC = ("org.apache.hadoop", "hadoop-minikdc")
KAFKA = ("org.apache.kafka", "kafka_2.13", "4.0.1", "40 MB")
# The newest connector that there is, and what it needs beside pyspark's own jars; Spark 4.3 has none of its own yet.
KAFKA_CONNECTOR = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0", "0.5 MB"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.2.0", "0.1 MB"),
    ("org.apache.kafka", "kafka-clients", "3.9.2", "9 MB"),
    ("org.apache.commons", "commons-pool2", "2.13.1", "0.2 MB"),
)
# Of Spark 4.1, whose environment is LAKE: neither library has a release for a newer Spark that both have.
DELTA = {
    "delta-spark_4.1_2.13": "9 MB",
    "delta-storage": "0.1 MB",
    "delta-kernel-api": "3 MB",
    "delta-kernel-defaults": "0.2 MB",
    "delta-kernel-unitycatalog": "0.1 MB",
}
DELTA_VERSION = "4.4.0"
ICEBERG = ("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0", "46 MB")
# The ResourceManager signs its proxy's certificates with these. The minicluster jar lacks them.
BOUNCY_CASTLE = {"bcprov-jdk18on": "8 MB", "bcpkix-jdk18on": "1 MB", "bcutil-jdk18on": "1 MB"}
BOUNCY_CASTLE_VERSION = "1.78.1"
WEBAPPS = "webapps/"

# ----------------------------------------------------------------------------------------------------
# Installed: pyspark and java


def spark_home() -> Path:
    """The folder of the running interpreter's pyspark package, which holds bin/ and jars/."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise UsageError(f"{sys.executable} has no pyspark: run `make setup` and use its environment")
    return Path(spec.origin).parent


def find_java(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Path:
    """The java program: JAVA_HOME's, else the one on PATH, else the one that `make setup` puts into .venv."""
    home = environ.get("JAVA_HOME")
    candidates = [Path(home) / "bin" / "java"] if home else []
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    candidates += [Path(on_path)] if on_path else []
    candidates += [root / ".venv" / "java" / "bin" / "java"]
    for java in candidates:
        if os.access(java, os.X_OK):
            return java
    raise UsageError("no java in JAVA_HOME, on PATH or in .venv/java: install Java 17 or run `make setup`")


def java_home(java: Path) -> Path:
    """The JAVA_HOME of a java program, which YARN's launch scripts need.

    Links are followed. A program outside its home, such as a version manager's shim, is asked for java.home.
    """
    home = java.resolve().parent.parent
    if (home / "bin" / "java").exists():
        return home
    command = [str(java), "-XshowSettings:properties", "-version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(re.findall(r"java\.home = (.*)", shown.stderr)[0])


def hadoop_version(jars: Path) -> str:
    """The version of pyspark's Hadoop client. Servers of another version may not speak its protocol."""
    found = sorted(jars.glob("hadoop-client-api-*.jar"))
    if not found:
        raise UsageError(f"{jars} has no hadoop-client-api jar: install pyspark from PyPI, which has it")
    return found[0].stem.removeprefix("hadoop-client-api-")


# ----------------------------------------------------------------------------------------------------
# Downloaded: jars from Maven Central


def fetch_jar(group: str, artifact: str, version: str, size: str, folder: Path) -> Path:
    """Return folder/artifact-version.jar, downloaded without its dependencies on first use.

    Maven downloads it where Maven is installed, because Maven knows its user's mirrors. Else pyspark's Ivy does. A
    rename puts the jar into the folder, so an interrupted download leaves no partial jar there. Raises JobError.
    """
    jar = folder / f"{artifact}-{version}.jar"
    if jar.exists():
        return jar
    folder.mkdir(parents=True, exist_ok=True)
    # Tests run in several processes. The first one downloads, and the others wait for it.
    with locked(folder.parent):
        if not jar.exists():
            _download(group, artifact, version, size, jar)
    return jar


def _download(group: str, artifact: str, version: str, size: str, jar: Path) -> None:
    print(f"downloading {group}:{artifact}:{version} ({size}) into {jar.parent}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=jar.parent) as scratch:
        reasons = []
        for name, command in _download_commands(group, artifact, version, scratch).items():
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            fetched = Path(scratch) / jar.name
            if done.returncode == 0 and fetched.exists():
                os.replace(fetched, jar)
                return
            reasons.append(f"{name}: {_first_error(done.stdout + done.stderr)}")
    where = f"check the network, or put it into {jar.parent}"
    raise JobError(f"could not download {jar.name} ({'; '.join(reasons)}): {where}")


def _download_commands(group: str, artifact: str, version: str, folder: str) -> dict[str, list[str]]:
    """The commands that can download the jar, by tool, in the order of preference."""
    commands = {}
    if maven := shutil.which("mvn"):
        goal = ["dependency:copy", f"-Dartifact={group}:{artifact}:{version}", f"-DoutputDirectory={folder}"]
        commands["mvn"] = [maven, "-B", "-q", *goal]
    ivy = next((spark_home() / "jars").glob("ivy-*.jar"))
    what = ["-dependency", group, artifact, version, "-notransitive", "-types", "jar"]
    where = ["-cache", f"{folder}/ivy", "-retrieve", f"{folder}/[artifact]-[revision].[ext]"]
    commands["ivy"] = [str(find_java()), "-jar", str(ivy), *what, *where]
    return commands


def fetch_with_dependencies(group: str, artifact: str, version: str, size: str) -> list[Path]:
    """The jars of an artifact and of all that it needs, downloaded into a folder of their own on first use by pyspark's Ivy.

    Raises JobError."""
    folder = cache_folder() / "maven" / f"{artifact}-{version}"
    with locked(folder.parent):
        if not folder.exists():
            print(f"downloading {group}:{artifact}:{version} ({size}) into {folder}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                ivy = next((spark_home() / "jars").glob("ivy-*.jar"))
                what = ["-dependency", group, artifact, version, "-types", "jar", "bundle"]
                where = ["-cache", f"{scratch}/ivy", "-retrieve", f"{scratch}/jars/[artifact]-[revision].[ext]"]
                command = [str(find_java()), "-jar", str(ivy), *what, *where]
                done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
                if done.returncode != 0 or not Path(scratch, "jars").is_dir():
                    cause = _first_error(done.stdout + done.stderr)
                    raise JobError(f"could not download {artifact} {version} ({cause}): check the network")
                os.replace(f"{scratch}/jars", folder)
    return sorted(folder.glob("*.jar"))


def _first_error(output: str) -> str:
    """The first line of a tool's output that reads as an error, without colour codes."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    error = re.compile(r"error|unresolved|not found|exception", re.IGNORECASE)
    errors = [line for line in lines if error.search(line)]
    return (errors or [line for line in lines if line] or ["no output"])[0][:200]


def unpack_webapps(jar: Path) -> Path:
    """Return a folder with the jar's webapps/, which include WebHDFS. They are unpacked on first use.

    A server that finds them inside the jar scans the whole jar at every start, which takes 4 s.
    """
    folder = jar.with_suffix(".web")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=jar.parent) as scratch:
            with zipfile.ZipFile(jar) as archive:
                webapps = [name for name in archive.namelist() if name.startswith(WEBAPPS)]
                archive.extractall(f"{scratch}/web", webapps)
            # The rename fails when another process has put the same files there first.
            with contextlib.suppress(OSError):
                os.rename(f"{scratch}/web", folder)
    return folder


def classes_of(jar: Path) -> Path:
    """Return a jar with all but the webapps/ of this one, uncompressed. It is made on first use.

    The folder of unpack_webapps() then counts behind it on a class path: a JVM refuses a class archive where a folder comes
    before a jar."""
    classes = jar.with_suffix(".classes.jar")
    if not classes.exists():
        with tempfile.TemporaryDirectory(dir=jar.parent) as scratch:
            with zipfile.ZipFile(jar) as whole, zipfile.ZipFile(f"{scratch}/jar", "w") as part:
                for entry in whole.infolist():
                    if not entry.filename.startswith(WEBAPPS):
                        part.writestr(zipfile.ZipInfo(entry.filename, entry.date_time), whole.read(entry))
            os.replace(f"{scratch}/jar", classes)
    return classes


def class_archive_of(main: str) -> Path:
    """Return the place of the archive of the classes that a Hadoop server loads. main: the server's class."""
    return cache_folder() / "hadoop" / f"{main.rpartition('.')[2]}.jsa"


# ----------------------------------------------------------------------------------------------------
# Class paths


def hadoop_classpath() -> list[Path]:
    """The class path of an HDFS server: its own jar, and pyspark's client libraries and logging."""
    jars = spark_home() / "jars"
    server = fetch_jar(*MINICLUSTER, hadoop_version(jars), "56 MB", cache_folder() / "hadoop")
    patterns = ("hadoop-client-api-*", "hadoop-client-runtime-*", "*slf4j*", "log4j*")
    libraries = sorted(jar for pattern in patterns for jar in jars.glob(f"{pattern}.jar"))
    return [unpack_webapps(server), classes_of(server), *libraries]


def minikdc_classpath() -> list[Path]:
    """The class path of Hadoop's KDC for tests."""
    return fetch_with_dependencies(*MINIKDC, hadoop_version(spark_home() / "jars"), "10 MB")


def kafka_classpath() -> list[Path]:
    """The class path of a Kafka broker."""
    return fetch_with_dependencies(*KAFKA)


def kafka_connector() -> list[Path]:
    """What Structured Streaming needs beside pyspark's own jars to read a topic: spark-submit's --jars."""
    return [fetch_jar(*jar, cache_folder() / "kafka") for jar in KAFKA_CONNECTOR]


def lake_jars() -> list[Path]:
    """Return the readers and writers of Delta and Iceberg tables for Spark: spark-submit's --jars."""
    folder = cache_folder() / "lake"
    delta = [fetch_jar("io.delta", name, DELTA_VERSION, size, folder) for name, size in DELTA.items()]
    return [*delta, fetch_jar(*ICEBERG, folder)]


def yarn_classpath() -> list[Path]:
    """The class path of a YARN server: HDFS's, and the 10 MB of Bouncy Castle."""
    folder = cache_folder() / "hadoop"
    group, version = "org.bouncycastle", BOUNCY_CASTLE_VERSION
    extra = [fetch_jar(group, name, version, size, folder) for name, size in BOUNCY_CASTLE.items()]
    return [*hadoop_classpath(), *extra]
