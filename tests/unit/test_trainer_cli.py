"""The trainer's command line: flags over TOML over defaults, and whole lives of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.core import command_line
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.program import execute
from pipeline.spark.shipping import PACKAGE
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.unit.test_run_folder import content, finished, unfinished
from trainer.__main__ import main, parser
from trainer.cluster.spark import SparkLauncher
from trainer.config import Config, Data, Optimiser, Processes, RunSpec
from trainer.data.opening import open_shards
from trainer.flags import build_parser, config_of, options_of
from trainer.models import MODELS
from trainer.options import Options, Role
from trainer.plan import smallest_pass
from trainer.protocols import PROTOCOLS
from trainer.runlog.run_record import RunRecord
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
    needed = [] if "--shards" in args else NEEDED
    args_of = command_line.parse(build_parser(), [*needed, *map(str, args)])
    return config_of(args_of), options_of(args_of)


@pytest.mark.slow
def test_help_names_every_model_and_a_flag_for_every_setting() -> None:
    done = trainer("--help-all")
    assert done.returncode == 0
    for part in (Data, Optimiser, Processes, RunSpec, Options, *MODELS.values(), *PROTOCOLS.values()):
        for field in fields(part):
            assert f"--{field.name.replace('_', '-')}" in done.stdout or field.name in ("silent", "batch_size_given")
    for name in MODELS:
        assert name in done.stdout
    assert "Exit codes" in done.stdout


def test_without_flags_config_and_the_defaults_file_agree(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("exchange", ["all-reduce", "d-psgd", "matcha", "strategy-switch", "sync-switch"])
def test_an_exchange_wins_over_the_protocol_of_a_file(tmp_path: Path, exchange: str) -> None:
    """A file of defaults may have a protocol, as it may have the options of another one."""
    file = tmp_path / "c.toml"
    file.write_text('protocol = "ssp"\nstaleness_bound = 9\n')
    flags: list[Any] = ["--steps", 7, "--config", file, "--exchange", exchange]
    config, _ = parsed(*flags)
    assert config == parsed("--steps", 7, "--exchange", exchange)[0]
    with pytest.raises(UsageError, match=f"^--exchange {exchange} has .*: leave out --protocol ssp$"):
        parsed(*flags, "--protocol", "ssp")
    file.write_text(f'protocol = "asp"\nexchange = "{exchange}"\n')
    assert parsed("--steps", 7, "--config", file)[0] == config
    file.write_text(f'protocol = "ssp"\nexchange = "{exchange}"\n')
    with pytest.raises(UsageError, match=f"^--exchange {exchange} has .*: leave out --protocol ssp$"):
        parsed("--steps", 7, "--config", file)


def test_a_configuration_with_two_ways_of_waiting_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--exchange all-reduce has no protocols: leave out --protocol ssp$"):
        make_config(exchange="all-reduce", protocol="ssp", staleness_bound=9)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--exchange", "strategy-switch", "--alpha", "0.5", "--switch-window", "3"],
            "--switch-window 3 .*--alpha auto",
        ),
        (["--exchange", "strategy-switch", "--holdout-share", "0.1"], "--holdout-share 0.1 .*--switch-on holdout"),
        (["--exchange", "sync-switch", "--straggler-window", "9"], "--straggler-window 9 .*--straggler FACTOR"),
        (["--protocol", "k-bsp", "--k", "2", "--micro-batches", "3"], "--micro-batches 3 .*--cancel preempt"),
    ],
)
def test_a_flag_without_its_partner_is_refused(flags: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{line.replace(' .*', ' has no effect without ')}: give it too, or leave"):
        parsed("--steps", 7, *flags)


def test_momentum_does_not_reach_an_optimiser_of_the_users_own() -> None:
    with pytest.raises(UsageError, match=r"^--momentum 0\.3 is not passed to --optimiser own:sgd: leave it out"):
        parsed("--steps", 7, "--optimiser", "own:sgd", "--momentum", 0.3)


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
        (["--epochs", "1", "--output", "http://name/run"], ["--output http://name/run", "for reading"]),
        (["--epochs", "1", "--output", f"{__file__}/run"], ["test_trainer_cli.py is not a folder"]),
        (["--epochs", "1", "--shards", ""], ["--shards", "an empty text"]),
        (["--epochs", "1", "--config", "/nowhere.toml"], ["/nowhere.toml does not exist"]),
        (["--epochs", "1", "--nonsense"], ["--nonsense", "--help"]),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_next_step(args: Any, parts: Any) -> None:
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
        execute(raising(error), interrupted="go on")
    assert end.value.code == code
    assert capsys.readouterr().err == f"{line}\n"


def test_debug_shows_the_trace_before_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--debug"])
    with pytest.raises(SystemExit):
        execute(raising(ValueError("odd")), interrupted="")
    assert capsys.readouterr().err.startswith("Traceback")


def test_resume_with_overwrite_is_refused_in_a_file(tmp_path: Path) -> None:
    both, overwrite = tmp_path / "both.toml", tmp_path / "overwrite.toml"
    overwrite.write_text("overwrite = true\n")
    both.write_text("resume = true\noverwrite = true\n")
    with pytest.raises(UsageError, match=r"^resume continues the run") as refused:
        parsed("--steps", 1, "--config", both)
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match=r"^resume continues the run"):
        Options(resume=True, overwrite=True)
    for file in (both, overwrite):
        _, options = parsed("--steps", 1, "--config", file, "--resume")
        assert (options.resume, options.overwrite) == (True, False)


def test_flags_that_shards_forbid_leave_the_folder_untouched(shards: Path, tmp_path: Path) -> None:
    common = ["--output", str(tmp_path / "run"), "--steps", "1"]
    roles = ["--roles", "server:0,worker:2", "--addresses", "tcp://a:1", "--token-file", "t"]
    for folder, more, error, part in (
        (shards, ["--batch-size", "1"], UsageError, "all 2 workers together"),
        (tmp_path, [], DataError, "no shards were ever committed"),
        (shards, roles, UsageError, "workers 0..1"),
    ):
        with pytest.raises(error) as refused:
            main([*common, "--shards", str(folder), *more])
        assert part in str(refused.value)
    assert not (tmp_path / "run").exists()


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


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("way", [main, simulate])
def test_an_impossible_step_is_refused_before_the_start(
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_a_refused_start_leaves_the_run_unchanged(shards: Path, finished: Path, flag: str) -> None:
    more = ["--steps", "30", "--device", "cuda"]
    config, _ = parsed("--shards", shards, "--output", finished, *more)
    (finished / "config.json").write_text(json.dumps(RunRecord.from_config(config, open_shards(str(shards))).to_json()))
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
def test_the_smallest_forward_pass_is_of_the_smallest_batch(values: Any, least: int) -> None:
    assert smallest_pass(make_config(**values), 12) == least


@pytest.mark.parametrize("prog", ["python -m trainer", "train.py", "python -m trainer.simulate"])
def test_every_command_that_trains_has_the_trainers_defaults(
    prog: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As --help says; spark-submit's too."""
    (tmp_path / "trainer.toml").write_text("batch_size = 77\n")
    monkeypatch.setattr(command_line, "CONF", tmp_path)
    assert command_line.parse(build_parser(prog), [*NEEDED, "--steps", "1"]).batch_size == 77


@pytest.mark.parametrize("flag", [("--roles", "server:0"), ("--addresses", "tcp://a:1"), ("--token-file", "t")])
@pytest.mark.parametrize(
    ("prog", "default", "args"),
    [
        ("python -m trainer", None, ["--launcher", "local"]),
        ("python -m trainer", None, ["--launcher", "spark"]),
        ("train.py", "spark", []),
    ],
)
def test_a_launcher_excludes_hosts_started_by_hand(
    prog: str, default: str | None, args: list[str], flag: tuple[str, str]
) -> None:
    with pytest.raises(UsageError, match=f"{flag[0]} is for hosts that are started by hand.*launcher (local|spark)"):
        main([*NEEDED, "--epochs", "1", *args, *flag], parser(prog, launcher=default))


@pytest.mark.parametrize("flag", ["--host-cores", "--host-gpus"])
def test_hosts_on_spark_have_the_cores_of_a_task(flag: str) -> None:
    with pytest.raises(UsageError, match=r"--launcher ray; a Spark task has the cores of spark\.task\.cpus"):
        main([*NEEDED, "--epochs", "1", "--launcher", "spark", flag, "2"])


def test_several_hosts_need_a_launcher() -> None:
    with pytest.raises(UsageError, match="--hosts 2 needs --launcher: spark, ray or local"):
        main([*NEEDED, "--epochs", "1", "--hosts", "2"])


@pytest.mark.parametrize(
    ("prog", "default", "args"), [("python -m trainer", None, ["--launcher", "spark"]), ("train.py", "spark", [])]
)
def test_the_command_and_the_job_train_on_spark(
    prog: str, default: str | None, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher gets the hosts of --hosts, and has no application before the run needs them."""
    given: list[Any] = []
    monkeypatch.setattr("trainer.__main__.train", lambda *_, launcher, hosts: given.extend([launcher, hosts]))
    assert main([*NEEDED, "--epochs", "1", "--hosts", "3", *args], parser(prog, launcher=default)) == 0
    launcher, hosts = given
    assert (type(launcher), launcher.context, hosts) == (SparkLauncher, None, 3)


def test_a_file_moves_the_job_to_no_other_launcher(tmp_path: Path) -> None:
    """The file may be that of another command."""
    (tmp_path / "ray.toml").write_text('launcher = "ray"')
    line = r"launcher = 'ray' in the file of --config: train.py trains on Spark; leave it out, or give --launcher ray"
    with pytest.raises(UsageError, match=line):
        main([*NEEDED, "--config", str(tmp_path / "ray.toml")], parser("train.py", launcher="spark"))


def test_another_launcher_overrides_the_jobs_own() -> None:
    flags = parser("train.py", launcher="spark")
    assert "(default: spark)" in " ".join(flags.format_help().split())
    assert command_line.parse(flags, [*NEEDED, "--launcher", "local"]).launcher == "local"
