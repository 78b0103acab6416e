"""The averaging engine of one super learner, as seen from its learners.

One step on a leader (L) and on the other learners of its super learner (O):

    L, O: publish()              the corrections gathered so far (in a buffer, the slot) are published
    L, O: gradient all-reduce    after it all of these learners may read the published slot
    L, O: the user's optimizer
    L, O: memory.absorb()        parameter += correction; on the leader also mirror = parameter
    L, O: offer()                the engine may average the new model; returns at once

The engine's thread runs on the leader only. It never reads the user's tensors: what it averages is its own
copy of the model (the mirror), and what it returns is a correction, so concurrent local updates are kept.

With shards (shard_memory.py) every learner is the leader of its own shard: its thread averages that shard
with the threads of its counterparts, the learners with the same inner rank in the other super learners.
"""

import atexit
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.connections import Connections
from hvd_adpsgd.engine.engine_options import EngineOptions
from hvd_adpsgd.engine.failures import mpi_failures, ulfm_advice
from hvd_adpsgd.engine.layout import DTYPE_CODES
from hvd_adpsgd.engine.loop import Loop
from hvd_adpsgd.engine.metrics import PEER_TABLES, ExchangeMetrics
from hvd_adpsgd.engine.neighbours import Neighbours, OutboxShape
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.engine.shard_memory import ModelMemory
from hvd_adpsgd.engine.step_rounds import StepRounds
from hvd_adpsgd.engine.turns import Moves, leaves_out
from hvd_adpsgd.engine.wire import AnyWire, SystemClock
from hvd_adpsgd.errors import (
    AdpsgdError,
    ModelMismatchError,
    PeerFailedError,
    StrategyMismatchError,
    TransportError,
)
from hvd_adpsgd.formats import OWN, Format
from hvd_adpsgd.strategies.plan import NOBODY, Plan

log = logging.getLogger("hvd_adpsgd")

_held_by_mpi: list[Loop] = []
# number of exchanges in a row that leave out a chunk before a warning; most tensors that a warning names
_LEFT_OUT, _NAMES = 8, 5
_FAULT_MPI, _FAULT_LAYOUT, _FAULT_WEIGHT, _FAULT_MEMORY, _FAULT_GONE = 1, 2, 3, 4, 5
_FAULT_STATE, _FAULT_FENCED = 6, 7


class Engine:
    """Averages the model of one super learner with those of its peers.

    All learners of all super learners make their engines together. The constructor only stores its arguments;
    call `memory.extend`, then `start`.

    Args:
        inner: communicator of the super learner (mpi4py), None for a learner alone.
        outer: communicator of the leaders, with errors returned; None on learners that are not leaders.
            Several engines share it and divide all its tags but 0 among them, so all leaders make their
            engines in the same order. With shards: the communicator of this learner and its counterparts;
            None on learners without a shard.
        plan: which peers to ask, and with which weight.
        config: the options.
        names: the name of each super learner in messages, by super_rank.
        members: super_rank of each rank of `outer`; () means 0, 1, ... Super learners that are not members
            count as failed.
        has_neighbours: whether other super learners may run on this host, which can read the model directly
            in shared memory.
        memory: memory of an earlier, paused engine with the same tensors; None: new memory, which
            `memory.extend` fills.
        shards: number of shards into which the model is cut.

    Attributes:
        memory: the engine's copy (mirror) and the corrections of the averaged tensors.
        loop: the engine's thread; None on learners that are not leaders.
        rounds: rounds of pairs, and means over all super learners, for which steps wait.
    """

    def __init__(
        self,
        *,
        inner: Any,
        outer: Any,
        plan: Plan,
        config: Config,
        names: Sequence[str] = (),
        members: Sequence[int] = (),
        has_neighbours: bool = True,
        memory: ModelMemory | None = None,
        shards: int = 1,
    ):
        self.config = config
        near = has_neighbours and outer is not None and outer.Get_size() > 1
        shows = near and config.same_host == "memory"
        self.memory = memory or ModelMemory(
            config.chunk_kib * 1024, inner, outer is not None, shows, shards
        )
        self._outer = outer
        self._plan = plan
        self._moves(config.first_share)
        self._connections: Connections | None = None  # connections of a TCP wire; None over MPI
        # keeps the memory mapped that the engine's thread reads
        self._neighbours: Neighbours | None = None
        self._announced = 0  # number of layout parts that the engine's thread knows
        self._members = list(members) or list(range(outer.Get_size() if outer else 0))
        self._names = list(names) or [str(i) for i in self._members]
        self.loop = self._make_loop() if outer is not None else None
        self.rounds = StepRounds(plan, self.loop, self._comm_rank, self.check)
        self._seen_events = 0
        # states of peers at the last `report`
        self._reported = [PeerState.ALIVE] * len(self._members)
        self._seen_void = 0  # number of chunks that exchanges had left out at the last `offer`
        self._told_void: set[str] = set()  # names of tensors that a warning has named
        self._told_malformed = False
        self._metrics = ExchangeMetrics(len(self._names))
        self._final: dict[str, Any] = {}
        self._stopping = threading.Lock()
        self._announcing = threading.Lock()  # models on devices are offered from another thread

    def _make_wire(self) -> AnyWire:
        if self.config.wire == "tcp":
            rank, size = self._outer.Get_rank(), self._outer.Get_size()
            self._connections = Connections(rank, size, self.config)
            return self._connections.wire

        from mpi4py import MPI

        # here, because it loads libmpi, which a job without MPI may lack
        from hvd_adpsgd.engine.wire_mpi import MpiWire

        return MpiWire(
            self._outer, MPI._addressof(self._outer), _next_wire(self._outer, MpiWire.CHANNELS)
        )

    def _make_loop(self) -> Loop:
        wanted = map(self._comm_rank, self._plan.schedule.ravel().tolist())
        return Loop(
            self._make_wire(),
            SystemClock(),
            self.memory.own.store,
            np.array([rank for rank in wanted if rank != NOBODY], dtype=np.intc),
            EngineOptions.of(self.config, self._plan),
        )

    def start(self, gather: Callable[[Any], list[Any]] | None = None) -> None:
        """Start the engine's thread (leader only): it answers peers, and asks peers once a model is offered.

        Stops the engine on any error.

        Args:
            gather: returns the values of all leaders, by rank in `outer`, with None for a failed leader; the
                other learners call it as often as leaders do. By default an all-gather over `outer`.

        Raises:
            PeerFailedError: if a leader fails during the call.
            TransportError: if MPI failed otherwise.
        """
        if self.loop is None:
            if gather is not None:
                for _ in range(self._gathers):
                    gather(None)
            return
        try:
            with mpi_failures("averaging"):
                self._meet_leaders(self.loop, gather or self._outer.allgather)
            self._announce()
            self.loop.start()
        except BaseException:
            self.stop()
            raise
        # otherwise MPI_Finalize runs at exit while the thread still calls MPI
        atexit.register(self.stop)

    @property
    def _gathers(self) -> int:
        """Number of times that `_meet_leaders` calls `gather`."""
        neighbours = Neighbours.GATHERS if self.config.same_host == "memory" else 0
        return neighbours + (Connections.GATHERS if self.config.wire == "tcp" else 0)

    def _comm_rank(self, peer: int) -> int:
        """Return the rank in `outer` of super learner `peer`; NOBODY if the engine has no such member."""
        return self._members.index(peer) if peer in self._members else NOBODY

    def _super_rank(self, rank: int) -> int:
        """Return the super_rank of the leader with rank `rank` in `outer`; NOBODY for NOBODY."""
        return self._members[rank] if rank != NOBODY else NOBODY

    def _meet_leaders(self, loop: Loop, gather: Callable[[Any], list[Any]]) -> None:
        """Exchange addresses and map shared memory with the other leaders; all of them call it together."""
        if self._plan.averages_all:
            loop.average_all()
        if self._connections is not None:
            self._connections.meet(gather)
        if self.config.same_host == "memory":
            chunk_nbytes = self.config.chunk_kib * 1024
            outbox = OutboxShape(Loop.shared_nbytes(chunk_nbytes), Loop.doorbell_at(chunk_nbytes))
            near = Neighbours(outbox, self._outer.Get_rank(), gather, self.memory.own.shown)
            loop.share(near.own, near.outboxes, near.models, near.areas)
            # over TCP the thread sleeps until a socket has something to read
            if self._connections is None:
                loop.hear(near.doorbell, near.doorbells)
            self._neighbours = near

    def _announce(self) -> None:
        """Notify the engine's thread of new groups of tensors (layout parts).

        Call it once the engine's copy of the model (mirror) holds these tensors, or before any offer.
        """
        if self.loop is None:
            return
        with self._announcing:
            layout = self.memory.own.layout
            for part in layout.parts[self._announced :]:
                rare = layout.rare(part.last_chunk)
                self.loop.extend(part.last_chunk, part.fingerprint, rare, layout.period)
            self._announced = len(layout.parts)

    def stop(self, broken: bool = False, within_s: float = math.inf) -> None:
        """Finish running exchanges, notify peers, end the engine's thread. Bounded, idempotent, thread-safe.

        Args:
            broken: whether this super learner has failed, so that its peers count it as failed, not as left.
            within_s: longest time in seconds, if less than leave_deadline_s.
        """
        with self._stopping:
            if self.loop is not None:
                self.loop.stop(broken, within_s)
                atexit.unregister(self.stop)
            if self._connections is not None:
                self._connections.close()
                self._connections = None

    def release(self, keeps_memory: bool = False) -> None:
        """Free the engine's memory, except buffers of open MPI requests; call it after `stop`.

        Args:
            keeps_memory: whether another engine uses the memory of the model too: peers may still map it.
        """
        self._final = self.metrics()
        if self.loop is not None and not self.loop.released():
            _held_by_mpi.append(self.loop)
        self.loop = self._neighbours = None
        if not keeps_memory:
            self.memory.own.hide()
        self.rounds = StepRounds(self._plan, None, self._comm_rank, self.check)
        self.memory = ModelMemory(self.config.chunk_kib * 1024, None, False)

    def publish(self, step: int) -> None:
        """Let this super learner's learners read the corrections that exchanges have computed; once per step.

        Call it before the super learner's all-reduce, after which they may read. Waits first for a round in
        progress.

        Raises:
            AdpsgdError: the first fatal failure of the engine.
        """
        if self.memory.own.published:
            return
        if self.loop is not None:
            if self._plan.in_step is not None:
                self.rounds.finish()
            self.check()
            self.loop.wait_fresh(step, self.config)
        self.memory.publish(step)

    def offer(self, step: int, fit: bool = True) -> None:
        """Let the engine average its copy of the model (mirror) with peers; returns at once (leader only).

        A model with NaN or infinity (not `fit`) is not sent to peers. In rounds, where peers wait for an
        answer, its non-finite chunks are sent as empty messages.
        """
        own = self.memory.own
        if self.loop is None or not own.nchunks:
            return  # a shard may have no chunk: there may be fewer chunks than shards
        if own.landing is None and self._announced < len(own.layout.parts):
            self._announce()
        self.loop.offer(step, fit or self._plan.in_pairs)
        if self.loop.void_chunks() != self._seen_void:
            self._seen_void = self.loop.void_chunks()
            self._warn_left_out()
        if not self._told_malformed and self.loop.malformed()[0]:
            self._told_malformed = True
            self._warn_malformed()

    def wants_copy(self, step: int) -> bool:
        """Whether to copy the parameters of step `step` to the engine's copy; see ShardMemory.wants."""
        due = self.loop is not None and self.loop.due()
        return self.memory.own.wants(step, due, self.config.exchanges_per_step)

    def _warn_left_out(self) -> None:
        """Warn, once per tensor, of tensors of which the last 8 exchanges left out a chunk."""
        chunks = self.memory.own.store.left_out(_LEFT_OUT)
        names = [n for n in self.memory.own.layout.names_in(chunks) if n not in self._told_void]
        if not names:
            return
        self._told_void.update(names)
        wire = self.config.wire_dtype
        cure = "Look at the values of these tensors."
        if wire == "float16":
            cure = 'Values above 65504 do not fit: use wire_dtype="bfloat16", or None.'
        log.warning(
            "the last %d exchanges left out the chunks with tensors %s%s: on this super learner or on the "
            "peer a value was not finite%s. %s",
            _LEFT_OUT,
            ", ".join(names[:_NAMES]),
            f" and {len(names) - _NAMES} more tensors" if len(names) > _NAMES else "",
            f" in {wire}" if wire in DTYPE_CODES else "",
            cure,
        )

    def _warn_malformed(self) -> None:
        assert self.loop is not None
        peer = self.loop.malformed()[1]
        who = f"super learner {self._members[peer]}" if peer >= 0 else "a super learner"
        log.warning(
            "%s sent a message that no engine sends; such messages are ignored. Its memory or network may be "
            "faulty: look at its host.",
            who,
        )

    def pause(self, seconds: float) -> bool:
        """Begin no new exchange; wait until none runs, and return False if that takes more than `seconds`."""
        if self.loop is None:
            return True
        self.loop.pause(True)
        return bool(self.loop.wait_quiet(seconds))

    def resume(self) -> None:
        if self.loop is not None:
            self.loop.pause(False)

    def move_share(self, share: float, wire_format: Format = OWN) -> None:
        """Let the next exchanges move this share of the model, at most: the peer may want a smaller one.

        Args:
            share: in (0, 1].
            wire_format: with wire_dtype="auto", their format between hosts. The peer may want fewer bits.
        """
        self._moves(share)
        if (loop := self.loop) is not None:
            loop.move_share(share)
            if self.config.chooses_bits:
                loop.use_format(wire_format.code)

    def mark_next(self, marks: NDArray[np.uint8]) -> None:
        """Set to 1 the marks of the chunks of the next exchange for which the engine asks."""
        if (loop := self.loop) is not None:
            loop.mark_next(marks)

    def _moves(self, share: float) -> None:
        """Tell the memory how large a share exchanges move, unless each step has to copy the whole model."""
        config = self.config
        turns = leaves_out(self._plan, config)
        for shard in self.memory.shards:
            shard.moves = Moves(share, config.exchanges_per_step) if turns else None

    def check(self) -> None:
        """Raise the fatal failure that the engine's thread has stored, if there is one."""
        if self.loop is None:
            return
        kind, code, rank = self.loop.fault()
        if kind:
            peer = self._super_rank(rank) if rank != NOBODY else None
            who = "another super learner" if peer is None else f"super learner {self._names[peer]}"
            raise _failure(kind, code, peer, who, self._plan.weight)

    @property
    def failed(self) -> bool:
        """Whether `check` would raise."""
        return self.loop is not None and bool(self.loop.fault()[0])

    def report(self) -> list[tuple[int, PeerState]]:
        """Return (super_rank, state) of each peer whose state has changed since the last call."""
        loop = self.loop
        if loop is None or loop.peer_events() == self._seen_events:
            return []
        self._seen_events = loop.peer_events()
        before, self._reported = self._reported, [PeerState(s) for s in loop.peers()]
        changes = zip(self._members, before, self._reported, strict=True)
        return [(peer, state) for peer, old, state in changes if state is not old]

    def _by_super_rank(self, values: Sequence[int], absent: int) -> list[int]:
        """Return `values`, which are by rank in `outer`, by super_rank; `absent` for non-members."""
        spread = dict(zip(self._members, values, strict=True))
        return [spread.get(peer, absent) for peer in range(len(self._names))]

    def send_report(self, text: bytes) -> None:
        """Send a report of this super learner to all others by gossip, so with a delay (leader only).

        Args:
            text: the report, at most 200 bytes (REPORT_NBYTES of reports.pxd); replaces the previous one.
        """
        if (loop := self.loop) is not None:
            loop.report(text)

    def reports(self) -> dict[int, tuple[int, bytes, float]]:
        """Return each super learner's newest report, by super_rank: (version, text, age in seconds)."""
        if (loop := self.loop) is None:
            return {}
        return {self._members[rank]: report for rank, report in loop.reports().items()}

    def metrics(self) -> dict[str, Any]:
        """Return the engine's metrics (ExchangeMetrics); zeros on non-leaders; last ones after `release`."""
        if (loop := self.loop) is None:
            return self._final or self._metrics.read(None)
        return self._metrics.read(self._counted(loop), loop.cpu_s())

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the engine's thread; 0 without one."""
        return 0.0 if (loop := self.loop) is None else loop.cpu_s()

    def counters(self) -> dict[str, Any] | None:
        """Return the counters of the engine's thread, exchanges by super_rank; None on non-leaders."""
        loop = self.loop  # read once, as `release` on another thread may set it to None meanwhile
        return None if loop is None else self._counted(loop)

    def _counted(self, loop: Loop) -> dict[str, Any]:
        counters = loop.counters()
        for table in PEER_TABLES:
            counters[table.name] = self._by_super_rank(counters[table.name], 0)
        return counters

    def view(self) -> dict[str, Any]:
        """Return the engine's state between two passes of its thread's loop, for a state dump (SIGUSR1)."""
        if (loop := self.loop) is None:
            return {"leads": False}
        names = [self._names[peer] for peer in self._members]
        return {"leads": True, **loop.view(), "peer_names": names}

    def take_events(self) -> list[tuple[int, int, float, float, int, int]]:
        """Return and remove the timeline records since the last call; see Loop.take_events."""
        if (loop := self.loop) is None:
            return []
        return [
            (kind, self._super_rank(rank), began, ended, nbytes, step)
            for kind, rank, began, ended, nbytes, step in loop.take_events()
        ]


_wires_made: Any = None  # key of the MPI attribute that counts the wires made over a communicator


def _next_wire(comm: Any, channels: int) -> int:
    """Return how many wires of `channels` tags were made over `comm` before, equal on all ranks."""
    from mpi4py import MPI

    global _wires_made
    if _wires_made is None:
        _wires_made = MPI.Comm.Create_keyval()
    made = comm.Get_attr(_wires_made) or 0
    comm.Set_attr(_wires_made, made + 1)
    tags: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
    return int(made) % (tags // channels)


def _failure(kind: int, code: int, peer: int | None, who: str, weight: float) -> AdpsgdError:
    """Return the exception for a fatal failure of the engine's thread; the message calls the peer `who`."""
    if kind == _FAULT_LAYOUT:
        return ModelMismatchError(
            f"{who} averages other tensors than this super learner (one of the two has added a parameter "
            "group with other names, shapes or dtypes). Add the same groups in the same order everywhere."
        )
    if kind == _FAULT_WEIGHT:
        return StrategyMismatchError(
            f"{who} averages with another weight than {weight:g}. Use the same strategy everywhere."
        )
    if kind == _FAULT_MEMORY:
        return TransportError(
            f"no memory for the buffers of an exchange with {who}: free memory on this host."
        )
    if kind == _FAULT_GONE:
        return PeerFailedError(
            f"{who} has left or has failed, and this strategy averages over all super "
            "learners. Run the same number of steps on all of them, or use a gossip strategy (random_pairs), "
            f"which waits for no peer. {ulfm_advice()}",
            code=code,
            peer=peer,
        )
    if kind == _FAULT_FENCED:
        return PeerFailedError(
            f"{who} has declared this super learner failed, because it had stopped for too long. The model "
            "of this super learner may contain half of an exchange: load a checkpoint, or replace it.",
            peer=peer,
        )
    if kind == _FAULT_STATE:
        return TransportError(
            f"the averaging engine took a transition that does not exist ({code // 8} to {code % 8}) in its "
            f"exchange with {who}. This is an error in hvd_adpsgd; please report it.",
            code=code,
        )
    cls = TransportError if peer is None else PeerFailedError
    return cls(
        f"MPI failed with code {code} in the averaging engine (peer: {who}). {ulfm_advice()}",
        code=code,
        peer=peer,
    )
