"""The start of a driver's JVM: what it needs from its environment on any machine, and its options."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.command_line import CONF
from pipeline.core.errors import JobError
from pipeline.spark.jvm import has_gateway, start_jvm

DRIVER_MEMORY = "spark.driver.memory"
LOCAL_IP = "SPARK_LOCAL_IP"  # the address of this machine for Spark, instead of its name's
# Most jobs end before code that the optimising compiler made pays its compilation back, a quarter of a small job's CPU
# time. A method is optimised after ten times the calls and iterations of the default, so that long jobs lose nothing.
LATE_OPTIMISATION = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000"
    " -XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
JAVA_TEMPORARY = "/tmp"  # the folder that Java uses by default


def jvm_options() -> str:
    """Return the options of a driver's JVM that are not Spark's: the log's settings and the start of optimisation.

    conf/setup.sh writes them into .venv/env.sh, for spark-submit."""
    log = f"-Dlog4j2.configurationFile={(CONF / 'log4j2.properties').as_uri()} " if isinstance(CONF, Path) else ""
    return log + LATE_OPTIMISATION


def prepare_jvm(defaults: Mapping[str, str]) -> bool:
    """Set the options that a driver's JVM needs when it starts: its address, its memory, its log and its compiler.

    Returns whether it gets an address that only this machine reaches, as its name has none. Raises JobError if there is no
    Java, and FileNotFoundError if the current folder has been deleted.

    A JVM that is running already, such as spark-submit's, has its options from its command line and environment."""
    if "PYSPARK_GATEWAY_PORT" in os.environ or has_gateway():
        return False
    os.getcwd()  # a JVM does not start in a deleted folder
    lacks_address = LOCAL_IP not in os.environ and not _has_address()
    if lacks_address:
        os.environ[LOCAL_IP] = "127.0.0.1"
    java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        raise JobError(f"no program {java}, which Spark needs: install Java 17 or newer, or set JAVA_HOME to one")
    if DRIVER_MEMORY in defaults:
        os.environ.setdefault("SPARK_DRIVER_MEMORY", defaults[DRIVER_MEMORY])
    own_log = bool({"SPARK_CONF_DIR", "SPARK_HOME"} & set(os.environ))
    os.environ.setdefault("SPARK_SUBMIT_OPTS", LATE_OPTIMISATION if own_log else jvm_options())
    # Java takes the home folder from /etc/passwd, not from HOME, and ignores TMPDIR.
    if is_nameless():
        _add_option("user.home", os.environ.get("HOME") or tempfile.gettempdir())
    if not os.access(JAVA_TEMPORARY, os.W_OK | os.X_OK):
        _add_option("java.io.tmpdir", tempfile.gettempdir())
    return lacks_address


def _add_option(name: str, folder: str) -> None:
    """Add a folder to the options of the JVM, unless they name one."""
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if f"-D{name}=" not in options:
        os.environ["SPARK_SUBMIT_OPTS"] = f'{options} "-D{name}={folder}"'.strip()


def _has_address() -> bool:
    """True if this machine's name has an address, without which Spark does not start."""
    try:
        socket.getaddrinfo(os.fsencode(socket.gethostname()), None)
    except OSError:
        return False
    return True


def is_nameless() -> bool:
    """True if the user id of this process has no entry in /etc/passwd, as in a container started with a numeric
    user."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return False


def name_user() -> None:
    """Log in at Hadoop as HADOOP_USER_NAME, else as USER, else as the number of the user id.

    Java's own login fails for a user id without a name."""
    user = os.environ.get("HADOOP_USER_NAME") or os.environ.get("USER") or str(os.geteuid())
    information = start_jvm().org.apache.hadoop.security.UserGroupInformation
    information.setLoginUser(information.createRemoteUser(user))
