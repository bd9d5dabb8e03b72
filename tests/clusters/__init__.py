"""Real clusters on this machine's loopback address: HDFS, Spark standalone, YARN, S3 and Kafka. Each server is a process.

Hdfs, Standalone, Yarn, S3 and Kafka are context managers for tests. Each cluster has free ports and a folder of its own,
and it leaves nothing behind, even when the test process is killed. spark_submit() runs a job on any of them.

`python -m tests.clusters hdfs up|down|status` keeps one HDFS for a developer. Its ports are fixed, and its files
survive down and up.

The modules, each of which imports only from those before it: machine, artifacts, settings, processes, interpreter,
servers; then hdfs, standalone, yarn, archives, environments, s3, kafka and submit; then command and fixtures.
"""

from tests.clusters.hdfs import Hdfs
from tests.clusters.kafka import Kafka
from tests.clusters.machine import ROOT, free_ports
from tests.clusters.processes import end_tree
from tests.clusters.s3 import S3
from tests.clusters.settings import QUICK_START
from tests.clusters.standalone import Standalone
from tests.clusters.submit import spark_submit
from tests.clusters.yarn import Yarn

__all__ = ["QUICK_START", "ROOT", "S3", "Hdfs", "Kafka", "Standalone", "Yarn", "end_tree", "free_ports", "spark_submit"]
