"""Shards as the trainer reads them: made by the pipeline, held against the input; broken in every way; HDFS failing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import DataError, UsageError
from trainer.data.shards import open_shards, store_of


def test_a_folder_without_a_set_names_a_job_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no manifest\.json: .* spark-submit jobs/stratified\.py .*--workers 4"):
        open_shards(str(tmp_path), num_workers=4)


@pytest.mark.parametrize("uri", ["webhdfs:///shards", "webhdfs://host:port/shards", "ftp://host/shards"])
def test_an_address_that_names_no_place_is_a_usage_error(uri: str) -> None:
    with pytest.raises(UsageError, match=uri):
        open_shards(uri)


def test_a_gateway_that_does_not_answer_is_named_at_once() -> None:
    with pytest.raises(OSError, match=r"webhdfs://127\.0\.0\.1:9/shards: .*refused; check that http://127\.0\.0\.1:9"):
        open_shards("webhdfs://127.0.0.1:9/shards")


def test_the_default_file_system_of_hadoop_is_asked_where_a_uri_names_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    with pytest.raises(UsageError, match=r"no fs\.defaultFS is configured"):
        open_shards("hdfs:///shards")
    property = "<property><name>fs.defaultFS</name><value>hdfs://names:8020</value></property>"
    (tmp_path / "core-site.xml").write_text(f"<configuration>{property}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert store_of("hdfs:///shards").resolve("hdfs:///shards") == "hdfs://names:8020/shards"
