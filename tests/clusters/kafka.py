"""A Kafka broker on this machine: the class Kafka."""

from __future__ import annotations

import os
import socket
import subprocess
from datetime import timedelta
from pathlib import Path

from pipeline.core.errors import JobError
from tests.clusters.artifacts import find_java, kafka_classpath
from tests.clusters.machine import HOST, free_ports
from tests.clusters.servers import Cluster, Server, server_environment, wait_until
from tests.clusters.settings import QUICK_START

START_TIMEOUT = timedelta(seconds=60)
LOGIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
USER, PASSWORD = "reader", "k4fk4-pass"  # of the listener that asks for them
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qg"
SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{port},SASL_PLAINTEXT://{host}:{sasl},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port},SASL_PLAINTEXT://{host}:{sasl}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config={login_module} required user_{user}="{password}";
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
num.partitions={partitions}
"""


class Kafka(Cluster):
    """One broker that is its own controller (KRaft). It takes 6 s to start and 300 MB of memory. A topic comes up with its
    first message.

    servers_at: HOST:PORT; sasl_at: HOST:PORT of a listener that asks for USER and PASSWORD; partitions: of a topic."""

    partitions = 2

    def __init__(self) -> None:
        super().__init__()
        self.port, self.sasl, self.controller = free_ports(3)
        self.servers_at = f"{HOST}:{self.port}"
        self.sasl_at = f"{HOST}:{self.sasl}"

    def start(self) -> None:
        settings = self.folder / "server.properties"
        ports = {"host": HOST, "port": self.port, "sasl": self.sasl, "controller": self.controller}
        login = {"login_module": LOGIN_MODULE, "user": USER, "password": PASSWORD}
        settings.write_text(SETTINGS.format(**ports, **login, folder=self.folder, partitions=self.partitions))
        java = find_java()
        base = [str(java), "-Xmx300m", *QUICK_START, "-cp", os.pathsep.join(map(str, kafka_classpath()))]
        env = server_environment(java)
        form = [*base, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(settings)]
        done = subprocess.run(form, capture_output=True, text=True, env=env, check=False)
        if done.returncode != 0:
            raise JobError(f"Kafka's StorageTool format ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        server = Server("kafka", [*base, "kafka.Kafka", str(settings)], Path(self.folder, "logs", "kafka.log"), env)
        self.servers = [server]
        server.start()
        wait_until(self._answers, "the Kafka broker", self.servers, START_TIMEOUT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1):
                return True
        except OSError:
            return False
