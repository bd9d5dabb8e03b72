"""The members of a run among neighbours, as server 0 lists them in a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import UsageError
from trainer.exchange.mixing import TopologyPlan, links_by_worker
from trainer.exchange.plan_json import plan_to_json
from trainer.leader.worker_messages import reach_of
from trainer.transport.bodies.json_object import JSON_LIMIT_BYTES, pack_json

MEMBER_BYTES = 512  # of a member in a view, at most
LINK_BYTES = 16  # of a link
SEARCHED_ROUNDS = 64  # that are searched for the next neighbours of a newcomer


@dataclass
class PeerMembership:
    """A worker that takes part.

    Attributes:
        process: a random number that identifies its process.
        session: number of the view with which the membership began.
        first: its first round.
        source: the worker that sends it its first model; None if that is this server.
        introduction: address, host and memory of its process.
        last_message_at: time of its last message.
        has_model: whether it has its first model.
    """

    process: int
    session: int
    first: int
    source: int | None
    introduction: Mapping[str, Any]
    last_message_at: float
    has_model: bool = False


def source_of_newcomer(
    members: Mapping[int, PeerMembership], plan: TopologyPlan, worker: int, first: int
) -> int | None:
    """Return the member whose model a newcomer gets: one of its next neighbours, or else any that has a model.

    Args:
        members: by worker.
        plan: of the links.
        worker: the newcomer.
        first: its first round.
    """
    present = [other for other, member in members.items() if member.has_model]
    for round in range(first, first + SEARCHED_ROUNDS):
        for other, _ in links_by_worker(plan.edges(round)).get(worker, ()):
            if other in present:
                return other
    return min(present, default=None)


def add_their_newcomers(members: Mapping[int, PeerMembership], leavers: Iterable[int]) -> set[int]:
    """Return the members among leavers, and the newcomers whose first model was to come from one of them."""
    leaving = set(leavers) & set(members)
    return leaving | {worker for worker, member in members.items() if member.source in leaving and not member.has_model}


def view_body(
    members: Mapping[int, PeerMembership], absent_from: Mapping[int, int], version: int, plan: TopologyPlan
) -> bytes:
    """Return the body of a view.

    Args:
        members: by worker.
        absent_from: the first round that a worker has missed, by worker; others have missed none.
        version: of the checkpoint with which the generation began.
        plan: of the links.
    """
    # A source is named until the newcomer has its model, so that a message that was lost is sent again.
    entries = {
        str(worker): {
            "session": member.session,
            "process": member.process,
            "first": member.first,
            "source": None if member.has_model else member.source,
            "missed_from": absent_from.get(worker),
            "reach": reach_of(member.introduction),
        }
        for worker, member in members.items()
    }
    return pack_json({"members": entries, "version": version, "plan": plan_to_json(plan)})


def check_view(plan: TopologyPlan, topology: str) -> None:
    """Raise UsageError if a view of all workers with all links is longer than a message may be.

    plan: of the links; topology: its name."""
    num_workers = plan.num_workers
    room = JSON_LIMIT_BYTES - MEMBER_BYTES * num_workers
    # Even all pairs fit for a few hundred workers.
    if LINK_BYTES * num_workers**2 / 2 > room and len(pack_json(plan_to_json(plan))) > room:
        raise UsageError(
            f"--topology {topology} has {len(plan.shares()):,} links between {num_workers:,} workers, more than a"
            " message of server 0 can list: choose a topology with fewer links, or train in virtual time"
        )
