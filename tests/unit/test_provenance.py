"""The recorded command of a result: as one would type it, and without secrets."""

from pathlib import Path

import pytest

import pipeline
from pipeline.core.provenance import command, provenance

MAIN = str(Path(str(pipeline.__file__)).parent / "__main__.py")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([MAIN, "sample", "--to", "a b"], "python -m pipeline sample --to 'a b'"),
        (["/x/bin/sharding", "shard", "--workers", "3"], "sharding shard --workers 3"),
        (["/tmp/spark-1/jobs/random.py", "--seed", "1"], "python jobs/random.py --seed 1"),
        (["a.py", "s3a://key:word@bucket/x"], "python a.py 's3a://***@bucket/x'"),
        (["a.py", "abfss://raw@lake.net/x"], "python a.py abfss://raw@lake.net/x"),
        (["a.py", "abfss://key:word@lake.net/x"], "python a.py 'abfss://***@lake.net/x'"),
        (
            ["a.py", "--option", "kafka.ssl.keystore.password=p=q"],
            "python a.py --option 'kafka.ssl.keystore.password=***'",
        ),
        (["a.py", "--api-token", "word"], "python a.py --api-token '***'"),
        (["a.py", "--kafka-option", "ssl.keystore.key=---a=b"], "python a.py --kafka-option 'ssl.keystore.key=***'"),
        (["a.py", "--kafka-option=fetch.max.wait.ms=5"], "python a.py '--kafka-option=fetch.max.wait.ms=***'"),
        (["a.py", "--conf", "fs.azure.account.key.a=w"], "python a.py --conf 'fs.azure.account.key.a=***'"),
    ],
)
def test_the_command_is_as_typed(argv: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    assert command(argv) == text


def test_an_argument_that_is_no_utf8_can_be_written() -> None:
    assert command(["a.py", "--config", "caf\udce9.toml"]) == r"python a.py --config 'caf\udce9.toml'"


def test_a_submitted_job_names_spark_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert command(["/opt/jobs/random.py"]) == "spark-submit jobs/random.py"


def test_the_origin_has_time_command_and_host() -> None:
    origin = provenance()
    assert set(origin) == {"time", "command", "host"}
    assert all(origin.values())
    assert origin["time"].endswith(" UTC")
