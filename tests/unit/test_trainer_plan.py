"""Who does what in a run: roles, and the plan of shares, rates and threads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from tests.support.configs import change, make_config
from trainer.config import Config, RunFacts
from trainer.models import MODELS
from trainer.options import Options, Role, all_roles, parse_roles
from trainer.plan import check_shares, describe, plan
from trainer.protocols import PROTOCOLS


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
    return plan(config, RunFacts(workers, rows, parameters, 10), cores=8)


def test_shares_and_rates_are_those_of_the_papers() -> None:
    four, twelve = (planned(workers, learning_rate=0.1) for workers in (4, 12))
    exact = planned(12, worker_batch="exact")
    assert (set(four.worker_batches), four.worker_rate) == ({32}, 0.025)
    assert (set(twelve.worker_batches), twelve.effective_batch, twelve.steps_per_epoch) == ({10}, 120, 390)
    assert exact.worker_batches == (11,) * 8 + (10,) * 4
    assert exact.effective_batch == 128


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
@pytest.mark.parametrize("model", list(MODELS))
def test_the_default_rate_is_lower_for_stale_gradients(model: str, protocol: str) -> None:
    config, kind = make_config(model=model, protocol=protocol), MODELS[model]
    stale = not PROTOCOLS[protocol].synchronous
    stale_rate = (
        kind.stale_learning_rate
        if PROTOCOLS[protocol].has_momentum
        else kind.stale_learning_rate / (1 - kind.stale_momentum) / 5
    )
    assert config.learning_rate == (stale_rate if stale else kind.learning_rate)
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
        return plan(config, RunFacts(12, 50_000, 1000, 10), cores=8, workers_here=here)

    assert [of(here).threads_per_worker for here in (12, 6, 4, 1, 0)] == [1, 1, 2, 8, 8]
    assert of(4, threads=3).threads_per_worker == 3
    assert "1 server, 12 workers (4 here, of 2 threads each), 1 evaluator" in describe(of(4))
    assert "1 server, 12 workers (none here), 1 evaluator" in describe(of(0))


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(UsageError, match="--batch-size 11 is the mini-batch of all 12 workers together"):
        planned(12, batch_size=11)
    with pytest.raises(UsageError, match="--servers 11 is more than the 10 parameters"):
        planned(2, parameters=10, servers=11)


def test_a_rate_whose_share_is_zero_is_refused() -> None:
    config = make_config(learning_rate=5e-324, batch_size=12)
    check_shares(config, 1)
    with pytest.raises(
        UsageError, match=r"--learning-rate 4.94066e-324, divided by 4 workers, is 0: give a larger rate"
    ):
        check_shares(config, 4)


def test_the_table_names_the_mini_batch_and_the_applied_rate() -> None:
    text = describe(planned(12, servers=2))
    assert "120 over all 12 workers, 10 each; 128 was requested, and --worker-batch exact uses all of it" in text
    assert "asp applies 0.025 / 12 = 0.002083 to each push; falls to a tenth at epoch 136.5 and 163.8\n" in text
    assert "momentum       0.95 in 12 pushes; workers compute gradients at the parameters that momentum" in text
    assert "182 epochs, 70,980 steps per worker, 851,760 updates" in text
    assert "2 servers, 12 workers of 1 thread each, 1 evaluator" in text
    text = describe(planned(12, protocol="bsp", worker_batch="exact", epochs=3))
    assert "128 over all 12 workers, 11 for the first 8 and 10 for the others\n" in text
    assert "bsp applies 0.1 to the mean of 12 pushes; falls to a tenth at epoch 2.25 and 2.7\n" in text
    assert "1,170 steps per worker, 1,170 updates" in text
    assert "momentum       0.9 per update\n" in text
    text_of_root = describe(planned(2, protocol="bsp", recipe="inverse-sqrt"))
    assert "bsp applies 0.1 to the mean of 2 pushes; divided by the square root of t in mini-batch t\n" in text_of_root
    columns = [re.match(r" +\S+( \S+)* {2,}", line) for line in text.splitlines()]
    assert len({column and column.end() for column in columns}) == 1


@pytest.mark.parametrize(
    ("exchange", "line"),
    [
        ("parameter-server", "push           4.1 kB over 1 server, and as much back"),
        ("all-reduce", "all-reduce     6.1 kB from each worker in a step, and as much to it"),
        ("d-psgd", "d-psgd         4.1 kB from each worker to each of its neighbours in a round"),
    ],
)
def test_the_size_of_a_message_has_its_unit(exchange: str, line: str) -> None:
    """Word the 1014 parameters and 10 statistics of a small model without a rounding to 0.00 MB."""
    assert line in describe(planned(4, parameters=1014, exchange=exchange))
