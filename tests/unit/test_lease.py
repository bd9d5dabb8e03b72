"""Who may write to a home: the lease, and holders that were frozen."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

from pipeline.core.errors import JobError
from pipeline.core.storage.claim import claim
from pipeline.core.storage.store import Store
from tests.support.places import STORE
from tests.support.trainer_runs import until
from trainer.home import lease as leases
from trainer.home.lease import Lease, leased
from trainer.home.place import StorePlace, listing
from trainer.run_files import LEASE


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders of leases that nobody can ask, and whose leases expire at once."""
    monkeypatch.setattr(leases, "is_running", lambda owner: None)
    monkeypatch.setattr(leases, "whoami", lambda: {"host": f"{random.random()}"})
    monkeypatch.setattr(leases, "EXPIRES_S", 0.0)


def test_of_many_who_take_a_lease_at_once_one_gets_it(home: StorePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "is_running", lambda owner: True)
    monkeypatch.setattr(leases, "whoami", lambda: {"host": f"{random.random()}"})
    STORE.makedirs(home.uri)
    got, refused = [], []

    def take() -> None:
        mine = Lease(home / "lease")
        try:
            mine.take()
            got.append(mine)
        except JobError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
    assert all("is in use by a run that has not ended" in line for line in refused)
    assert got[0].renew()
    got[0].release()
    Lease(home / "lease").take()


def test_a_lease_counts_from_when_its_renewal_was_tried(home: StorePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others count from when they see the file, which may have been there long before the answer came."""
    now = [100.0]
    lease = Lease(home / "lease")
    lease.clock = lambda: now[0]
    lease.take()
    looked: list[bool] = []
    keeps = lease._delete_others
    monkeypatch.setattr(lease, "_delete_others", lambda: looked.append(True) or keeps())  # type: ignore[func-returns-value]
    create = Store.create

    def slow(store: Store, uri: str) -> Any:
        file = create(store, uri)
        now[0] += leases.EXPIRES_S / 2
        return file

    monkeypatch.setattr(Store, "create", slow)
    assert lease.renew()
    monkeypatch.setattr(Store, "create", create)
    now[0] += leases.EXPIRES_S / 2 + 0.1
    assert not looked
    assert lease.renew()
    assert looked, "it may have been taken by another: more than the lease has gone by since the renewal was tried"


def test_a_lease_counts_from_when_its_taking_was_tried(
    near: StorePlace, strangers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes late, so that others have taken the lease although it seems to be young."""
    now = [100.0]
    late = Lease(near / "lease", lambda: now[0])

    def slow(store: Store, uri: str, record: bytes) -> bytes | None:
        now[0] += 20.0
        return claim(store, uri, record)

    with monkeypatch.context() as patch:
        patch.setattr(leases, "claim", slow)
        late.take()
    taker, third = Lease(near / "lease"), Lease(near / "lease")
    taker.take()
    taker.release()
    third.take()
    now[0] += 20.0
    monkeypatch.setattr(leases, "EXPIRES_S", 30.0)
    assert not late.renew()
    assert third.renew()


def test_a_holder_that_was_frozen_finds_that_it_has_lost(home: StorePlace, strangers: None) -> None:
    frozen, taker, third = (Lease(home / "lease") for _ in range(3))
    frozen.take()
    assert frozen.renew()
    taker.take()
    assert taker.renew()
    assert not frozen.renew()
    assert taker.renew()
    taker.release()
    third.take()
    assert not taker.renew()
    assert not frozen.renew()
    assert third.renew()


def test_a_holder_that_was_suspended_finds_that_it_has_lost(
    near: StorePlace, strangers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock of Linux does not count the time for which a machine is suspended."""
    suspended, taker = Lease(near / "lease"), Lease(near / "lease")
    suspended.take()
    taker.take()
    taker.release()
    monkeypatch.setattr(leases, "EXPIRES_S", 30.0)
    awake = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: awake + 60.0)
    assert not suspended.renew()


@pytest.mark.parametrize("seed", range(8))
def test_only_the_last_taker_can_renew(near: StorePlace, strangers: None, seed: int) -> None:
    """In any order of takings and renewals the last taker alone renews."""
    drawn, holders = random.Random(seed), [Lease(near / "lease") for _ in range(4)]
    owner: Lease | None = None
    for _ in range(80):
        at = drawn.randrange(len(holders))
        if drawn.random() < 0.3:
            holders[at] = Lease(near / "lease")  # its process starts again
        one = holders[at]
        if not one.number and drawn.random() < 0.5:
            one.take()
            owner = one
        elif one is owner and drawn.random() < 0.1:
            one.release()
            owner = None
        else:
            assert one.renew() == (one is owner)
    assert len(listing(near)) <= 3


def test_a_lease_renewed_during_a_wait_is_not_taken(
    near: StorePlace, strangers: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease that is renewed while somebody waits for it is not taken."""
    monkeypatch.setattr(leases, "EXPIRES_S", 60.0)
    holder = Lease(near / "lease")
    holder.take()
    monkeypatch.setattr(time, "sleep", lambda seconds: holder.renew())
    with pytest.raises(JobError, match="is in use by a run that has not ended"):
        Lease(near / "lease").take()
    line = f"{near} may still be in use by an earlier start; waiting 60 s to see whether it is"
    assert caplog.messages == [line]
    assert holder.renew()


@pytest.mark.slow
def test_a_lease_of_a_dead_process_of_this_machine_is_taken_at_once(near: StorePlace) -> None:
    program = (
        "import os, sys; from tests.unit.test_lease import *; Lease(StorePlace(sys.argv[1], STORE)).take(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, f"{near}/lease"], check=True)
    with leased(near):
        pass
    taken = Lease(near / "lease")
    taken.take()
    with pytest.raises(JobError, match="in use"):
        Lease(near / "lease").take()


def test_an_unreleased_lease_is_free_for_the_same_process(near: StorePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that could not be given back is free for the same process."""

    def refuse(*_: object) -> None:
        raise OSError("no NameNode")

    with monkeypatch.context() as patched, leased(near):
        patched.setattr(Store, "put_new", refuse)
    with leased(near):
        pass


def test_who_has_lost_a_lease_is_told_so(near: StorePlace, strangers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.01)
    lost = threading.Event()
    with leased(near, lost.set):
        until(partial(takes, Lease(near / LEASE)), "a taking between two renewals")
        assert lost.wait(60)


def takes(one: Lease) -> bool:
    try:
        one.take()
    except JobError:
        return False
    return True
