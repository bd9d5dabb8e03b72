"""The trainer's command line: flags over TOML over defaults, roles, the plan, and whole lives of runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import command_line
from pipeline.errors import DataError, JobError, UsageError
from pipeline.spark.session import PACKAGE
from tests.configs import change, make_config
from tests.test_evaluator import EVAL_ROWS, rows_of, write_shards
from tests.test_run_folder import content, finished, unfinished
from tests.trainer_runs import Training
from trainer.__main__ import main
from trainer.config import Config, Data, Facts, Optimiser, Processes, RunSpec
from trainer.data.shards import open_shards
from trainer.flags import config_of, flags, options_of
from trainer.home.place import listing
from trainer.models import MODELS
from trainer.options import Options, Role, all_roles, parse_roles
from trainer.plan import describe, plan, smallest_pass
from trainer.protocols import PROTOCOLS
from trainer.runlog.run_folder import OWNED, RunRecord
from trainer.simulate import main as simulate

__all__ = ["finished", "unfinished"]  # fixtures
ROOT = PACKAGE.parent
NEEDED = ["--shards", "shards", "--output", "run"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set for two workers, whose 80 examples are of the evaluator's tests."""
    return write_shards(tmp_path_factory.mktemp("cli"), [rows_of(30, 2), rows_of(50, 3, 100)], EVAL_ROWS)


def trainer(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def parsed(*args: object) -> tuple[Config, Options]:
    args_of = command_line.parse(flags(), [*NEEDED, *map(str, args)])
    return config_of(args_of), options_of(args_of)


# --- flags, files, exit codes -----------------------------------------------------------------------------------------


def test_help_names_every_model_and_a_flag_for_every_setting() -> None:
    done = trainer("--help")
    assert done.returncode == 0
    for part in (Data, Optimiser, Processes, RunSpec, Options, *MODELS.values(), *PROTOCOLS.values()):
        for field in fields(part):
            assert f"--{field.name.replace('_', '-')}" in done.stdout or field.name == "silent"
    for name in MODELS:
        assert name in done.stdout
    assert "Exit codes" in done.stdout


def test_without_flags_a_run_is_what_config_says_and_so_does_the_defaults_file(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    config, options = parsed("--epochs", 3, "--config", tmp_path / "empty.toml")
    assert config == make_config(config.data.shards, config.run.output, epochs=3)
    assert options == Options()
    assert parsed("--epochs", 3) == (config, options)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('servers = 3\nmomentum = 0.5\naugment = false\nroles = "worker:1-2"\n'
                                     'addresses = "tcp://a:1,tcp://b:2"\ntoken_file = "secret"\n')  # fmt: skip
    config, options = parsed("--steps", 7, "--servers", 2, "--config", tmp_path / "c.toml")
    assert (
        config.processes.servers,
        config.optimiser.momentum,
        config.data.augment,
        config.optimiser.learning_rate,
    ) == (2, 0.5, False, 0.025)
    assert options.roles == (Role("worker", 1), Role("worker", 2))
    assert options.addresses == ("tcp://a:1", "tcp://b:2")
    assert options.token_file == Path("secret")


def test_a_flag_also_wins_over_a_key_of_the_file_that_it_excludes(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("epochs = 5\nresume = true\n")
    config, options = parsed("--config", tmp_path / "c.toml")
    assert (config.run.epochs, config.run.steps, options.resume) == (5, None, True)
    config, options = parsed("--steps", 7, "--overwrite", "--config", tmp_path / "c.toml")
    assert (config.run.epochs, config.run.steps, options.resume, options.overwrite) == (None, 7, False, True)


def test_paths_mean_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = parsed("--epochs", 1)
    assert (config.data.shards, config.run.output) == (str(tmp_path / "shards"), str(tmp_path / "run"))
    config, _ = parsed("--epochs", 1, "--shards", "hdfs://name:8020/s", "--output", "file:///x/y")
    assert (config.data.shards, config.run.output) == ("hdfs://name:8020/s", "/x/y")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["either --epochs or --steps"]),
        (["--epochs", "1", "--steps", "1"], ["--steps", "not allowed with"]),
        (["--epochs", "0"], ["--epochs must be at least 1, got 0"]),
        (["--epochs", "1", "--protocol", "bps"], ["--protocol", "bps", "ssp"]),
        (["--epochs", "1", "--learning-rate", "nan"], ["--learning-rate", "nan"]),
        (["--epochs", "1", "--seed", "-1"], ["--seed", "'-1'"]),
        (["--epochs", "1", "--resume", "--overwrite"], ["--overwrite", "not allowed with"]),
        (["--epochs", "1", "--roles", "server:0"], ["--roles", "--addresses"]),
        (["--epochs", "1", "--roles", "server:0", "--addresses", "tcp://a:1"], ["--token-file", "openssl"]),
        (["--epochs", "1", "--roles", "boss"], ["'boss'", "worker:A-B"]),
        (["--epochs", "1", "--output", "webhdfs://name/run"], ["--output webhdfs://name/run", "for reading"]),
        (["--epochs", "1", "--output", f"{__file__}/run"], ["test_trainer_cli.py is not a folder"]),
        (["--epochs", "1", "--shards", ""], ["an empty path"]),
        (["--epochs", "1", "--config", "/nowhere.toml"], ["/nowhere.toml does not exist"]),
        (["--epochs", "1", "--nonsense"], ["--nonsense", "--help"]),
    ],
)
def test_a_wrong_command_line_is_refused_with_fact_value_and_next_step(args: Any, parts: Any) -> None:
    with pytest.raises(UsageError) as refused:
        main([*NEEDED, *args])
    for part in parts:
        assert part in str(refused.value)


def raising(error: BaseException) -> Any:
    def fail() -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("x must be\n1"), 2, "error: x must be 1"),
        (DataError("broken"), 3, "error: broken"),
        (JobError("failed"), 1, "error: failed"),
        (KeyboardInterrupt(), 1, "error: interrupted; go on"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device"),
        (MemoryError(), 1, "error: MemoryError"),
        (ValueError("odd\ntrace"), 1, "error: ValueError: odd (--debug shows the whole trace)"),
        (AssertionError(), 1, "error: AssertionError (--debug shows the whole trace)"),
    ],
)
def test_every_end_of_a_program_has_its_exit_code_and_one_line(
    capsys: pytest.CaptureFixture[str], error: Any, code: Any, line: str
) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.execute(raising(error), interrupted="go on")
    assert end.value.code == code
    assert capsys.readouterr().err == f"{line}\n"


def test_debug_shows_the_trace_before_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--debug"])
    with pytest.raises(SystemExit):
        command_line.execute(raising(ValueError("odd")), interrupted="")
    assert capsys.readouterr().err.startswith("Traceback")


# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("evaluator", ["evaluator-0"]),
        ("server:0,worker:0-2", ["server-0", "worker-0", "worker-1", "worker-2"]),
        ("worker:7-7, evaluator", ["worker-7", "evaluator-0"]),
    ],
)
def test_roles_are_read_as_written_with_both_ends_of_a_range(text: str, names: Any) -> None:
    assert [str(role) for role in parse_roles(text)] == names


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("worker", "'worker'"),
        ("worker:-1", "'worker:-1'"),
        ("evaluator:1", "'evaluator:1'"),
        ("worker:5-2", "write worker:2-5"),
        ("server:0,server:0-1", "names server:0 twice"),
        ("worker:0-99999", "'worker:0-99999'"),
    ],
)
def test_roles_that_make_no_sense_are_refused(text: str, part: Any) -> None:
    with pytest.raises(UsageError, match="--roles") as refused:
        parse_roles(text)
    assert part in str(refused.value)


def options_with(roles: Sequence[Role]) -> Options:
    return Options(roles=tuple(roles), addresses=("tcp://a:1",), token_file=Path("secret"))


@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_hosts_that_share_the_roles_out_start_each_of_them_once(servers: Any, workers: int, data: Any) -> None:
    every = all_roles(servers, workers)
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=len(every), max_size=len(every)))
    shares = [[role for role, host in zip(every, hosts, strict=True) if host == number] for number in range(3)]
    started = [role for share in shares for role in options_with(share).roles_of(servers, workers)]
    assert sorted(map(str, started)) == sorted(map(str, every))
    assert Options().roles_of(servers, workers) == every


def test_a_role_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"worker:3, but the run has workers 0\.\.2"):
        options_with(parse_roles("worker:2-3")).roles_of(1, 3)


# --- the plan ---------------------------------------------------------------------------------------------------------


def planned(workers: int, rows: int = 50_000, parameters: int = 1000, **values: Any) -> Any:
    config = make_config(**({"epochs": 182} | values))
    return plan(config, Facts(workers, rows, parameters, 10), cores=8)


def test_shares_and_rates_are_those_of_the_papers() -> None:
    four, twelve = (planned(workers, learning_rate=0.1) for workers in (4, 12))
    exact = planned(12, worker_batch="exact")
    assert (set(four.worker_batches), four.worker_rate) == ({32}, 0.025)
    assert (set(twelve.worker_batches), twelve.effective_batch, twelve.steps_per_epoch) == ({10}, 120, 390)
    assert exact.worker_batches == (11,) * 8 + (10,) * 4
    assert exact.effective_batch == 128


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
@pytest.mark.parametrize("model", list(MODELS))
def test_a_rate_that_is_not_given_is_the_models_own_less_where_gradients_may_be_stale(
    model: str, protocol: str
) -> None:
    config, kind = make_config(model=model, protocol=protocol), MODELS[model]
    stale = not PROTOCOLS[protocol].synchronous
    assert config.learning_rate == (kind.stale_learning_rate if stale else kind.learning_rate)
    assert 0 < kind.stale_learning_rate <= kind.learning_rate
    assert Config.from_json(config.to_json()) == config
    assert change(config, learning_rate=0.7).learning_rate == 0.7


@given(st.integers(1, 40), st.integers(0, 200), st.sampled_from(["asp", "bsp", "ssp"]), st.integers(1, 60))
def test_shares_add_up_and_every_push_goes_into_one_update(workers: int, more: Any, protocol: str, steps: int) -> None:
    batch = workers + more
    asked = {"batch_size": batch, "protocol": protocol, "steps": steps, "epochs": None, "learning_rate": 0.1}
    exact, floor = (planned(workers, worker_batch=kind, **asked) for kind in ("exact", "floor"))
    assert sum(exact.worker_batches) == exact.effective_batch == batch
    assert max(exact.worker_batches) - min(exact.worker_batches) <= 1
    assert batch - workers < floor.effective_batch == workers * floor.worker_batches[0] <= batch
    pushes_an_update = workers if protocol == "bsp" else 1
    assert exact.updates * pushes_an_update == workers * steps
    # the size of one step in expectation: the same for all protocols, once every worker has pushed
    rate = exact.learning_rate / workers if protocol == "bsp" else exact.worker_rate
    assert rate * workers == pytest.approx(0.1)


def test_threads_are_what_is_left_of_the_cores_unless_given() -> None:
    assert [planned(workers).threads_per_worker for workers in (1, 3, 12)] == [8, 2, 1]
    assert planned(12, threads=3).threads_per_worker == 3


def test_a_hosts_cores_are_shared_by_its_own_workers() -> None:
    def of(here: int, **values: Any) -> Any:
        config = make_config(epochs=1, batch_size=12, **values)
        return plan(config, Facts(12, 50_000, 1000, 10), cores=8, workers_here=here)

    assert [of(here).threads_per_worker for here in (12, 6, 4, 1, 0)] == [1, 1, 2, 8, 8]
    assert of(4, threads=3).threads_per_worker == 3
    assert "1 server, 12 workers (4 here, of 2 threads each), 1 evaluator" in describe(of(4))
    assert "1 server, 12 workers (none here), 1 evaluator" in describe(of(0))


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(UsageError, match="--batch-size 11 is the mini-batch of all 12 workers together"):
        planned(12, batch_size=11)
    with pytest.raises(UsageError, match="--servers 11 is more than the 10 parameters"):
        planned(2, parameters=10, servers=11)


def test_the_table_says_whether_the_mini_batch_is_global_and_which_rate_is_applied() -> None:
    text = describe(planned(12, servers=2))
    assert "120 over all 12 workers, 10 each; 128 was asked for, --worker-batch exact uses all of it" in text
    assert "asp applies 0.025 / 12 = 0.002083 to each push; falls to a tenth at epoch 136.5 and 163.8\n" in text
    assert (
        "momentum       0.95 in 12 pushes; workers compute at what it will have made of the parameters by then\n"
        in text
    )
    assert "182 epochs, 70,980 steps a worker, 851,760 updates" in text
    assert "2 servers, 12 workers of 1 thread each, 1 evaluator" in text
    text = describe(planned(12, protocol="bsp", worker_batch="exact", epochs=3))
    assert "128 over all 12 workers, 11 for the first 8 and 10 for the others\n" in text
    assert "bsp applies 0.1 to the mean of 12 pushes; falls to a tenth at epoch 2.25 and 2.7\n" in text
    assert "1,170 steps a worker, 1,170 updates" in text
    assert "momentum       0.9 an update\n" in text
    text_of_root = describe(planned(2, protocol="bsp", recipe="inverse-sqrt"))
    assert "bsp applies 0.1 to the mean of 2 pushes; in mini-batch t, that over the root of t\n" in text_of_root
    columns = [re.match(r" +\S+( \S+)* {2,}", line) for line in text.splitlines()]
    assert len({column and column.end() for column in columns}) == 1


# --- all of it --------------------------------------------------------------------------------------------------------


def test_what_the_shards_forbid_is_refused_before_the_folder_is_touched(shards: Path, tmp_path: Path) -> None:
    common = ["--shards", str(shards), "--output", str(tmp_path / "run"), "--steps", "1"]
    for more, error, part in (
        (["--batch-size", "1"], UsageError, "all 2 workers together"),
        (["--shards", str(tmp_path)], DataError, "no shards were ever committed"),
        (["--roles", "server:0,worker:2", "--addresses", "tcp://a:1", "--token-file", "t"], UsageError, "workers 0..1"),
    ):
        with pytest.raises(error) as refused:
            main([*common, *more])
        assert part in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_one_life_of_a_run(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, found finished, refused, made longer, replaced: as a user does it."""
    common = ["--model", "logistic", "--batch-size", "8", "--servers", "2", "--threads", "1"]
    first = Training(shards, tmp_path / "run", *common, "--steps", 3, "--resume")
    assert first.wait() == 0, first.said()
    assert "holds no run to go on with, so one is started" in first.said()
    assert "8 over all 2 workers, 4 each" in first.said()
    assert first.result()["updates"] == 6
    assert [name for name in listing(first.output) if not OWNED.fullmatch(name)] == []

    again = ["--shards", str(shards), "--output", str(first.output), *common]
    before = content(first.output)
    assert main([*again, "--steps", "3"]) == 0
    assert "finished already, nothing to do" in capsys.readouterr().out
    assert content(first.output) == before
    done = trainer(*again, "--steps", 3, "--seed", 1)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {first.output} holds a run with --seed 0, not 1")

    longer = Training(shards, first.output, *common, "--steps", 5, "--resume", "--no-report")
    assert longer.wait() == 0, longer.said()
    assert longer.result()["updates"] == 10
    assert longer.events("start")[-1]["resumed_from"] == 6

    other = Training(shards, first.output, *common, "--steps", 2, "--seed", 1, "--overwrite", "--no-report")
    assert other.wait() == 0, other.said()
    assert other.result()["updates"] == 4
    assert [event["resumed_from"] for event in other.events("start")] == [None]


# --- what cannot be computed -----------------------------------------------------------------------------------------

OWN = """
from torch import nn
def normalised(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""
REFUSED: dict[str, tuple[list[str], str]] = {
    "no card": (["--device", "cuda"], "--device cuda: torch finds no GPU on this host; give --device cpu, or auto"),
    "batch norm": (
        ["--model", "cnn", "--batch-size", "2"],
        "--model cnn has BatchNorm, which cannot normalise the 1 example of a worker's smallest mini-batch:"
        " give --batch-size 4 or more, or --norm group",
    ),
    "micro-batches": (
        ["--model", "cnn", "--batch-size", "8", "--protocol", "k-batch-bsp", "--k", "2", "--cancel", "preempt"],
        "give --batch-size 16 or more",
    ),
    "bernoulli": (
        ["--model", "cnn", "--batch-size", "8", "--sampling", "bernoulli"],
        "--sampling bernoulli draws mini-batches of 1 example too: give --sampling shuffle, or --norm group",
    ),
    "own model": (
        ["--model", "own_normalised:normalised", "--batch-size", "2"],
        "--model own_normalised:normalised has BatchNorm",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("way", [main, simulate])
def test_what_no_worker_could_compute_is_refused_before_the_start_and_leaves_nothing(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: Any
) -> None:
    (tmp_path / "own_normalised.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    flags, line = REFUSED[kind]
    with pytest.raises(UsageError) as refused:
        way(["--shards", str(shards), "--output", "deep/run", "--steps", "1", "--quiet", "--batch-size", "8", *flags])
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "deep").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_run_that_is_there_stays_as_it_is_when_the_next_start_is_refused(
    shards: Path, finished: Path, flag: str
) -> None:
    more = ["--steps", "30", "--device", "cuda"]
    config, _ = parsed("--shards", shards, "--output", finished, *more)
    (finished / "config.json").write_text(json.dumps(RunRecord.of(config, open_shards(str(shards))).to_json()))
    before = content(finished)
    with pytest.raises(UsageError, match="no GPU"):
        main(["--shards", str(shards), "--output", str(finished), *more, "--steps", "40", flag])
    assert content(finished) == before


@pytest.mark.parametrize(
    ("values", "least"),
    [
        ({}, 10),
        ({"batch_size": 12}, 1),
        ({"batch_size": 23, "worker_batch": "exact"}, 1),
        ({"sampling": "bernoulli"}, 1),
        ({"protocol": "k-batch-bsp", "cancel": "preempt", "micro_batches": 3}, 3),
    ],
)
def test_the_smallest_forward_pass_of_a_run_is_that_of_its_smallest_mini_or_micro_batch(
    values: Any, least: int
) -> None:
    assert smallest_pass(make_config(**values), 12) == least
