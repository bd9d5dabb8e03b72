"""jobs/hash_stream.py as a user runs it: files and messages arrive, and somebody ends it gently, or not."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipeline.core.shardset.generations import generations
from pipeline.core.shardset.manifest import open_committed, read_committed
from tests.campaigns.stream import Arriving, campaign, start_stream
from tests.clusters import ROOT, Kafka, end_tree, spark_submit
from tests.clusters.artifacts import kafka_connector
from tests.clusters.cluster_runs import QUIET
from tests.clusters.kafka import LOGIN_MODULE, PASSWORD, USER
from tests.clusters.submit import start_submit
from tests.conftest import make_rows
from tests.support.application import run_application, run_job
from tests.support.commands import BATCH, plan_batch
from tests.support.places import STORE, elsewhere
from tests.support.stream_runs import check_set, rows_of, take
from tests.support.trainer_runs import until
from tests.unit.test_metrics_file import metrics_of

pytestmark = pytest.mark.full
JOB = ROOT / "jobs" / "hash_stream.py"
SHAPE = ("--format", "cifar10-binary", "--image-shape", "3x8x8", "--family", "sign", "--functions", "6")


def number(output: str) -> int:
    found = read_committed(STORE, output)
    return len(generations(found)) if found else 0


def has(output: str, count: int) -> bool:
    return number(output) >= count


def test_existing_files_are_drained_and_later_ones_appended(spark: SparkSession, tmp_path: Path) -> None:
    """Files that are there are drained in batches and those that come later are appended."""
    source, output = Arriving(str(tmp_path / "in"), 7, seed=3), str(tmp_path / "set")
    for _ in range(5):
        source.arrive()
    flags = ("--source", source.folder, "--output", output, "--workers", 3, "--trigger", "once", *SHAPE)
    limits = ("--batch-limit", 2, "--window-rows", 200, "--metrics-file", tmp_path / "job.prom")
    first = spark_submit(JOB, *flags, *limits, env=QUIET)
    assert first.returncode == 0, first.stderr
    assert [generation.rows for generation in generations(open_committed(STORE, output))] == [120, 120, 60]
    assert "rows per second" in first.stdout + first.stderr
    assert "32 bytes of state each" in first.stdout + first.stderr
    assert (tmp_path / "set" / "report.html").exists()
    labels = {"output": output, "strategy": "stream"}
    found = metrics_of(tmp_path / "job.prom", labels)
    names = ("exit_code", "committed", "rows", "generations", "generation_rows")
    assert [found[name] for name in names] == [0, 1, 300, 3, 60]
    source.arrive()
    second = run_job("hash_stream.py", *flags, *limits, "--no-report")
    assert second.code == 0, second.err
    shards = check_set(output, source.images[: source.rows], source.labels[: source.rows])
    assert [generation.batch for generation in generations(shards)] == [0, 1, 2, 3]
    assert not (tmp_path / "set" / "report.html").exists(), "it told of fewer rows"
    # The same batches without Spark's streaming, in this process, give the same bits.
    files = sorted((tmp_path / "in").iterdir())
    for batch, some in enumerate((files[:2], files[2:4], files[4:5], files[5:])):
        take(spark.sparkContext, tmp_path / "here", batch, some, window_rows=200)
    here = open_committed(STORE, str(tmp_path / "here"))
    assert [file.sha256 for file in here.files()] == [file.sha256 for file in shards.files()]


def test_a_stream_stops_after_the_current_batch(spark: SparkSession, tmp_path: Path) -> None:
    """A stream that is asked to end does after the batch that is at work."""
    source, output, log = Arriving(str(tmp_path / "in"), 12, seed=4), str(tmp_path / "set"), tmp_path / "log.txt"
    source.arrive()
    job = start_stream(source.folder, output, "1 second", log)
    try:
        until(lambda: number(output), "a generation")
        for _ in range(9):
            source.arrive()
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(180) == 0, log.read_text()
    finally:
        end_tree([job])
    assert "stopping after the current batch" in log.read_text()
    assert "Traceback" not in log.read_text()
    flags = ("--source", source.folder, "--output", output, "--workers", 3, "--trigger", "once", *SHAPE)
    last = run_job("hash_stream.py", *flags, "--window-rows", 500, "--no-report")
    assert last.code == 0, last.err
    check_set(output, source.images[: source.rows], source.labels[: source.rows])


def test_killed_committing_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    """A short campaign; python -m tests.campaigns.stream has longer ones."""
    tally = elsewhere(campaign, str(tmp_path), 12, 7)
    assert tally["kills"] == 12
    assert tally["generations"] > 0
    assert tally["reads"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--source", "IN", "--workers", "0"), "--workers must be at least 1, got 0"),
        (
            ("--source", "IN", "--workers", "2", "--allow-data-loss"),
            "--allow-data-loss applies to messages, but --source",
        ),
        (("--source", "IN", "--workers", "2", "--trigger", "soon"), "--trigger must be a time such as '30 seconds'"),
        (("--source", "IN", "--workers", "2", "--trigger", "1.5 minutes"), "--trigger must be a time such as"),
        (("--source", "IN", "--workers", "2", "--trigger", "5seconds"), "--trigger must be a time such as"),
        (("--source", "IN", "--workers", "2", "--trigger", "99999999999 days"), "--trigger must be a time such as"),
        (("--source", "FILE", "--workers", "2"), "is a file; name the folder in which files arrive"),
        (("--source", "IN", "--workers", "2", "--checkpoint", "IN"), "--checkpoint IN and the input"),
        (("--source", "IN", "--workers", "2", "--checkpoint", "OUT"), "is the set itself; choose a folder of its own"),
        (("--source", "s3://bucket/in", "--workers", "2"), "local folders and hdfs://"),
        (("--source", "IN", "--workers", "2", "--window-rows", "-1"), "--window-rows must be 0 or more, got -1"),
        (("--source", "IN", "--workers", "2", "--batch-limit", "0"), "--batch-limit must be from 1 to 2,147"),
        (("--source", "IN", "--workers", "2", "--batch-limit", "9" * 20), "--batch-limit must be from 1 to 2,147"),
        (("--source", "IN", "--workers", "2", "--checkpoint", "s3://b/c"), "give --checkpoint"),
        (("--source", "kafka://host:1", "--workers", "2"), "is not kafka://HOST:PORT/TOPIC"),
        (("--source", "kafka://127.0.0.1:1/rows", "--workers", "2"), "spark-sql-kafka-0-10"),
        (("--source", "OUT/in", "--workers", "2"), "overlap"),
        (
            ("--source", "IN", "--workers", "2", "--kafka-option", "a.b=c"),
            "--kafka-option applies to messages, but --source",
        ),
        (("--source", "IN/{ds}", "--workers", "2"), "contains {ds}, but --ds is not given"),
        (("--source", "IN", "--workers", "2", "--run-id", "../x"), "--run-id '../x' may contain only letters"),
        (("--source", "IN", "--workers", "2", "--late-after", "nan"), "--late-after must be a positive number"),
        (("--source", "IN[1]", "--workers", "2"), "as a pattern; choose a folder without them"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "file").touch()
    places = {"FILE": str(tmp_path / "file"), "OUT": str(tmp_path / "set")}
    places |= {"IN": str(tmp_path / "in"), "IN[1]": str(tmp_path / "in[1]"), "OUT/in": str(tmp_path / "set" / "in")}
    done = run_job("hash_stream.py", *(places.get(flag, flag) for flag in flags), "--output", tmp_path / "set")
    assert done.code == 2, done.out + done.err
    errors = [line for line in (done.out + done.err).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words.replace("IN", places["IN"]) in errors[0]
    assert not (tmp_path / "set").exists()
    assert "Traceback" not in done.out + done.err


def test_what_is_not_read_of_a_source_folder_is_reported(tmp_path: Path) -> None:
    """A folder in it is refused before there is a set; later it is a warning, and so is a file that has changed."""
    source = Arriving(str(tmp_path / "in"), 3, seed=6)
    source.arrive()
    flags = ("--source", source.folder, "--output", tmp_path / "set", "--workers", 3, "--trigger", "once", *SHAPE)
    (tmp_path / "in" / "more").mkdir()
    refused = run_job("hash_stream.py", *flags, "--no-report")
    assert refused.code == 3, refused.err
    assert f"error: {source.folder}/more is a folder inside the source" in refused.err
    (tmp_path / "in" / "more").rmdir()
    (file,) = (tmp_path / "in").iterdir()
    assert run_job("hash_stream.py", *flags, "--no-report").code == 0
    (tmp_path / "in" / "more").mkdir()
    with file.open("ab") as out:
        out.write(b"more")
    source.arrive()
    done = run_job("hash_stream.py", *flags, "--no-report", "--quiet")
    assert done.code == 0, done.err
    at_start, changed, in_batch = [line for line in done.err.splitlines() if "warning: " in line]
    assert f"warning: not read: {source.folder}/more/; " in at_start
    assert f"warning: {file} was replaced or appended to after a batch took it" in changed
    assert f"warning: batch 1: {file} was replaced or appended to after a batch took it" in in_batch


def test_another_checkpoint_is_refused_before_a_row_is_doubled(tmp_path: Path) -> None:
    """The stream's own checkpoint finishes, without new files, what a killed start has left undone after its commit."""
    source, output = Arriving(str(tmp_path / "in"), 3, seed=6), tmp_path / "set"
    source.arrive()
    flags = ("--source", source.folder, "--output", output, "--workers", 3, "--trigger", "once", *SHAPE)
    assert run_job("hash_stream.py", *flags, "--no-report").code == 0
    other = run_job("hash_stream.py", *flags, "--checkpoint", tmp_path / "other")
    assert other.code == 2, other.err
    assert "was written with another checkpoint" in other.err
    assert not (tmp_path / "other").exists()
    newest = (output / "manifest.json").read_bytes()
    (output / "manifest.json").unlink()
    stray = output / "worker=000" / "part-00009-v1-0123456789ab.parquet"
    stray.touch()
    again = run_job("hash_stream.py", *flags)
    assert again.code == 0, again.err
    assert f"{output}: 0 generations, 0 rows" in again.out
    assert (output / "manifest.json").read_bytes() == newest
    assert not stray.exists()
    assert (output / "report.html").exists()
    check_set(str(output), source.images[: source.rows], source.labels[: source.rows])


def test_a_wrong_start_leaves_a_growing_set_as_it_is(tmp_path: Path) -> None:
    """It is refused before Spark plans a batch of it, which every later start would repeat."""
    source, output = Arriving(str(tmp_path / "in"), 3, seed=6), str(tmp_path / "set")
    source.arrive()
    wrong = Arriving(str(tmp_path / "wrong" / "label=3"), 3, seed=7)
    wrong.arrive()
    flags = ("--output", output, "--trigger", "once", *SHAPE, "--no-report")
    assert run_job("hash_stream.py", "--source", source.folder, "--workers", 3, *flags).code == 0
    other = run_job("hash_stream.py", "--source", tmp_path / "wrong", "--workers", 3, *flags)
    assert other.code == 2, other.err
    assert "give that --source" in other.err
    more = run_job("hash_stream.py", "--source", source.folder, "--workers", 4, *flags)
    assert more.code == 2, "although nothing new has arrived"
    assert "holds a stream of another configuration" in more.err
    source.arrive()
    done = run_job("hash_stream.py", "--source", source.folder, "--workers", 3, *flags)
    assert done.code == 0, done.err
    check_set(output, source.images[: source.rows], source.labels[: source.rows])


# --- Kafka ----------------------------------------------------------------------------------------------------------------

PRODUCE = """
import sys
from pyspark.sql import SparkSession
from tests.conftest import make_rows

servers, topic, first, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
labels, images = make_rows(600, pixels=192)
rows = [(row % 2, bytearray(bytes([labels[row]]) + images[row].tobytes())) for row in range(first, end)]
rows.insert(5, (0, bytearray(b"broken")))
rows.insert(8, (1, None))
table = SparkSession.builder.getOrCreate().createDataFrame(rows, "partition int, value binary").coalesce(1)
writer = table.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", topic)
# One request at a time. While a topic is being created, a broker can refuse the first request and accept the second; it then
# refuses the first for ever (KAFKA-15591).
writer.option("kafka.max.in.flight.requests.per.connection", 1).save()
sys.exit(0)
"""


@pytest.fixture(scope="module")
def jars() -> dict[str, str]:
    return {"spark.jars": ",".join(map(str, kafka_connector()))}


def produce(folder: Path, broker: Kafka, first: int, end: int, topic: str = "rows") -> tuple[object, ...]:
    """Return the command of a program that sends some rows and two broken messages to a topic."""
    program = folder / "produce.py"
    program.write_text(PRODUCE)
    return program, broker.servers_at, topic, first, end


def test_a_killed_driver_neither_loses_nor_doubles_messages(tmp_path: Path, kafka: Kafka, jars: dict[str, str]) -> None:
    """Messages of a real broker are in the set once though the driver is killed."""
    labels, images = make_rows(600, pixels=192)
    output, log = str(tmp_path / "set"), tmp_path / "log.txt"

    def flags(trigger: str) -> tuple[object, ...]:
        source = ("--source", f"kafka://{kafka.servers_at}/rows", "--output", output, "--workers", 3, *SHAPE)
        return (*source, "--trigger", trigger, "--batch-limit", 60, "--no-report")

    first = plan_batch([produce(tmp_path, kafka, 0, 400), (JOB, *flags("1 second"))], path=[ROOT], spark=True)
    with log.open("ab") as out:
        job = start_submit(BATCH, first, conf=jars, env=QUIET, output=out)
    try:
        until(lambda: has(output, 2) or job.poll() is not None, "two generations")
        assert job.poll() is None, log.read_text()
    finally:
        end_tree([job])
    plan = [produce(tmp_path, kafka, 400, 600), (JOB, *flags("once"))]
    (sent, last), printed = run_application(tmp_path, plan, conf=jars, env=QUIET)
    assert (sent.code, last.code) == (0, 0), last.err + printed
    shards = open_committed(STORE, output)
    owners = sorted((row for row in rows_of(shards) if row["copy"] == 0), key=lambda row: row["id"])
    place = {image.tobytes(): row for row, image in enumerate(images)}
    arrived = [place[row["image"]] for row in owners]
    assert sorted(set(range(600)) - set(arrived)) == [], "no message is lost"
    assert len(arrived) == 600, "every message is there once"
    for partition in (0, 1):  # in the order of their offsets
        assert [row for row in arrived if row % 2 == partition] == list(range(partition, 600, 2))
    check_set(output, images[arrived], labels[arrived])
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "set" / "_quarantine").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert sorted((line["source"].partition(",")[0], line["value"]) for line in lines) == [
        ("partition 0", "YnJva2Vu"),
        ("partition 0", "YnJva2Vu"),
        ("partition 1", None),
        ("partition 1", None),
    ]


def test_a_broker_that_asks_for_a_password_is_read(tmp_path: Path, kafka: Kafka, jars: dict[str, str]) -> None:
    """The password is in no line that the job prints, in no file of its set and not in Spark's event log."""
    (tmp_path / "events").mkdir()
    events = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{tmp_path}/events"}

    def stream(password: str, *more: object) -> tuple[object, ...]:
        file = tmp_path / f"client-{password[:2]}.properties"
        login = f'{LOGIN_MODULE} required \\\n    username="{USER}" \\\n    password="{password}";'
        file.write_text(f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config={login}\n")
        flags = ("--source", f"kafka://{kafka.sasl_at}/secured", "--output", tmp_path / "set", "--workers", 3, *SHAPE)
        return (JOB, *flags, "--kafka-options", file, "--trigger", "once", "--no-report", *more)

    plan = [produce(tmp_path, kafka, 0, 100, "secured"), stream("wr0ng-pass")]
    plan.append(stream(PASSWORD, "--kafka-option", "client.id=here"))
    (sent, refused, done), rest = run_application(tmp_path, plan, conf=jars | events, env=QUIET)
    assert (sent.code, refused.code, done.code) == (0, 1, 0), rest
    (line,) = [line for line in refused.err.splitlines() if line.startswith("error: ")]
    assert "Authentication failed" in line
    assert open_committed(STORE, str(tmp_path / "set")).manifest.rows == 100
    printed = [rest, refused.out, refused.err, done.out, done.err]
    written = [
        path.read_bytes() for folder in ("set", "events") for path in (tmp_path / folder).rglob("*") if path.is_file()
    ]
    for secret in ("wr0ng-pass", PASSWORD):
        assert not any(secret in text for text in printed)
        assert not any(secret.encode() in data for data in written)


DELETE = """
import sys
from pyspark.sql import SparkSession

servers, topic, partition, before = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
gateway = SparkSession.builder.getOrCreate().sparkContext._gateway
jvm = gateway.jvm
settings = jvm.java.util.Properties()
settings.setProperty("bootstrap.servers", servers)
admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
place = jvm.org.apache.kafka.common.TopicPartition(topic, partition)
# py4j takes RecordsToDelete.beforeOffset(offset) for the method of the same name that has no argument.
types, values = gateway.new_array(jvm.java.lang.Class, 1), gateway.new_array(jvm.java.lang.Object, 1)
types[0], values[0] = jvm.java.lang.Long.TYPE, before
kind = jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(
    "org.apache.kafka.clients.admin.RecordsToDelete"
)
records = kind.getMethod("beforeOffset", types).invoke(None, values)
admin.deleteRecords(jvm.java.util.Collections.singletonMap(place, records)).all().get()
admin.close()
sys.exit(0)
"""


def test_deleted_messages_end_the_stream_or_are_quarantined(tmp_path: Path, kafka: Kafka, jars: dict[str, str]) -> None:
    """Messages that the broker has deleted end the stream or are told of."""
    _, images = make_rows(600, pixels=192)
    output, program = str(tmp_path / "set"), tmp_path / "delete.py"
    program.write_text(DELETE)

    source = ("--source", f"kafka://{kafka.servers_at}/aged", "--output", output, "--workers", 3, *SHAPE)
    stream = (JOB, *source, "--trigger", "once", "--no-report")
    plan = [
        produce(tmp_path, kafka, 0, 100, "aged"),
        stream,
        produce(tmp_path, kafka, 100, 200, "aged"),
        # of partition 0, 51 messages have been read: 50 records and a broken one
        (program, kafka.servers_at, "aged", 0, 71),
        stream,
        (*stream, "--allow-data-loss"),
    ]
    ended, rest = run_application(tmp_path, plan, conf=jars, env=QUIET)
    assert [each.code for each in ended] == [0, 0, 0, 0, 3, 0], rest + ended[-1].err
    refused = ended[-2]
    (line,) = [line for line in refused.err.splitlines() if line.startswith("error: ")]
    assert "messages were deleted before they were read" in line
    assert "(Could not read records in offset [51, 102) for topic partition aged-0)" in line
    assert line.endswith("Restart with --allow-data-loss to continue without them: the quarantine lists them")
    assert "Traceback" not in refused.out + refused.err
    shards = open_committed(STORE, output)
    assert [generation.rows for generation in generations(shards)] == [100, 81], "the refused start has added none"
    held = {row["image"] for row in rows_of(shards)}
    # The 20 messages that were deleted are the broken one among the first, and 19 records.
    gone = [row for row in range(200) if images[row].tobytes() not in held]
    assert gone == list(range(100, 138, 2))
    path = tmp_path / "set" / "_quarantine" / "batch-00000001.jsonl"
    (told,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (told["source"], told["records"]) == ("partition 0, offsets 51 to 70", 20)
