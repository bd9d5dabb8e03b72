"""One run on several hosts: each is a supervisor with its own --roles, all on this machine, over real addresses."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from tests.campaigns.cable import LOOPBACK, Cable, Tap
from tests.clusters import free_ports
from tests.support.configs import make_config
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import End, Training, train_here, until
from trainer.checkpoints.read import whole
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.launch.run import read_secret
from trainer.launch.supervisor import Supervisor
from trainer.options import Options, parse_roles
from trainer.plan import plan
from trainer.transport import sockets as transport
from trainer.transport.messages.heads import pack
from trainer.transport.messages.servers import Push
from trainer.transport.sockets import Secret

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
BSP = ("--protocol", "bsp", "--servers", 2, "--steps", 300, "--checkpoint-every-s", 0.5)
Host = Callable[..., Training]


@pytest.fixture(scope="module")
def undisturbed(undisturbed_end: Callable[[int], End]) -> np.ndarray:
    """Where the BSP run of these tests ends on a single host."""
    return undisturbed_end(300).vector


@pytest.fixture
def host(shards: Path, tmp_path: Path) -> Iterator[Host]:
    """Start hosts of one run, which leave nothing behind, whatever the test does."""
    hosts: list[Training] = []
    (tmp_path / "token").write_text("0123456789abcdef\n")

    def start(
        roles: str,
        addresses: list[str],
        *flags: object,
        token: Path = tmp_path / "token",
        inside: tuple[str, ...] = (),
    ) -> Training:
        where = ("--roles", roles, "--addresses", ",".join(addresses), "--token-file", token)
        hosts.append(Training(shards, tmp_path / "run", *COMMON, *where, *flags, inside=inside))
        return hosts[-1]

    yield start
    for found in hosts:
        found.end()


def addresses(count: int) -> list[str]:
    return [f"tcp://{LOOPBACK}:{port}" for port in free_ports(count)]


def nobody_listens(where: list[str]) -> bool:
    for address in where:
        name, port = address.removeprefix("tcp://").split(":")
        with socket.socket() as probe:
            if probe.connect_ex((name, int(port))) == 0:
                return False
    return True


@pytest.mark.full
def test_three_hosts_keep_the_bits_when_a_worker_is_killed(host: Host, undisturbed: np.ndarray) -> None:
    """Servers on hosts without workers; every message is encrypted."""
    where = addresses(2)
    workers = host("worker:0-2", where, *BSP)
    follower = host("server:1", where, *BSP)
    head = host("server:0,evaluator", where, *BSP)
    workers.wait_for_updates(10)
    workers.send("worker-1", signal.SIGKILL)
    for part in (head, workers, follower):
        assert part.wait() == 0, part.said()
    np.testing.assert_array_equal(head.vector(), undisturbed)
    assert head.result()["restarts"]["worker"] == 1
    until(lambda: not [p for part in (head, workers, follower) for p in part.family()], "all their processes end")
    until(lambda: nobody_listens(where), "no server is left")  # a process is a zombie before its last thread is gone


@pytest.fixture
def two_networks() -> Iterator[dict[str, tuple[str, ...]]]:
    """Two network namespaces joined by a cable: the command that runs another in each, by its address there."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the ip command of iproute2")
    names = [f"trainer-{os.getpid()}-{side}" for side in "ab"]
    found = {"10.99.0.1": names[0], "10.99.0.2": names[1]}
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for address, name in found.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield {address: ("ip", "netns", "exec", name) for address, name in found.items()}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.mark.full
def test_hosts_on_two_networks_end_with_the_bits_of_one(
    host: Host, undisturbed: np.ndarray, two_networks: dict[str, tuple[str, ...]]
) -> None:
    """Neither network reaches the other's loopback, and no memory is shared: all gradients cross the cable."""
    here, there = two_networks
    where = [f"tcp://{here}:7000", f"tcp://{there}:7000"]
    flags = (*BSP, "--same-host", "socket")
    leading = host("server:0,worker:0-1,evaluator", where, *flags, inside=two_networks[here])
    following = host("server:1,worker:2", where, *flags, inside=two_networks[there])
    for part in (leading, following):
        assert part.wait() == 0, part.said()
    np.testing.assert_array_equal(leading.vector(), undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("encryption", ["on", "off"])
def test_encryption_changes_what_is_read_and_no_bit(host: Host, undisturbed: np.ndarray, encryption: str) -> None:
    """The workers' host reaches server 0 through a cable on which every byte is read."""
    where = addresses(2)
    tap = Tap(int(where[0].rsplit(":", 1)[1]))
    flags = (*BSP, "--same-host", "socket", "--encryption", encryption)
    head = host("server:0-1,evaluator", where, *flags)
    workers = host("worker:0-2", [f"tcp://{LOOPBACK}:{tap.port}", where[1]], *flags)
    for part in (head, workers):
        assert part.wait() == 0, part.said()
        assert part.said().count("warning: --encryption off") == (encryption == "off")
    tap.close()
    np.testing.assert_array_equal(head.vector(), undisturbed)
    push = pack(Push(0, 0, 0, 0, in_memory=False))[:12]  # kind and number of the worker
    assert tap.carried(push) == (encryption == "off")


@pytest.mark.full
def test_a_host_may_join_a_run_that_has_begun(host: Host) -> None:
    flags = (*SLOW, "--protocol", "ssp", "--steps", 200, "--start-wait-s", 1, "--heartbeat-timeout-s", 1000)
    where = addresses(1)
    head = host("server:0,worker:0,evaluator", where, *flags)
    head.wait_for_updates(10)
    first = head.send("worker-0", signal.SIGSTOP)  # alone it might do all there is
    late = host("worker:1-2", where, *flags)
    until(lambda: {1, 2} <= set(head.pushes()["worker"]), "the others train")
    os.kill(first, signal.SIGCONT)
    assert late.wait() == 0, late.said()
    assert head.wait() == 0, head.said()
    pushes = head.pushes()
    assert len(pushes) == 600
    assert set(pushes["worker"][:10]) == {0}
    assert set(pushes["worker"]) == {0, 1, 2}
    # It starts where the slowest is, or everybody would wait until it has caught up.
    assert pushes[pushes["worker"] == 1]["clock"].min() > 0


@pytest.mark.full
def test_a_host_with_another_token_is_told_so_in_one_line(
    host: Host, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "REFUSED_AFTER_S", 1.0)  # of this process, which is the other host's supervisor
    where = addresses(1)
    flags = (*SLOW, "--protocol", "asp", "--steps", 100_000, "--start-wait-s", 1)
    head = host("server:0,worker:0,evaluator", where, *flags)
    head.wait_for_updates(10)
    (tmp_path / "other").write_text("fedcba9876543210\n")
    part = ("--roles", "worker:1-2", "--addresses", where[0], "--token-file", tmp_path / "other")
    with pytest.raises(UsageError, match="--token-file") as refused:
        train_here(shards, tmp_path / "run", *COMMON, *part, *flags)
    assert "\n" not in str(refused.value)
    assert head.process.poll() is None, head.said()


def _supervisor(config: Config, facts: RunFacts, options: Options, output: Path) -> Supervisor:
    work = WorkFolder(Folders.from_home(output))
    roles = options.roles or ()
    return Supervisor(config, facts, options, options.addresses, Secret("0123456789abcdef"), work, roles)


def test_a_token_that_all_users_can_read_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    options = Options(token_file=token)
    config = make_config("s", tmp_path)
    for mode, lines in ((0o600, 0), (0o640, 0), (0o644, 1)):
        token.chmod(mode)
        assert read_secret(config, options).token == "0123456789abcdef"
        assert capsys.readouterr().err.count(f"chmod 600 {token}") == lines


def test_a_host_stays_for_its_slice_of_the_last_checkpoint(tmp_path: Path) -> None:
    config, facts = make_config("s", tmp_path, batch_size=12, servers=2), RunFacts(12, 100, 10, 0)
    where = ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")
    over = []
    for roles in ("worker:11", "server:1,worker:11"):
        options = Options(roles=parse_roles(roles), addresses=where, token_file=tmp_path / "token", quiet=True)
        supervisor = _supervisor(config, facts, options, tmp_path)
        supervisor.processes.ended_roles = {role for role in supervisor.roles if role.kind == "worker"}
        over.append(supervisor._is_over())
        supervisor.close()
    assert over == [True, False]


def test_a_hosts_cores_and_cards_go_to_its_own_workers(tmp_path: Path) -> None:
    config, facts = make_config("s", tmp_path, batch_size=12), RunFacts(12, 100, 10, 0)
    where, roles = ("tcp://127.0.0.1:7000",), parse_roles("worker:9-11,evaluator")
    options = Options(roles=roles, addresses=where, token_file=tmp_path / "token", quiet=True)
    supervisor = _supervisor(config, facts, options, tmp_path)
    assert supervisor.plan == plan(config, facts, workers_here=3)
    started: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.launch.role_processes.Child", lambda name, log, module, *given: started.append(given))
        for role in roles[:3]:
            supervisor.processes.start(role)
    threads = supervisor.plan.threads_per_worker
    assert [given[-3:] for given in started] == [(threads, place, supervisor.folders) for place in range(3)]
    supervisor.processes.children.clear()
    supervisor.close()


@pytest.mark.full
@pytest.mark.parametrize("comes", ["first", "later"])
def test_a_host_with_another_command_ends_with_the_difference(host: Host, undisturbed: np.ndarray, comes: str) -> None:
    where = addresses(2)
    begun = host("server:0,worker:0-1,evaluator", where, *BSP) if comes == "later" else None
    other = host("server:1,worker:1-2", where, *BSP, "--learning-rate", 0.04, "--threads", 2)
    head = begun or host("server:0,worker:0-1,evaluator", where, *BSP)
    assert other.wait() == 2, other.said()
    assert other.said().splitlines()[-1] == (  # perhaps after a line that server 0 is waited for
        "error: --learning-rate is 0.04 here and 0.02 on the host of server 0: give every host the same command"
    )
    assert "Traceback" not in other.said()
    right = host("server:1,worker:2", where, *BSP, "--threads", 2)
    for part in (head, right):
        assert part.wait() == 0, part.said()
    np.testing.assert_allclose(head.vector(), undisturbed, atol=1e-5)  # two threads add up in another order
    assert sorted(event["worker"] for event in head.events("loaded")) == [0, 1, 2]


@pytest.mark.full
def test_a_host_that_joins_after_the_end_leaves_silently(host: Host) -> None:
    where = addresses(1)
    head = host("server:0,worker:0-2,evaluator", where, "--steps", 5)
    assert head.wait() == 0, head.said()
    late = host("worker:1-2", where, "--steps", 5)
    assert late.wait() == 0, late.said()


@pytest.mark.full
def test_other_hosts_wait_for_the_first_and_resume_with_it(host: Host, undisturbed: np.ndarray) -> None:
    where = addresses(2)
    others = host("server:1,worker:0-2", where, *BSP)
    head = host("server:0,evaluator", where, *BSP)
    head.wait_for_updates(15)
    head.process.kill()
    head.process.wait()
    until(lambda: not head.family(), "its processes end with it")
    assert others.process.poll() is None
    again = host("server:0,evaluator", where, *BSP, "--resume")
    for part in (again, others):
        assert part.wait() == 0, part.said()
    np.testing.assert_array_equal(again.vector(), undisturbed)
    until(lambda: nobody_listens(where), "no server is left")


@pytest.mark.full
def test_hosts_stopped_together_resume_from_a_whole_checkpoint(host: Host) -> None:
    """Whichever host hears of it first: the one with server 1 stays until the last checkpoint has its part."""
    where, left, generation = addresses(2), 0, 0
    flags = (*SLOW, "--protocol", "bsp", "--servers", 2, "--steps", 100_000, "--checkpoint-every-s", 1000)
    for late_s in (0.0, 0.4, -0.4):  # how much later than the other host that of server 0 hears of it
        follower = host("server:1,worker:1-2", where, *flags, "--no-epoch-checkpoints")
        head = host("server:0,worker:0,evaluator", where, *flags, "--no-epoch-checkpoints", "--resume")
        until(partial(head.trains_after, generation), "it trains")
        head.wait_for_updates(left + 50)
        first, second = (follower, head) if late_s >= 0 else (head, follower)
        os.kill(first.process.pid, signal.SIGTERM)
        time.sleep(abs(late_s))
        os.kill(second.process.pid, signal.SIGTERM)
        for part in (head, follower):
            assert part.wait(60) == 1, part.said()
            assert "--resume" in part.said()
        assert head.events("start")[-1]["resumed_from"] == (left or None)
        assert whole(head.output / "checkpoints")[-1] >= left + 50
        left, generation = whole(head.output / "checkpoints")[-1], head.generation()


def test_a_connection_between_servers_that_breaks_loses_no_update(
    host: Host, undisturbed_end: Callable[[int], End]
) -> None:
    """An order, or the word that a follower holds a gradient, may have been on its way: all go back to a checkpoint."""
    where = addresses(2)
    flags = (*BSP, "--steps", 400)
    cable = Cable(int(where[0].rsplit(":", 1)[1]))
    head = host("server:0,worker:0-2,evaluator", where, *flags)
    follower = host("server:1", [f"tcp://{LOOPBACK}:{cable.port}", where[1]], *flags)
    for version in (5, 15):
        head.wait_for_updates(version)
        cable.cut()
    for part in (head, follower):
        assert part.wait() == 0, part.said()
    cable.close()
    np.testing.assert_array_equal(head.vector(), undisturbed_end(400).vector)
    assert head.result()["rollbacks"] > 0
