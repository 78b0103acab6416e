"""One learner's ranks, communicators and state.

All learners share one MPI communicator. Each super learner has a communicator of its own, in which its
Horovod runs: with one Horovod world per super learner, no Horovod operation waits for another super
learner. The leaders of the super learners share a third communicator.
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
from hvd_adpsgd.messaging.mpi_transport import exited
from hvd_adpsgd.polling import polls


@dataclass(frozen=True)
class Placement:
    """The host on which one learner runs, and the learner's rank among the learners of that host.

    Attributes:
        host: smallest rank among the learners of its host; identifies the host.
        hostname: for messages only; several hosts may have the same name.
        local_rank, local_size: rank and number among the learners of its host.
    """

    host: int
    hostname: str
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Communicators:
    """The communicators of a learner: mpi4py's with MPI.ERRORS_RETURN, or the library's own over sockets.

    Attributes:
        all, plain, departures: of all learners; on a joining super learner, of its own learners until it has
            joined. Only operations over all learners use `plain`, only shutdown uses `departures`, so their
            messages never match another operation.
        host: of the learners of this host.
        inner: of the learners of this super learner.
        outer: of the counterparts, the learners with the same inner rank in their super learners: on leaders
            of the leaders. None on learners whose inner rank some super learner lacks.
    """

    all: Any
    plain: Any
    departures: Any
    host: Any
    inner: Any
    outer: Any


@dataclass(frozen=True, eq=False)
class World:
    """One learner's ranks, communicators and state. Frozen; mutable state is in the objects of its fields.

    Attributes:
        config: the options, the same on all learners.
        placements: the placements of all learners, by rank.
        groups: ranks of the learners of each super learner, by super_rank; the first is the leader.
            Super learners are numbered in the order of their smallest ranks.
        host, inner, outer: see Communicators.
        members: super_ranks of the super learners in `outer`, by rank in `outer`; () means all.
        rank, size: rank and number among all learners.
        local_rank, local_size: rank and number among the learners of the host.
        cross_rank, cross_size: rank and number among the learners with this local_rank, at most one per host.
        super_rank, super_size: rank of this super learner, and number of super learners.
        inner_rank, inner_size: rank and number among the learners of the super learner.
        hostname: name of this host.
        membership: which super learners are alive, suspect, left or failed.
        collectives: runs the operations over all learners.
        teardown: callbacks that shutdown() runs, and communicators that it frees.
        departure: how this super learner leaves on SIGTERM.
        shards: number of shards into which models may be cut; constant in a job.
        started: super_ranks of the super learners that a learner, not the job's launcher, has started.
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
        """Make the World of one learner; all learners of a super learner call this together.

        Args:
            config: see the attributes.
            placements: see the attributes.
            groups: see the attributes.
            rank: this learner's rank in the job.
            comms: this learner's communicators.
            joining: whether this super learner is joining a running job, and has not joined yet.
        """
        mine = placements[rank]
        crossing = [r for r, p in enumerate(placements) if p.local_rank == mine.local_rank]
        super_rank = next(i for i, group in enumerate(groups) if rank in group)
        names = names_of(groups, placements)
        ranks = groups[super_rank] if joining else tuple(range(len(placements)))
        plain = _is_plain(config, len(groups))
        done, departure, left = _flags(comms.inner, plain)
        membership = Membership(groups, names, super_rank, left)
        is_leader = membership.is_leader = rank == groups[super_rank][0]
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

        def notify_learners() -> None:
            if not teardown.has_begun:  # else shutdown() notifies them, or has freed `plain`
                collectives.announce_departure(groups[super_rank])

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
                notify_learners,
                teardown.ends_last,
            ),
            shards=shards_of(config, groups),
        )

    @property
    def is_plain(self) -> bool:
        """Whether this job is plain Horovod: it has one super learner, and no second one can join."""
        return _is_plain(self.config, self.super_size)

    @property
    def is_leader(self) -> bool:
        """Whether this learner is the leader of its super learner."""
        return self.inner_rank == 0

    @property
    def counterparts(self) -> frozenset[int]:
        """Ranks of the learners with this inner rank in their super learners, this learner's own one too."""
        its = self.inner_rank
        return frozenset(group[its] for group in self.groups if len(group) > its)

    def super_rank_of(self, rank: int) -> int:
        """Return the super_rank of learner `rank`."""
        return next(i for i, group in enumerate(self.groups) if rank in group)

    def failed_ranks(self) -> tuple[int, ...]:
        """Return the ranks of the learners of failed super learners, ascending; does not block."""
        return self.membership.failed_ranks(self.collectives.ended())

    def living(self) -> set[int]:
        """Return the ranks of the learners that operations include and whose super learner has not failed."""
        return set(self.collectives.ranks).difference(self.membership.failed_ranks())

    def failed_inside(self, seconds: float) -> set[int]:
        """Return the ranks of this super learner's failed learners; wait until a learner has failed.

        Args:
            seconds: longest wait; MPI takes a moment to detect a failed process.
        """
        polled = (
            exited(self.inner, self.groups[self.super_rank])
            for _ in polls(time.monotonic() + seconds)
        )
        return next(filter(None, polled), set())


def names_of(groups: Sequence[Sequence[int]], placements: Sequence[Placement]) -> list[str]:
    """Return the name of each super learner for messages, by super_rank: host and rank of its leader."""
    return [f"{placements[group[0]].hostname}, learner {group[0]}" for group in groups]


def shards_of(config: Config, groups: Sequence[Sequence[int]]) -> int:
    """Return into how many shards models may be cut: at most the size of the smallest super learner."""
    if config.shard != "auto" or _is_plain(config, len(groups)):
        return 1
    return min(map(len, groups))


def _is_plain(config: Config, super_size: int) -> bool:
    return super_size == 1 and config.join_secret_file is None


def _flags(inner: Any, plain: bool) -> list[NDArray[np.uint8]]:
    """Return bytes in memory that the learners of a super learner share.

    In plain Horovod they are not shared, because its super learner may span hosts.

    Returns:
        Three arrays: a byte per learner for Teardown, the flags of Departure, and a byte per super learner
        for Membership.
    """
    sizes = inner.Get_size(), Departure.FLAGS, MOST_SUPER_LEARNERS
    if plain:
        return [
            np.ones(sizes[0], dtype=np.uint8),
            *(np.zeros(n, dtype=np.uint8) for n in sizes[1:]),
        ]
    bytes_ = SharedSlots(0, sum(sizes), inner).flags[0]
    return np.split(bytes_, np.cumsum(sizes)[:-1])


# most super learners of a job, with all that have joined and have left; the same on all learners
MOST_SUPER_LEARNERS = 2**16

_current: World | None = None


def put(world: World | None) -> None:
    """Set the World that `current` returns from now on; None after shutdown()."""
    global _current
    _current = world


def current() -> World:
    """Return the World of this process: its ranks, communicators and state.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    if _current is None:
        raise NotInitializedError("hvd_adpsgd has not been initialized; use hvd.init().")
    return _current


def is_initialized() -> bool:
    """Return whether init() has been called, and shutdown() has not been called since."""
    return _current is not None


def form_super_learners(
    placements: Sequence[Placement], size: int | None, joined: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Group the learners into super learners.

    Args:
        placements: the placements of all learners, by rank.
        size: number of learners per super learner; None: all learners of a host.
        joined: whether all learners form one super learner.

    Returns:
        Ranks of the learners of each super learner, ascending; super learners by their smallest rank.

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
