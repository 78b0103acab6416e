"""The memory in which an engine averages a model's shard: a copy (mirror), buffers of corrections (slots).

A correction is what exchanges with peers, or a mean of all models, add to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.layout import DTYPE_CODES, WHOLE, Layout, Shard, TensorSpec
from hvd_adpsgd.engine.neighbours import ShownModel
from hvd_adpsgd.engine.shared_memory import SharedSlots, private_memory, slots_of
from hvd_adpsgd.engine.store import Store
from hvd_adpsgd.engine.turns import LOOKS, Mark, Moves, marked, steps_between_copies

# a larger model has left the CPU caches after a step: write it past the caches
_CACHES_NBYTES = 8 * 2**20
# bytes of the model per thread of `absorb`: for less, starting a thread costs more than it saves
THREAD_NBYTES = 4 * 2**20
_MOST_THREADS = 8  # most threads of one `absorb`, as RUNS of store.pyx
_ROWS = 4  # rows of `_notes`, one per publish() call: no learner is over one all-reduce behind the leader
# What the leader notes of a call of publish(), in NOTES bytes: 1 if it was not deferred; the number of super
# learners that train; Arrivals.
_NOTE = np.dtype(
    [("goes", np.int32), ("training", np.int32), ("exchanges", np.float64), ("pace", np.float64)]
)
NO_SLOT = -1
_STEPS = 20  # over which a pace is averaged


class Arrivals(NamedTuple):
    """Exchanges whose corrections are in the parameters; where chunks are rare (windows.pxi), of these.

    Attributes:
        exchanges: how many each corrected chunk has had; see Store.arrivals.
        pace: share of the chunks that is corrected per step, as of late.
    """

    exchanges: float
    pace: float

    def plus(self, later: Arrivals) -> Arrivals:
        """Return these and later ones."""
        return Arrivals(self.exchanges + later.exchanges, later.pace or self.pace)


NONE = Arrivals(0.0, 0.0)


class Pace:
    """The share of the chunks that is corrected per step: its mean over the last steps."""

    def __init__(self) -> None:
        self._count, self._mean = 0, 0.0
        self._step: int | None = None

    def mean_with(self, covered: float, step: int | None = None) -> float:
        """Return the mean, with corrections of the share `covered` of all chunks.

        Args:
            covered: the share.
            step: number of the step; corrections with the number of the last ones are of the same step.
        """
        if step is None or step != self._step:
            self._count = min(self._count + 1, _STEPS)
            self._mean *= 1 - 1 / self._count
        self._step = step
        self._mean += covered / self._count
        return self._mean


class Area(NamedTuple):
    """The memory of one layout part (a group of tensors that were laid out together).

    Attributes:
        shared: shared memory with the slots of corrections.
        mirror: the engine's copy of the part's tensors on the leader, else None.
        places: first byte of each chunk in a slot, and the number of bytes of all chunks.
    """

    shared: SharedSlots
    mirror: NDArray[np.uint8] | None
    places: list[int]


class Landing(NamedTuple):
    """A copy of parameters that is under way from their device to the engine's copy of the model (mirror).

    Attributes:
        slot: slot of the correction that the copied parameters lack and that the devices add meanwhile, or
            NO_SLOT.
        step: the trainer's step of these parameters.
    """

    slot: int
    step: int


class Place(NamedTuple):
    """Counts of one learner's calls of ShardMemory.publish(): all, and those not deferred by a running copy.

    `published` is that of the ShardMemory; `passes` counts passes that are not whole.
    """

    published: bool
    calls: int
    publications: int
    passes: int


class ShardMemory:
    """The memory of one shard of a model, shared by the trainer and the engine's thread.

    All learners of the super learner make it together. The engine's copy of the shard is called the mirror. A
    slot is a buffer of corrections: the engine adds to the open slot, learners read the published one.

    Corrections reach the tensors in three steps, each on every learner:

        publish    the corrections that exchanges have computed so far become the published slot
        all_met    after an operation of all learners of the super learner: all may read the published slot
        absorb     parameter += correction; on the leader also mirror = parameter

    Parameters on devices are copied beside the training (training/staging.py), so their absorb is split:

        take       return the slot of corrections that the devices add now
        depart     on the leader: a copy of the parameters, without that slot, is on its way to the mirror
        land       the copy is complete: mirror += correction

    Between depart and land `publish` is deferred, on all learners alike: it publishes no slot. So
    at every moment the mirror lacks the published correction, if there is one, and no other. This holds also
    while only a part of the copy has arrived: the old and the new content of the mirror contain the same
    corrections, and differ by local updates only.

    Args:
        chunk_nbytes: largest size of a chunk in bytes.
        inner: communicator of the super learner (mpi4py), None for a learner alone; `extend` uses it.
        leads: whether this learner has the mirror, which its engine averages.
        shows: whether peers on the host may map the model and read it directly (the leader's value counts):
            the tensors of the first `extend`, if there is room for them in shared memory.
        shard: this memory holds the chunks of this shard only; the learner with the shard's number is what
            is called the leader here.
        thread_nbytes: bytes of the model for which `absorb` uses one more thread.

    Attributes:
        layout: where each element lies.
        inner, leads: see the arguments.
        is_alone: whether no other learner applies the corrections.
        nchunks: number of chunks.
        readable: whether all learners may read corrections from exchanges that this one has not applied.
        store: the chunks, for the engine.
        published: `publish` was called since the last `absorb`; that call may have been deferred.
        areas: the memory of each part of the layout.
        landing: the running copy of the parameters to the mirror, None without one (leader only).
        put_off: a call of `publish` was deferred although there were corrections, and none has taken effect
            since.
        step: the trainer's step of the parameters in the mirror, -1 before the first copy.
        filled: number of parts of the layout whose mirror has been filled.
        training: number of super learners that train, as of the last publication; the leader sets it for the
            next one. 0: not told.
        moves: what exchanges move, where passes may leave out chunks; None where they copy all.
    """

    def __init__(
        self,
        chunk_nbytes: int,
        inner: Any,
        leads: bool,
        shows: bool = False,
        shard: Shard = WHOLE,
        thread_nbytes: int = THREAD_NBYTES,
    ):
        self.layout = Layout(chunk_nbytes, shard)
        self._leader = shard.number
        self._nslots = slots_of(inner)
        self.store = Store(self._nslots)
        self.published = False
        self.inner = inner
        self.is_alone = inner is None or inner.Get_size() == 1
        self.leads = leads
        self._shows = shows
        self._thread_nbytes = thread_nbytes
        self._shown: tuple[SharedSlots, int, int] | None = None
        self.areas: list[Area] = []  # keeps alive the memory to which the store points
        self.landing: Landing | None = None
        self.put_off = False
        self.step = -1
        self.filled = 0
        self._spans = self.layout.spans
        self.nchunks = 0
        self._starts_of: dict[tuple[int, int], list[int]] = {}  # see `_starts`
        # number of the slot that all learners may read and this learner has not applied, or NO_SLOT
        self._slot = NO_SLOT
        self.readable = False
        self._calls = 0  # calls of publish, equal on all learners
        self._publications = 0  # calls of publish that were not deferred
        # by call of publish; shared by the super learner after `extend`
        self._notes = np.zeros(_ROWS, _NOTE)
        self._arriving = NONE  # exchanges in the slot that this learner has not applied
        self._pace = Pace()
        self._applied = NONE  # and in those that it has applied since the last take_arrivals
        self.training = 0
        self.moves: Moves | None = None
        self._passes = 0  # copies of a part of the model so far, equal on all learners

    @property
    def has_rare(self) -> bool:
        """Whether a chunk of the shard is in some exchanges of the whole model only."""
        return any(chunk.rare for part in self.layout.parts for chunk in part.chunks)

    def extend(self, tensors: Sequence[TensorSpec]) -> None:
        """Average `tensors` too, from the next offer on; all learners of the super learner call this."""
        part = self.layout.extend(tensors)
        places = list(accumulate((c.slot_nbytes for c in part.chunks), initial=0))
        lives = -(-Store.live_nbytes(len(part.chunks)) // 64) * 64
        shows = self._shows and not self.areas
        front = shows * (lives + part.nbytes)
        shared = SharedSlots(places[-1], len(part.chunks), self.inner, front, self._leader)
        mirror = None
        if self.leads:
            mirror = (
                private_memory(part.nbytes)
                if shared.front is None
                else shared.front[lives:][: part.nbytes]
            )
        if not self.areas:
            self._notes = shared.notes[: _ROWS * _NOTE.itemsize].view(_NOTE)
        self.areas.append(Area(shared, mirror, places))
        for i, chunk in enumerate(part.chunks):
            self.store.add_chunk(
                mirror.ctypes.data + chunk.offset if mirror is not None else 0,
                [slot.ctypes.data + places[i] for slot in shared.slots],
                [flags.ctypes.data + i for flags in shared.flags],
                chunk.count,
                DTYPE_CODES[chunk.dtype],
                chunk.rare,
            )
        if shared.front is not None and self.leads:
            at = shared.front.ctypes.data
            self.store.show(at, at + lives)
            self._shown = shared, lives, part.fingerprint
        self._spans, self.nchunks = self.layout.spans, self.layout.nchunks
        self._starts_of.clear()
        self.store.stream(sum(p.nbytes for p in self.layout.parts) > _CACHES_NBYTES)

    @property
    def shown(self) -> ShownModel | None:
        """Return the model that peers on the host, also later ones, may map until `hide`; None without."""
        if self._shown is None or (file := self._shown[0].file) is None:
            return None
        shared, area, fingerprint = self._shown
        return ShownModel(file, shared.memory.size, area, fingerprint)

    def hide(self) -> None:
        """Close the file of the shown model: peers that have not mapped it yet cannot map it any more."""
        if self._shown is not None:
            self._shown[0].close()

    def add_pending(self, copies: NDArray[np.uintp]) -> None:
        """Add to copies of the tensors the corrections from exchanges that the tensors lack (leader only).

        Args:
            copies: for each tensor, in the order of `extend`, the address of a contiguous copy: float64 for
                float64 tensors, float32 for all others; 0: no copy.
        """
        chosen = copies[self._spans[:, 0]] != 0
        self.store.add_pending(np.ascontiguousarray(self._spans[chosen]), copies)

    def forget(self, tensors: Sequence[int]) -> None:
        """Discard the residuals of rounding to 16 bits for `tensors` (numbers in the order of `extend`).

        Call it for tensors that were replaced while averaging is paused and every correction is applied:
        otherwise the residuals of the old values would be added to the new ones.
        """
        self.store.forget(np.ascontiguousarray(self._spans[np.isin(self._spans[:, 0], tensors)]))

    def publish(self, step: int | None = None) -> None:
        """Publish corrections from exchanges to the super learner's learners, unless parameters are being
        copied to the engine.

        Its learners may read them after `all_met`; a learner that is alone may read them at once.

        Args:
            step: number of the trainer's step; None: another one than before.
        """
        if self.leads:
            goes = self.landing is None
            if goes:
                self.store.publish()
            self.put_off = not goes and self._gathered()
            exchanges, covered = (self.store.arrivals, self.store.covered) if goes else (0.0, 0.0)
            pace = self._pace.mean_with(covered, step)
            self._notes[self._calls % _ROWS] = goes, self.training, exchanges, pace
        self.published = True
        if self.is_alone:
            self.all_met()

    def _gathered(self) -> bool:
        """Whether exchanges have put a correction into the buffer that the engine fills now (open slot)."""
        opened = (self.store.published + 1) % self._nslots
        return any(area.shared.flags[opened].any() for area in self.areas)

    def all_met(self, has_joined: Callable[[int], bool] = lambda rank: False) -> None:
        """Let this learner read the corrections that the leader has published, after an all-reduce or barrier
        of the super learner.

        Before that, the leader may not have published yet, and its engine would still be filling the slot.

        Args:
            has_joined: whether the learner with this inner rank was in join() and contributed only zeros to
                the all-reduce. If the leader was, it has not published either.
        """
        if self.published and not self.readable:
            if has_joined(self._leader):
                self.published = False
                return
            self.readable = True
            note = self._notes[self._calls % _ROWS]
            self.training = int(note["training"])
            if note["goes"]:
                self._slot = self._publications % self._nslots
                self._arriving = Arrivals(float(note["exchanges"]), float(note["pace"]))
                self._publications += 1
            self._calls += 1

    def place(self) -> Place:
        """Return this learner's counts of publish() calls; call it only while `readable` is False."""
        assert not self.readable
        return Place(self.published, self._calls, self._publications, self._passes)

    def adopt_counts(self, places: Sequence[Place]) -> None:
        """Take over the leader's counts of publish() calls, on a learner that made none while in join().

        Args:
            places: `place()` of all learners, by inner rank.
        """
        its = places[self._leader]
        self.published, self._calls, self._publications, self._passes = its

    def take(self) -> int:
        """Return the number of the slot (buffer of corrections) to apply now, or NO_SLOT; mark it applied."""
        slot, self._slot = self._slot, NO_SLOT
        if self._arriving is not NONE:
            self._applied = self._applied.plus(self._arriving)
            self._arriving = NONE
        if self.readable:
            self.readable = self.published = False
        return slot

    def take_arrivals(self) -> Arrivals:
        """Return what has been applied since the last call."""
        applied, self._applied = self._applied, NONE
        return applied

    def absorb(
        self,
        addresses: NDArray[np.uintp],
        step: int,
        threads: int = 1,
        whole: bool = True,
        mark: Mark | None = None,
    ) -> tuple[bool, bool]:
        """Add corrections from exchanges, if any, to the parameters; on the leader copy these to the engine.

        Args:
            addresses: address of each tensor's first element, in the order of `extend`; contiguous memory.
            step: the trainer's step of these parameters.
            threads: most threads that may compute; a small model uses one.
            whole: whether all chunks are copied and looked at; else chunks without a correction take turns,
                where exchanges move small shares (`moves`).
            mark: marks the chunks that an exchange will move next, which are copied out of turn.

        Returns:
            Whether every parameter that was looked at is finite, and whether a correction was added; equal on
            all learners of the super learner.
        """
        every, checked = (1, 1) if whole or self.moves is None else self.turns()
        starts = self._starts_of.get((threads, every)) or self._starts(threads, every)
        self._passes += not whole
        turn, wanted = self._passes, None
        if every > 1 and self.nchunks:
            wanted = marked(mark, self.nchunks)
        found = self.store.absorb(
            self._spans, addresses, self.take(), step, starts, every, checked, turn, wanted
        )
        self._has_landed(step)
        return found

    def turns(self, whole: bool = False) -> tuple[int, int]:
        """Return the steps between two copies of a chunk without a correction, and two looks at it."""
        if whole or self.moves is None:
            return 1, 1
        return steps_between_copies(self.moves, self.layout.nchunks), LOOKS

    def _starts(self, threads: int, every: int = 1) -> list[int]:
        """Divide the chunks equally among threads; return, as indices in `_spans`, where each starts."""
        nbytes = sum(part.nbytes for part in self.layout.parts) // every
        runs = max(1, min(threads, _MOST_THREADS, nbytes // self._thread_nbytes))
        chunks = [self.layout.nchunks * i // runs for i in range(runs)]
        found: list[int] = np.searchsorted(self._spans[:, 2], chunks).tolist()
        self._starts_of[threads, every] = found
        return found

    def wants(self, step: int, due: bool, rate: float) -> bool:
        """Whether a step that adds no corrections copies the parameters from their device to the engine.

        The copy is made if the next offer makes the engine ask a peer, and otherwise as often as exchanges
        begin, because a peer may ask. It is not made if corrections had to wait for the last copy: another
        one would defer them again.

        Args:
            step: the trainer's step of the parameters.
            due: whether the next offer makes the engine ask a peer.
            rate: exchanges per step.
        """
        if self.filled < len(self.layout.parts):
            return True
        return not self.put_off and (due or (step - self.step) * rate >= 1)

    def depart(self, slot: int, step: int) -> None:
        """Record that a copy of the parameters to the engine (mirror) begins; `land` ends it (leader only).

        Args:
            slot: the correction that the copied parameters lack, or NO_SLOT.
            step: the trainer's step of the parameters.
        """
        assert self.landing is None
        self.landing = Landing(slot, step)

    def land(self, copied: Sequence[tuple[int, int]] | None = None) -> None:
        """End the copy of parameters to the engine (mirror): add the correction that this copy lacks.

        Callable on any thread.

        Args:
            copied: the copied chunks, among them all with a correction: first and last one, `last` excluded;
                None: all.
        """
        assert self.landing is not None
        for first, last in [(0, self.layout.nchunks)] if copied is None else copied:
            self.store.note_copied(first, last, self.landing.step)
        self.store.absorb(self._spans, None, *self.landing)
        self._has_landed(self.landing.step)
        self.landing = None  # must come last: from now on `publish` is not deferred

    def _has_landed(self, step: int) -> None:
        self.step, self.filled = step, len(self.layout.parts)


class ModelMemory:
    """The memory that trainer and engine share, of a model: a ShardMemory for each shard, if it has several.

    Learner i of the super learner has the engine's copy (mirror) of shard i. A learner with a shard publishes
    the shard's corrections and copies its part of the parameters to the mirror; all learners add the
    corrections of all shards to their parameters.

    Args:
        chunk_nbytes: largest size of a chunk in bytes.
        inner: communicator of the super learner (mpi4py), None for a learner alone.
        leads: whether this learner has a mirror, which its engine averages.
        shows: see ShardMemory; for each shard the value on the learner that has its mirror counts.
        shards: number of shards; if more than one, at most the number of learners.

    Attributes:
        shards: the memory of each shard; `own` is this learner's (without one: shard 0, no mirror).
    """

    def __init__(
        self, chunk_nbytes: int, inner: Any, leads: bool, shows: bool = False, shards: int = 1
    ):
        mine = inner.Get_rank() if shards > 1 else 0
        self.shards = [
            ShardMemory(chunk_nbytes, inner, leads and number == mine, shows, Shard(number, shards))
            for number in range(shards)
        ]
        self._counted = [False] * shards  # which shards' exchanges take_arrivals counts, if any
        self.own = self.shards[mine if mine < shards else 0]

    def take_arrivals(self) -> Arrivals:
        """Return what has been applied since the last call: the mean of shards, of those with rare chunks."""
        taken = [shard.take_arrivals() for shard in self.shards]
        counted = [each for each, i in zip(taken, self._counted, strict=True) if i] or taken
        found = [each.exchanges for each in counted if each.exchanges]
        exchanges = sum(found) / len(found) if found else 0.0
        return Arrivals(exchanges, sum(each.pace for each in counted) / len(counted))

    def extend(self, tensors: Sequence[TensorSpec]) -> None:
        """Average `tensors` too: add a part of these tensors to each shard."""
        for shard in self.shards:
            shard.extend(tensors)
        self._counted = [shard.has_rare for shard in self.shards]

    def forget(self, tensors: Sequence[int]) -> None:
        for shard in self.shards:
            shard.forget(tensors)

    def publish(self, step: int | None = None) -> None:
        for shard in self.shards:
            shard.publish(step)

    def all_met(self, has_joined: Callable[[int], bool] = lambda rank: False) -> None:
        for shard in self.shards:
            shard.all_met(has_joined)

    def absorb(
        self,
        addresses: NDArray[np.uintp],
        step: int,
        threads: int = 1,
        whole: bool = True,
        mark: Mark | None = None,
    ) -> tuple[bool, bool]:
        """Add to the parameters the corrections that exchanges have computed, of all shards.

        Returns:
            Whether every parameter that was looked at is finite, and whether a correction was added, as
            ShardMemory.absorb; equal on all learners.
        """
        found = [
            shard.absorb(addresses, step, threads, whole, mark if shard.leads else None)
            for shard in self.shards
        ]
        return all(finite for finite, _ in found), any(corrected for _, corrected in found)
