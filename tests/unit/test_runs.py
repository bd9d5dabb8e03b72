"""``sharding runs`` and ``sharding report`` on runs in virtual time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer import Options
from trainer.comparison.__main__ import main, read_run, unit_of_time
from trainer.report_command import main as make_report
from trainer.simulate import SimulationSettings, simulate

QUIET = Options(silent=True, report=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two runs on the same shards that differ in their protocol."""
    folder = tmp_path_factory.mktemp("runs")
    shards = write_shards(folder, [rows_of(30, 2), rows_of(50, 3, 100)], EVAL_ROWS)
    for protocol in ("asp", "bsp"):
        config = make_config(shards, folder / protocol, model="cnn", protocol=protocol, steps=6, batch_size=10)
        simulate(config, SimulationSettings(), QUIET)
    return str(folder / "asp"), str(folder / "bsp")


@pytest.mark.slow
def test_runs_are_compared_with_the_settings_that_differ(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*runs, "--output", str(tmp_path / "out"), "--accuracy", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == list(runs)
    settings = {line.split()[0] for line in lines[4:-1]}
    assert "--protocol" in settings
    assert settings <= {"--protocol", "--learning-rate", "--momentum"}
    assert lines[-1] == f"picture: {tmp_path}/out/comparison.png"
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    table = json.loads((tmp_path / "out" / "comparison.json").read_text())
    results = [json.loads((Path(run) / "result.json").read_text()) for run in runs]
    assert [run["updates"] for run in table["runs"]] == [result["updates"] for result in results]
    assert table["accuracy"] == 0.01
    assert main([runs[0]]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The runs have the same settings."


def test_an_unfinished_run_is_compared_as_far_as_it_is(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name in ("config.json", "metrics.jsonl", "pushes.csv"):
        (unfinished / name).write_bytes((Path(runs[0]) / name).read_bytes())
    assert main([str(unfinished), runs[1]]) == 0
    assert str(unfinished) in capsys.readouterr().out


def test_virtual_and_real_times_are_told_apart(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run is in real time by its configuration, and has begun without any loss."""
    real = tmp_path / "real"
    real.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (real / name).write_bytes((Path(runs[0]) / name).read_bytes())
    config = json.loads((real / "config.json").read_text())
    config["simulated"] = None
    (real / "config.json").write_text(json.dumps(config))
    compared = [read_run(run) for run in (runs[0], str(real))]
    assert unit_of_time(compared) == "real or virtual second"
    assert [unit_of_time(compared[at : at + 1]) for at in (0, 1)] == ["virtual second", "second"]
    assert main([runs[0], str(real)]) == 0
    said = capsys.readouterr()
    assert (
        said.err == f"note: times and images/s of {runs[0]} are in virtual time, those of the other runs in real time\n"
    )
    assert re.search(r"s to loss \d", said.out), "the goal is the other run's"


@pytest.mark.slow
def test_a_report_is_made_anew(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert make_report([runs[0]]) == 0
    assert capsys.readouterr().out == f"report: {runs[0]}/report.html\n"
    assert "Share of the rows of a class" in (Path(runs[0]) / "report.html").read_text()


def test_a_folder_without_a_run_or_set_is_one_line(runs: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json: it is not the folder of a run"):
        main([str(tmp_path)])
    with pytest.raises(UsageError, match=r"a run is given twice"):
        main([runs[0], f"{runs[0]}/"])
    with pytest.raises(UsageError, match=r"must be a finite number|must be a share"):
        main([runs[0], "--loss", "nan"])
    with pytest.raises(DataError, match=r"holds neither a committed shard set .* nor a training run"):
        make_report([str(tmp_path)])
    later = json.loads((Path(runs[0]) / "config.json").read_text())
    later["config"]["protocol"] = {"name": "of-a-later-version"}
    for text in ("{}", json.dumps(later)):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DataError, match=r"config\.json is damaged, or of another version"):
            main([str(tmp_path)])


def test_a_picture_is_not_written_beside_a_store_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse it before any run is read; a folder s3: in the current one would be the place."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--output s3://b/x must be a folder of this machine"):
        main(["run", "--output", "s3://b/x"])
    assert not list(tmp_path.iterdir())
