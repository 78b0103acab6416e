"""The averaging engine of one super learner, as its learners see it.

Life of a step on a leader (L) and on the other learners of its node (O):

    L: publish()                 the corrections gathered so far become the published slot
    L, O: gradient all-reduce    now everybody may read that slot
    L, O: the user's optimizer
    L, O: absorb()               parameter += correction; on the leader also mirror = parameter
    L: offer()                   the engine may average the new model; returns at once

The engine's thread runs on the leader only. It never reads the user's tensors: what it averages is
the mirror, and what it returns is a correction, so local updates made meanwhile are kept.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.failures import mpi_failures, ulfm_advice, ulfm_enabled
from hvd_adpsgd.engine.layout import DTYPE_CODES, Layout, TensorSpec
from hvd_adpsgd.engine.loop import Loop
from hvd_adpsgd.engine.metrics import STALENESS_BINS
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.engine.shared_memory import Mailbox, Outboxes, private_memory
from hvd_adpsgd.engine.store import Arena
from hvd_adpsgd.errors import (
    AdpsgdError,
    ModelMismatchError,
    PeerFailedError,
    StrategyMismatchError,
    TransportError,
)
from hvd_adpsgd.strategies.plan import NOBODY, Plan, Rounds
from hvd_adpsgd.theory.mixing import consensus_from_exchanges

__all__ = ["Engine", "EngineOptions", "exchange_metrics"]

log = logging.getLogger("hvd_adpsgd")

_CACHES_NBYTES = 8 * 2**20  # above this, a step's own tensors leave nothing of the model in cache
_FAULT_MPI, _FAULT_LAYOUT, _FAULT_WEIGHT, _FAULT_MEMORY, _FAULT_GONE = 1, 2, 3, 4, 5
_COUNTED = (
    "exchanges_active",
    "exchanges_passive",
    "exchange_s",
    "refused",
    "declined",
    "parked",
    "void_chunks",
    "chunks",
    "bytes_sent",
    "bytes_received",
    "means",
    "mean_s",
)
_NO_COUNTERS: dict[str, Any] = {
    **dict.fromkeys(_COUNTED, 0),
    "staleness": [0] * STALENESS_BINS,
    "met": [],
}
_PATIENCE_S = 60.0  # of a step for others, before it says so; as Horovod's stall check


@dataclass(frozen=True)
class EngineOptions:
    """What a plan does not know.

    Attributes:
        exchanges_per_step: exchanges a super learner takes part in per step, on average.
        max_staleness: steps; None never waits.
        wire_dtype: "float16", "bfloat16" or None for the model's own.
        all_reduce: how means of all are summed: "mpi" or "butterfly"; see engine/butterfly.pyx.
        chunk_nbytes: largest chunk.
        deadline_s: silence after which a peer is parked.
        leave_deadline_s: longest goodbye.
        offered_only: snapshots leave out corrections that the trainer has not absorbed. Rounds in
            lock step then follow the mixing matrix of simultaneous exchanges.
        autonomous: ask by the plan; False asks only what `ask` says.
        share_host: peers on one host read each other's snapshots in shared memory; False sends
            every chunk through MPI.
        timeline: keep records of exchanges and merges for the timeline.
    """

    exchanges_per_step: float = 1.0
    max_staleness: int | None = None
    wire_dtype: str | None = None
    all_reduce: str = "mpi"
    chunk_nbytes: int = 2**18
    deadline_s: float = 1.0
    leave_deadline_s: float = 5.0
    offered_only: bool = False
    autonomous: bool = True
    share_host: bool = True
    timeline: bool = False

    @classmethod
    def from_config(cls, config: Config) -> EngineOptions:
        return cls(
            exchanges_per_step=config.exchanges_per_step,
            max_staleness=config.max_staleness,
            wire_dtype=config.wire_dtype,
            all_reduce=config.all_reduce,
            chunk_nbytes=config.chunk_kib * 1024,
            deadline_s=config.deadline_s,
            leave_deadline_s=config.leave_deadline_s,
            timeline=config.timeline is not None,
        )


class Engine:
    """Averages the model of one super learner with those of the others.

    Made by every learner of the super learner together, and by all super learners together. A
    constructor stores; `extend` then `start` act.

    Args:
        inner: communicator of the super learner (mpi4py), None for a learner alone.
        outer: communicator of the leaders; None on learners that are not leaders. The engine uses
            it exclusively, with errors returned.
        plan: whom to ask and with which weight.
        options: see EngineOptions.
        names: what to call each super learner in messages, by super_rank.
        members: the super learners of `outer`, by their rank there; () means 0, 1, ..., all of them. Who
            is none of them counts as lost.
    """

    def __init__(
        self,
        *,
        inner: Any,
        outer: Any,
        plan: Plan,
        options: EngineOptions,
        names: Sequence[str] = (),
        members: Sequence[int] = (),
    ):
        self.options = options
        self.layout = Layout(options.chunk_nbytes)
        self._inner = inner
        self._outer = outer
        self._everybody: Any = None  # the leaders' communicator for means of all
        self._plan = plan
        self._arena = Arena()
        self._memory: list[Any] = []  # whatever the arena points to
        self._spans = self.layout.spans
        self._published = 0  # publications so far: the last one is in slot (n - 1) % 2
        self._announced = 0  # generations the thread knows
        self._loop: Loop | None = None
        self._members = list(members) or list(range(outer.Get_size() if outer else 0))
        self._names = list(names) or [str(i) for i in self._members]
        self._round_over: Callable[[float], bool] | None = None  # of the round begun last
        self._met: dict[int, int] = {}  # exchanges with its peers before that
        self._step = 0
        self._seen_events = 0
        self._reported = [PeerState.ALIVE] * len(self._members)  # when they were seen
        self._seen: dict[str, Any] = {"square": 0.0, "compared": 0}
        self._told_void = False
        self._distance = float("nan")

    # ---- set-up and tear-down ------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self._outer is not None

    @property
    def communicators(self) -> list[Any]:
        """Its own, for whoever frees them when all engines have stopped."""
        return [comm for comm in (self._outer, self._everybody) if comm is not None]

    def extend(self, tensors: Sequence[TensorSpec]) -> None:
        """Average these tensors too, from the next offer on. All learners of the node call it."""
        generation = self.layout.extend(tensors)
        mailbox = Mailbox(generation.nbytes, len(generation.chunks), self._inner)
        mirror = private_memory(generation.nbytes) if self.is_leader else None
        self._memory.append((mailbox, mirror))
        for i, chunk in enumerate(generation.chunks):
            self._arena.add_chunk(
                mirror.ctypes.data + chunk.offset if mirror is not None else 0,
                mailbox.slots[0].ctypes.data + chunk.offset,
                mailbox.slots[1].ctypes.data + chunk.offset,
                mailbox.flags[0].ctypes.data + i,
                mailbox.flags[1].ctypes.data + i,
                chunk.count,
                DTYPE_CODES[chunk.dtype],
            )
        self._spans = self.layout.spans
        self._arena.stream(sum(g.nbytes for g in self.layout.generations) > _CACHES_NBYTES)

    def start(self) -> None:
        """Start the thread (leader only); it answers, and asks after the first offer.

        Raises:
            PeerFailedError: if a leader failed meanwhile.
            TransportError: if MPI failed otherwise.
        """
        if not self.is_leader:
            return
        from mpi4py import MPI

        options = self.options
        schedule = self._schedule()
        wire = -1 if options.wire_dtype is None else DTYPE_CODES[options.wire_dtype]
        self._loop = Loop(
            self._outer,
            MPI._addressof(self._outer),
            self._arena,
            schedule if options.autonomous else schedule[:0],
            self._plan.weight,
            options.exchanges_per_step,
            wire,
            options.offered_only or _in_pairs(self._plan.in_step),
            options.deadline_s,
            options.leave_deadline_s,
            options.chunk_nbytes,
            options.timeline,
        )
        with mpi_failures("averaging"):
            self._meet_leaders(self._loop)
        self._announce()
        self._loop.start()
        atexit.register(self.stop)  # before MPI is finalised, however the program ends

    def _schedule(self) -> NDArray[np.intc]:
        """Whom to ask, one after the other, by rank in `outer`."""
        wanted = self._plan.schedule.ravel()
        places = [self._place(peer) for peer in wanted.tolist()]
        return np.array([place for place in places if place != NOBODY], dtype=np.intc)

    def _place(self, peer: int) -> int:
        """The rank in `outer` of a super learner; NOBODY if it has none."""
        return self._members.index(peer) if peer in self._members else NOBODY

    def _partner(self, place: int) -> int:
        """The super learner at a rank in `outer`; NOBODY for NOBODY."""
        return self._members[place] if place != NOBODY else NOBODY

    def _meet_leaders(self, loop: Loop) -> None:
        """What all leaders make together."""
        from mpi4py import MPI

        if _of_all(self._plan.in_step):
            self._everybody = self._outer.Dup()  # after a loss the thread puts another in
            butterfly = self.options.all_reduce == "butterfly"
            loop.average_all(MPI._addressof(self._everybody), ulfm_enabled(), butterfly)
        if self.options.share_host:
            outboxes = Outboxes(Loop.shared_nbytes(self.options.chunk_nbytes), self._outer)
            self._memory.append(outboxes)
            loop.share(outboxes.own, outboxes.mapped)

    def _announce(self) -> None:
        """Tell the thread about generations whose mirror is filled (or that nobody offered yet)."""
        if self._loop is None:
            return
        for generation in self.layout.generations[self._announced :]:
            self._loop.extend(generation.last_chunk, generation.fingerprint)
        self._announced = len(self.layout.generations)

    def stop(self, broken: bool = False) -> None:
        """Leave: finish what runs, tell the others, end the thread. Bounded; idempotent.

        Args:
            broken: this super learner cannot go on; the others count it as lost.
        """
        if self._loop is not None:
            self._arena.reopen()  # what is on its way can still be merged
            self._loop.stop(broken)
            atexit.unregister(self.stop)

    # ---- the step --------------------------------------------------------------------------

    def publish(self, step: int) -> None:
        """Make the corrections gathered so far readable (leader, before the inner all-reduce).

        Raises:
            AdpsgdError: the first failure after which averaging cannot go on.
        """
        self.check()
        assert self._loop is not None
        if self.options.max_staleness is not None:
            # what is merged after this publication is applied one step later
            self._loop.wait_fresh(step + 1 - self.options.max_staleness, self.options.deadline_s)
        self._arena.publish(hold=self._inner is not None and self._inner.Get_size() > 1)

    def reopen(self) -> None:
        """The all-reduce after `publish` is over: nobody reads the other slot any longer."""
        self._arena.reopen()

    def published(self) -> int:
        """Count one publication, on every learner. Returns the slot it went to."""
        slot = self._published % 2
        self._published += 1
        return slot

    def corrections(self, slot: int) -> int:
        """How many chunks of a published slot hold a correction."""
        return self._arena.pending(slot)

    def absorb(self, addresses: NDArray[np.uintp], slot: int, step: int) -> bool:
        """parameter += correction of `slot` (-1: none); on the leader also mirror = parameter.

        Args:
            addresses: first element of each tensor in the order of `extend`; contiguous memory.
            slot: what `published` returned.
            step: the trainer's step of these parameters.

        Returns:
            True if every parameter is finite.
        """
        return not self._arena.absorb(self._spans, addresses, slot, step)

    def offer(self, step: int, fit: bool = True) -> None:
        """The mirror may be averaged now; returns at once (leader only).

        A model that is not `fit` is kept from the others, but in rounds they wait for an answer: there
        its chunks that are not finite are empty messages.
        """
        if self._loop is None:
            return
        self._step = step
        self._announce()
        self._loop.offer(step, fit or _in_pairs(self._plan.in_step))
        if not self._told_void and self._loop.void_exchanges():
            self._told_void = True
            self._warn_void()

    def _warn_void(self) -> None:
        wire = self.options.wire_dtype
        cure = "Look at the parameters for huge values."
        if wire == "float16":
            cure = 'Values above 65504 do not fit: use wire_dtype="bfloat16", or None.'
        log.warning(
            "an exchange averaged nothing: no chunk of the two models was finite%s. %s",
            f" in {wire}" if wire else "",
            cure,
        )

    # ---- driven by hand ----------------------------------------------------------------------

    def ask(self, peer: int) -> None:
        """One exchange with `peer`, asked until it says yes."""
        assert self._loop is not None
        self._loop.ask(self._place(peer))

    def wait_finished(self, count: int, seconds: float) -> bool:
        """Wait until `count` exchanges, asked or answered, are finished in all."""
        assert self._loop is not None
        return bool(self._loop.wait_finished(count, seconds))

    def pause(self, seconds: float) -> bool:
        """Begin no exchange, and wait until none runs. Returns False after `seconds`."""
        if self._loop is None:
            return True
        self._loop.pause(True)
        return bool(self._loop.wait_quiet(seconds))

    def resume(self) -> None:
        if self._loop is not None:
            self._loop.pause(False)

    # ---- in step with the others -------------------------------------------------------------

    def begin_round(self, number: int) -> None:
        """Begin a round of the plan with the models offered last (leader only).

        Gossip beside it rests first, until `resume`: the mean is then of all that was owed.

        Args:
            number: of the round, the same on all super learners.

        Raises:
            AdpsgdError: the first failure after which averaging cannot go on.
        """
        rounds = self._plan.in_step
        assert rounds is not None
        if self._loop is None:
            return
        if rounds.peers is not None:
            self._begin_pairs(number, *map(self._place, rounds.row(number)))
            return
        if self._plan.width:
            self._loop.pause(True)
            self._wait(self._loop.wait_quiet)
        number = self._loop.begin_mean(rounds.replaces)
        self._round_over = functools.partial(self._loop.wait_mean, number)

    def _begin_pairs(self, number: int, asked: int, asker: int) -> None:
        """By ranks in `outer`."""
        assert self._loop is not None
        self._met = {p: self._loop.met(p) for p in (asked, asker) if p != NOBODY}
        self._round_over = self._pairs_over
        self._loop.begin_round(number + 1, asked)  # 0 is for gossip without rounds

    def finish_round(self) -> None:
        """Wait until what the round owes the model is in the open slot; nothing to do without one.

        A peer that has left or has failed is not waited for. A mean of all goes on without the lost
        (under ULFM), and without those who have left once their processes have ended.

        Raises:
            PeerFailedError: if a mean of all needs a super learner that has left or has failed.
            AdpsgdError: the first failure after which averaging cannot go on.
        """
        over, self._round_over = self._round_over, None
        if over is not None:
            self._wait(over)

    def _pairs_over(self, seconds: float) -> bool:
        """Whether every peer of the round has finished its exchange, or never will."""
        assert self._loop is not None
        finished = self._loop.finished()
        states = self._loop.peers()
        missing = [
            p
            for p, met in self._met.items()
            if self._loop.met(p) == met and states[p] < PeerState.LEFT
        ]
        if not missing:
            return True
        self._loop.wait_finished(finished + 1, min(seconds, 0.05))
        return False

    def _wait(self, over: Callable[[float], bool]) -> None:
        """Wait in slices, so that signals and failures are noticed."""
        tell = time.monotonic() + _PATIENCE_S
        while not over(0.1):
            self.check()
            if time.monotonic() > tell:
                tell = math.inf
                log.warning(
                    "step %d has waited %g s for other super learners. They are slow, or have made fewer "
                    "steps and wait somewhere else: with this strategy all must make the same steps. "
                    "SIGUSR1 makes every learner write where it is.",
                    self._step,
                    _PATIENCE_S,
                )

    # ---- failures ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the latched failure, if there is one."""
        if self._loop is None:
            return
        kind, code, place = self._loop.fault()
        if kind:
            raise self._failure(kind, code, self._partner(place))

    @property
    def failed(self) -> bool:
        """Whether `check` would raise."""
        return self._loop is not None and bool(self._loop.fault()[0])

    def _failure(self, kind: int, code: int, peer: int) -> AdpsgdError:
        who = self._names[peer] if peer >= 0 else "another super learner"
        if kind == _FAULT_LAYOUT:
            return ModelMismatchError(
                f"super learner {who} averages other tensors than this one (a parameter group was "
                "added here or there with other names, shapes or dtypes). Add the same groups in "
                "the same order everywhere."
            )
        if kind == _FAULT_WEIGHT:
            return StrategyMismatchError(
                f"super learner {who} averages with another weight than {self._plan.weight:g}. Use "
                "the same strategy everywhere."
            )
        if kind == _FAULT_MEMORY:
            return TransportError(
                f"no memory for the buffers of an exchange with {who}: free memory on this host or "
                "lower HVD_ADPSGD_CHUNK_KIB."
            )
        if kind == _FAULT_GONE:
            return PeerFailedError(
                f"super learner {who} has left or has failed, and this strategy averages over all super "
                "learners. Let all make as many steps, or use a gossip strategy (random_pairs), which waits "
                f"for nobody. {ulfm_advice()}",
                code=code,
                peer=peer if peer >= 0 else None,
            )
        cls = PeerFailedError if peer >= 0 else TransportError
        return cls(
            f"MPI failed with code {code} in the averaging engine (peer: {who}). {ulfm_advice()}",
            code=code,
            peer=peer if peer >= 0 else None,
        )

    def report(self) -> list[tuple[int, PeerState]]:
        """What has become of peers since the last report: (super_rank, state)."""
        if self._loop is None or self._loop.peer_events() == self._seen_events:
            return []
        self._seen_events = self._loop.peer_events()
        before, self._reported = self._reported, [PeerState(s) for s in self._loop.peers()]
        changes = zip(self._members, before, self._reported, strict=True)
        return [(peer, state) for peer, old, state in changes if state is not old]

    def _by_super_rank(self, values: Sequence[int], absent: int) -> list[int]:
        """Values by rank in `outer`, of all super learners."""
        spread = dict(zip(self._members, values, strict=True))
        return [spread.get(peer, absent) for peer in range(len(self._names))]

    # ---- numbers -----------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """See exchange_metrics; of zeros on learners that are not leaders."""
        if self._loop is None:
            return exchange_metrics(None)
        counters = self._loop.counters()
        return {
            **exchange_metrics(counters),
            "peers": self._by_super_rank(counters["met"], 0),
            "consensus_distance": self._consensus_distance(counters),
            "engine_cpu_s": self._loop.cpu_s(),
        }

    def _consensus_distance(self, counters: Mapping[str, Any]) -> float:
        """From the exchanges since the last look; the last value if none compared anything.

        Without any exchange the distance of this model from the last mean of all.
        """
        if counters["compared"] == 0 and counters["means"]:
            return math.sqrt(counters["mean_square"])
        compared = counters["compared"] - self._seen["compared"]
        if compared > 0:
            mean_square = (counters["square"] - self._seen["square"]) / compared
            self._distance = consensus_from_exchanges(max(mean_square, 0.0), len(self._names))
            self._seen = dict(counters)
        return self._distance

    def view(self) -> dict[str, Any]:
        """What the engine is doing, read without locks: for people."""
        if self._loop is None:
            return {"leads": False}
        names = [self._names[peer] for peer in self._members]
        return {"leads": True, **self._loop.view(), "peer_names": names}

    def take_events(self) -> list[tuple[int, int, float, float, int, int]]:
        """Timeline records since the last call; see _engine.Loop.take_events."""
        if self._loop is None:
            return []
        return [
            (kind, self._partner(place), began, ended, nbytes, step)
            for kind, place, began, ended, nbytes, step in self._loop.take_events()
        ]

    def cpu_s(self) -> float:
        """CPU seconds of the thread so far."""
        return float(self._loop.cpu_s()) if self._loop is not None else 0.0


def _in_pairs(rounds: Rounds | None) -> bool:
    return rounds is not None and rounds.peers is not None


def _of_all(rounds: Rounds | None) -> bool:
    return rounds is not None and rounds.peers is None


def exchange_metrics(counters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Numbers of an engine from the counters of its thread; all 0 or NaN without one."""
    counters = counters or _NO_COUNTERS
    histogram = np.array(counters["staleness"])
    return {
        "exchanges": counters["exchanges_active"] + counters["exchanges_passive"],
        **{name: counters[name] for name in _COUNTED},
        "staleness": histogram.tolist(),
        "staleness_mean": _histogram_mean(histogram),
        "consensus_distance": float("nan"),
        "peers": counters["met"],
        "engine_cpu_s": 0.0,
    }


def _histogram_mean(histogram: NDArray[np.int64]) -> float:
    total = int(histogram.sum())
    return float(np.arange(histogram.size) @ histogram) / total if total else float("nan")
