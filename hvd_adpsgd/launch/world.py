"""One learner's ranks, communicators and state.

All learners share one MPI communicator. Each super learner has a communicator of its own, in which its
Horovod runs: with one Horovod world per super learner, no Horovod operation waits for another super
learner. The leaders of the super learners have a third one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.shared_memory import SharedSlots
from hvd_adpsgd.errors import NotInitializedError, TopologyError
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.lifecycle.preemption import Departure
from hvd_adpsgd.lifecycle.shutdown import ShutdownBarrier, Teardown
from hvd_adpsgd.messaging.mpi_transport import failed_comm_ranks

__all__ = [
    "Communicators",
    "Placement",
    "World",
    "current",
    "form_super_learners",
    "is_initialized",
    "names_of",
    "put",
]


@dataclass(frozen=True)
class Placement:
    """The host of one learner.

    Attributes:
        host: smallest rank among the learners of its host; names the host.
        hostname: for messages only; hosts may share it.
        local_rank, local_size: among the learners of its host.
    """

    host: int
    hostname: str
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Communicators:
    """The communicators of a learner: mpi4py's, errors returned.

    Attributes:
        all, plain, departures: all learners; until it has joined, only those of a joining super learner.
            Operations over all learners alone use `plain`, shutdown alone uses `departures`: their messages
            never match another operation.
        host: the learners of this host.
        inner: the learners of this super learner.
        outer: the leaders; None on learners that are not leaders. With shards the learners that have the
            same place in their super learners; None behind the places with shards.
    """

    all: Any
    plain: Any
    departures: Any
    host: Any
    inner: Any
    outer: Any


@dataclass(frozen=True, eq=False)
class World:
    """One learner's ranks and communicators. Frozen; mutable state is in the objects that it holds.

    Attributes:
        config: the options, the same on all learners.
        placements: of all learners, by rank.
        groups: ranks of the learners of each super learner, by super_rank; the first is the leader.
            Numbered by their smallest ranks.
        host, inner, outer: see Communicators.
        members: the super learners of `outer`, by rank there; () means all.
        rank, size: among all learners.
        local_rank, local_size: among the learners of the host.
        cross_rank, cross_size: among the learners with this local_rank, one per host at most.
        super_rank, super_size: which super learner, of how many.
        inner_rank, inner_size: among the learners of the super learner.
        hostname: of this host.
        membership: which super learners are alive, suspect, left or failed.
        collectives: operations over all learners.
        teardown: what shutdown() runs and frees.
        departure: how its super learner leaves on SIGTERM.
        shards: into how many shards models may be cut, as long as the job lasts.
        started: the super learners that a learner has started, and not the job's launcher.
    """

    config: Config
    placements: tuple[Placement, ...]
    groups: tuple[tuple[int, ...], ...]
    host: Any
    inner: Any
    outer: Any
    members: tuple[int, ...]
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    super_rank: int
    super_size: int
    inner_rank: int
    inner_size: int
    hostname: str
    membership: Membership
    collectives: Collectives
    teardown: Teardown
    departure: Departure
    shards: int = 1
    started: frozenset[int] = frozenset()

    @classmethod
    def make(
        cls,
        config: Config,
        placements: tuple[Placement, ...],
        groups: tuple[tuple[int, ...], ...],
        rank: int,
        comms: Communicators,
        joining: bool = False,
    ) -> World:
        """The world of one learner; all learners of a super learner make theirs together.

        Args:
            config: see the attributes, as for the next two.
            placements: by rank.
            groups: by super_rank.
            rank: of this learner.
            comms: of this learner.
            joining: this super learner replaces a failed one, and has not joined yet.
        """
        mine = placements[rank]
        crossing = [r for r, p in enumerate(placements) if p.local_rank == mine.local_rank]
        super_rank = next(i for i, group in enumerate(groups) if rank in group)
        names = names_of(groups, placements)
        ranks = groups[super_rank] if joining else tuple(range(len(placements)))
        plain = _is_plain(config, len(groups))
        done, departure, left = _flags(comms.inner, len(groups), plain)
        membership = Membership(groups, names, super_rank, left)
        is_leader = rank == groups[super_rank][0]
        teardown = Teardown(
            ShutdownBarrier(comms.departures, ranks), membership, groups[super_rank], done
        )
        collectives = Collectives(
            comms.all,
            comms.plain,
            rank,
            ranks,
            len(placements),
            membership,
            config.on_failure,
            joining,
            shares=config.same_host == "memory",
            quorum=config.quorum,
        )

        def tell_learners() -> None:
            if not teardown.has_begun:  # else they know, or its communicator may be freed
                collectives.say_left(groups[super_rank])

        name = f"{super_rank} ({names[super_rank]})"
        return cls(
            config=config,
            placements=placements,
            groups=groups,
            host=comms.host,
            inner=comms.inner,
            outer=comms.outer,
            members=(),
            rank=rank,
            size=len(placements),
            local_rank=mine.local_rank,
            local_size=mine.local_size,
            cross_rank=crossing.index(rank),
            cross_size=len(crossing),
            super_rank=super_rank,
            super_size=len(groups),
            inner_rank=groups[super_rank].index(rank),
            inner_size=len(groups[super_rank]),
            hostname=mine.hostname,
            membership=membership,
            collectives=collectives,
            teardown=teardown,
            departure=Departure(
                name,
                is_leader,
                departure,
                lambda: membership.is_alone,
                tell_learners,
                teardown.ends_last,
            ),
            shards=shards_of(config, groups),
        )

    @property
    def is_plain(self) -> bool:
        """Whether this is plain Horovod: one super learner, which others cannot join."""
        return _is_plain(self.config, self.super_size)

    @property
    def is_leader(self) -> bool:
        """Whether this learner is the leader of its super learner."""
        return self.inner_rank == 0

    def failed_inside(self, seconds: float) -> set[int]:
        """Ranks of the failed learners of this super learner; waits until there are any.

        Args:
            seconds: longest wait; MPI takes a moment to detect a failed process.
        """
        ends = time.monotonic() + seconds
        while not (failed := failed_comm_ranks(self.inner)) and time.monotonic() < ends:
            time.sleep(1e-3)
        return {self.groups[self.super_rank][inner_rank] for inner_rank in failed}


def names_of(groups: Sequence[Sequence[int]], placements: Sequence[Placement]) -> list[str]:
    """What to call each super learner in messages."""
    return [f"{placements[group[0]].hostname}, learner {group[0]}" for group in groups]


def shards_of(config: Config, groups: Sequence[Sequence[int]]) -> int:
    """Into how many shards models may be cut: each super learner has so many learners."""
    if config.shard != "auto" or _is_plain(config, len(groups)):
        return 1
    return min(map(len, groups))


def _is_plain(config: Config, super_size: int) -> bool:
    return super_size == 1 and config.join_secret_file is None


def _flags(inner: Any, super_size: int, plain: bool) -> list[NDArray[np.uint8]]:
    """Bytes that the learners of a super learner share; unshared in plain Horovod, which may span hosts.

    Returns:
        A byte per learner for the barrier of shutdown(); those of Departure; one per super learner
        for Membership.
    """
    sizes = inner.Get_size(), Departure.FLAGS, super_size + ROOM
    if plain:
        return [
            np.ones(sizes[0], dtype=np.uint8),
            *(np.zeros(n, dtype=np.uint8) for n in sizes[1:]),
        ]
    bytes_ = SharedSlots(0, sum(sizes), inner).flags[0]
    return np.split(bytes_, np.cumsum(sizes)[:-1])


ROOM = 1000  # super learners that may come later

_current: World | None = None


def put(world: World | None) -> None:
    """`current` returns this world from now on."""
    global _current
    _current = world


def current() -> World:
    """The world of this process.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    if _current is None:
        raise NotInitializedError("hvd_adpsgd has not been initialized; use hvd.init().")
    return _current


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() not since."""
    return _current is not None


def form_super_learners(
    placements: Sequence[Placement], size: int | None, joined: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Which learners form which super learner.

    Args:
        placements: of all learners, by rank.
        size: learners per super learner; None: all of a host.
        joined: all learners form one super learner.

    Returns:
        Ranks of each super learner, ascending; super learners by their smallest rank.

    Raises:
        TopologyError: if `size` does not divide the learners of some host.
    """
    if joined:
        return (tuple(range(len(placements))),)
    members: dict[tuple[int, int], list[int]] = {}
    for rank, placement in enumerate(placements):
        k = placement.local_size if size is None else size
        if placement.local_size % k:
            raise TopologyError(
                f"super learners of {k} on host {placement.hostname}: HVD_ADPSGD_SUPER_LEARNER_SIZE={k} "
                f"does not divide its {placement.local_size} learners. Set it to a divisor of "
                f"{placement.local_size}, or start a multiple of {k} learners on that host."
            )
        members.setdefault((placement.host, placement.local_rank // k), []).append(rank)
    return tuple(sorted(tuple(sorted(ranks)) for ranks in members.values()))
