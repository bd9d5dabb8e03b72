"""Properties of Kafka's consumer, and messages whose time lies ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.core.command_line import parse
from pipeline.core.errors import UsageError
from pipeline.stream.command import preflight, read_request, stream_parser
from pipeline.stream.kafka import _write_landed, stream_of_topic
from pipeline.stream.kafka_options import consumer_options, properties
from tests.support.places import STORE
from tests.unit.test_quarantine import aside

CLIENT = r"""# As Kafka's own tools take it.
! another comment

security.protocol=SASL_SSL
  sasl.mechanism : PLAIN
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
    username="a" \
    password="s=e:c\\r";
ssl.truststore.password = p\u00e4ss word
ssl.truststore.location /etc/kafka\
/trust.jks
client.rack=
"""
JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="a" password="s=e:c\\r";'


def test_a_properties_file_is_read_as_java_reads_it() -> None:
    assert properties(CLIENT) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": JAAS,
        "ssl.truststore.password": "päss word",
        "ssl.truststore.location": "/etc/kafka/trust.jks",
        "client.rack": "",
    }
    assert properties("a\\ b\\:c=\\=d\\te\r\nx\\\\=y\n z") == {"a b:c": "=d\te", "x\\": "y", "z": ""}
    assert properties("a=1\na=2\nlast=\\") == {"a": "2", "last": ""}


def test_options_go_over_the_file_with_or_without_the_prefix(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SSL\nkafka.ssl.protocol=TLSv1.3\n")
    given = ["kafka.security.protocol=SASL_SSL", "sasl.jaas.config=a b=c;"]
    assert consumer_options(given, str(file)) == {
        "security.protocol": "SASL_SSL",
        "ssl.protocol": "TLSv1.3",
        "sasl.jaas.config": "a b=c;",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hunter2", "needs KEY=VALUE"),
        ("bootstrap.servers=hunter2", "the stream sets bootstrap.servers itself"),
        ("kafka.Auto.Offset.Reset=hunter2", "the stream sets Auto.Offset.Reset itself"),
        ("startingOffsets=hunter2", "'startingOffsets' is not a property of a Kafka consumer"),
        ("=hunter2", "'' is not a property"),
    ],
)
def test_a_wrong_property_is_one_line_without_its_value(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        consumer_options([text], None)
    assert "hunter2" not in str(raised.value)
    file = tmp_path / "client.properties"
    file.write_text(text)
    if "=" in text:
        with pytest.raises(UsageError, match=words) as raised:
            consumer_options([], str(file))
        assert f"--kafka-options {file}: " in str(raised.value)
        assert "hunter2" not in str(raised.value)
    with pytest.raises(UsageError, match="No such file or directory; give a local file of the driver"):
        consumer_options([], str(tmp_path / "nowhere"))


def options_of(*argv: str) -> dict[str, str]:
    flags = stream_parser("hash_stream.py", None)
    args = parse(flags, [*argv, "--output", "/o", "--workers", "2"])
    return preflight(args, read_request(args))


def test_a_stream_with_ready_functions_takes_no_options_of_a_fit() -> None:
    with pytest.raises(UsageError, match=r"^--model /set has functions already: leave out --functions 9$"):
        options_of("--source", "kafka://h:1/rows", "--model", "/set", "--functions", "9")


def test_the_flag_may_be_repeated_and_a_toml_file_holds_a_list(tmp_path: Path) -> None:
    topic = ("--source", "kafka://h:1/rows")
    given = ("--kafka-option", "client.id=a", "--kafka-option", "client.rack=r=1")
    assert options_of(*topic, *given) == {"client.id": "a", "client.rack": "r=1"}
    assert options_of(*topic) == {}
    config = tmp_path / "c.toml"
    config.write_text('kafka_option = ["client.id=file", "security.protocol=SSL"]')
    expected = {"client.id": "a", "client.rack": "r=1", "security.protocol": "SSL"}
    assert options_of(*topic, *given, "--config", str(config)) == expected
    assert options_of(*topic, "--config", str(config)) == {"client.id": "file", "security.protocol": "SSL"}
    config.write_text('kafka_option = "client.id=hunter2"')
    with pytest.raises(UsageError, match=r"kafka_option is not a list of texts, such as \[\"KEY=VALUE\"\]") as raised:
        options_of(*topic, "--config", str(config))
    assert "hunter2" not in str(raised.value)
    with pytest.raises(UsageError, match="--kafka-option applies to messages, but --source"):
        options_of("--source", str(tmp_path), *given)


class Reader:
    """Spark's reader, which only keeps its options."""

    def __init__(self) -> None:
        self.readStream = self
        self.kept: dict[str, Any] = {}

    def option(self, key: str, value: Any) -> Reader:
        return self.options(**{key: value})

    def options(self, **options: Any) -> Reader:
        self.kept |= options
        return self

    def format(self, name: str) -> Reader:
        return self

    def load(self) -> Reader:
        return self

    def selectExpr(self, *columns: str) -> Reader:
        return self


def test_sparks_source_gets_the_properties() -> None:
    spark: Any = Reader()
    stream_of_topic(spark, "kafka://h:1/rows", None, False, {"security.protocol": "SSL"})
    assert spark.kept == {
        "kafka.security.protocol": "SSL",
        "kafka.bootstrap.servers": "h:1",
        "subscribe": "rows",
        "startingOffsets": "earliest",
        "failOnDataLoss": True,
    }


def test_a_message_from_the_future_makes_no_other_late(tmp_path: Path) -> None:
    now_ms = 1_700_000_000_000
    times = [now_ms - 100_000, now_ms + 10**9, now_ms - 50_000, now_ms - 400_000]
    columns = {
        "partition": pa.array([2] * 4, pa.int32()),
        "offset": pa.array(range(4), pa.int64()),
        "time_ms": pa.array(times, pa.int64()),
        "value": pa.array([b"ab"] * 4, pa.binary()),
    }
    (tmp_path / "attempt").mkdir()
    messages = [pa.RecordBatch.from_pydict(columns)]
    output = str(tmp_path / "set")
    (landed,) = _write_landed(STORE, output, 0, str(tmp_path / "attempt"), 2, 60.0, now_ms - 300_000, now_ms, messages)
    (row,) = landed.to_pylist()
    assert (row["newest_ms"], row["ahead"], row["aside"], row["bytes"]) == (now_ms - 50_000, 1, 1, 6)
    (line,) = aside(tmp_path / "set")
    assert line["source"] == "partition 2, offset 3"
