"""Asynchronous copies between parameters on GPUs and the host memory that the engine averages.

The mirror is the engine's copy of the model in host memory, a slot is a buffer of corrections. One step of a
leader, per device; `down` (to the host) and `up` (to the device) are streams of this module:

    trainer's stream      down                          up
    optimizer
    -------------------> (both wait for it)
                          corrected piece 1 -> mirror   its corrections -> buffer
                          piece 2 -> mirror  ---------> parameter += correction (after its copy)
                                                        piece 2 ...
    <-------------------------------------------------  (waits: forward sees corrected parameters)
    finite? -> a flag     the other pieces -> mirror
    forward, backward     ...
    <-------------------  (waits)
    the next optimizer

The trainer's thread waits for no copy. A thread of this module waits until the copy is complete, adds the
same corrections to the mirror (`ShardMemory.land`) and offers the model. While a copy is running no other one
begins, and no slot is published: with a host far ahead of its device, or slow copies, models are offered, and
corrections applied, every few steps.

With small exchanges pieces without corrections take turns: each is copied in some steps only.

Parameters are copied to the mirror before the slot's corrections are added to them. So a copy differs from
the copy before it by local updates only, and the engine may read the mirror while the copy runs. The leader
alone computes the residuals of 16-bit rounding, from the mirror, in `land`.

The other learners of the super learner add the same corrections from the super learner's shared memory, by
the same operation, and copy nothing to the host.

A slot is filled again only when every device of the super learner has read it, because the leader publishes
only after the copy of the last publication is complete. That copy ran after an all-reduce of the super
learner, the all-reduce after the gradients of all learners were computed, and these after the corrections of
the publication before, for which the forward pass waited.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from hvd_adpsgd.engine.shard_memory import NO_SLOT, Area, ShardMemory
from hvd_adpsgd.engine.turns import Mark, marked
from hvd_adpsgd.training.devices import Device, Event, device_of

log = logging.getLogger("hvd_adpsgd")

PIECE_NBYTES = 8 * 2**20
# most pieces per model: CUDA queues about 1000 operations, then a launch blocks the host
_MOST_PIECES = 32
_REPLACES = 2  # REPLACES of store.pxd: the slot holds new parameters in place of corrections

_Copying = tuple[list[tuple[torch.Tensor, int]], int]
Submit = Callable[[Callable[[], None]], "Future[None]"]


class Staging:
    """Copies one optimizer's tensors between devices and the engine's memory.

    Args:
        submit: runs a function in a thread and returns its Future; by default in a thread of this Staging.
        devices: returns the Device of a tensor.
        piece_nbytes: largest size of a piece, copied by one operation, in bytes of its corrections; more if a
            chunk is larger, or if the model would have more than _MOST_PIECES. A device allocates two buffers
            of a piece's size.
        checks: whether to check parameters for NaN and infinity; without it nothing is copied to the host
            and `nonfinite` returns [].

    Attributes:
        down_nbytes, up_nbytes: bytes copied to the host, and from it, so far.
    """

    def __init__(
        self,
        submit: Submit | None = None,
        devices: Callable[[torch.Tensor], Device] = device_of,
        piece_nbytes: int = PIECE_NBYTES,
        checks: bool = True,
    ):
        self._threads = None if submit else ThreadPoolExecutor(1, "hvd_adpsgd-landing")
        self._submit: Submit = submit or self._threads.submit  # type: ignore[union-attr]
        self._devices, self._piece_nbytes, self._looks = devices, piece_nbytes, checks
        self._lanes: dict[Device, _Lane] = {}
        self._table: _Table | None = None
        self._landing: Future[None] | None = None
        self._checks: deque[_Check] = deque()
        # parameters that are copied to the host, with their versions, and the step; None: they may change
        self._copying: _Copying | None = None
        self._has_warned = False
        self._fit = True  # whether the engine's copy of the model (mirror) is finite
        self._copied: dict[int, int] = {}  # by number of the piece, the step of its last copy
        self.down_nbytes = self.up_nbytes = 0
        # by address of the memory: whether pin() succeeded, the device, the memory
        self._pinned: dict[int, tuple[bool, Device, np.ndarray]] = {}
        # unpin before the memory is freed: else copies to memory that gets its address later go to old pages
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def bind(self, memory: ShardMemory, tensors: Sequence[torch.Tensor]) -> None:
        """Use `memory` as the engine's, to and from which `tensors` are copied. No copy may be running."""
        where = [self._devices(tensor) for tensor in tensors]
        self._table = _Table(memory, tensors, self._piece_nbytes)
        self._copied = {}
        for device in dict.fromkeys(where):
            if device not in self._lanes:
                self._lanes[device] = _Lane(device)
            mine = [i for i, its in enumerate(where) if its == device]
            self._lanes[device].bind(self._table, mine)
        self._pin(memory)

    def _pin(self, memory: ShardMemory) -> None:
        """Page-lock the memory that copies use, once: memory locked for one device is locked for all."""
        away = [lane.device for lane in self._lanes.values() if type(lane.device) is not Device]
        for area in memory.areas:
            for part in (area.shared.memory, area.mirror if area.shared.front is None else None):
                if away and part is not None and part.ctypes.data not in self._pinned:
                    self._pinned[part.ctypes.data] = away[0].pin(part), away[0], part

    def absorb(
        self,
        step: int,
        wants: bool,
        offer: Callable[[int, bool], None] | None = None,
        whole: bool = True,
        mark: Mark | None = None,
    ) -> None:
        """Let devices add corrections from exchanges to parameters; on the leader, copy these to the engine.

        Args:
            step: the trainer's step of these parameters.
            wants: whether to copy the parameters also without published corrections (if no copy is running).
            offer: called with the step of the model in the mirror and whether that is finite: in another
                thread when the copy is complete; at once, if no copy is made.
            whole: whether a copy is of all pieces; else those without corrections take turns, where exchanges
                move small shares.
            mark: see ShardMemory.absorb; pieces with marked chunks are copied out of turn.

        Raises:
            RuntimeError: torch's, if a device failed in an earlier copy.
        """
        assert self._table is not None
        memory = self._table.memory
        if self._landing is not None and self._landing.done():
            self._landed()
        slot = memory.take()
        copies = memory.leads and memory.landing is None and (slot != NO_SLOT or wants)
        runs = self._table.runs(slot)
        corrected, others = [r for r in runs if r.kind], [r for r in runs if not r.kind]
        if copies:
            self._landed()
            memory.depart(slot, step)
            others = self._in_turn(others, step, memory.turns(whole)[0], mark)
            self.down_nbytes += sum(self._table.mirror(run).nbytes for run in corrected + others)
        self.up_nbytes += sum(self._table.corrections(run, slot).nbytes for run in corrected)
        for lane in self._lanes.values():
            lane.absorb(corrected, others, slot, copies)
        if not self._looks:
            return
        check = _Check(step, [lane.check() for lane in self._lanes.values()])
        self._checks.append(check)
        if copies:
            # moments change in the optimizer only; buffers in the forward pass, by a little
            trained = [tensor for tensor in self._table.tensors if tensor.requires_grad]
            copying = self._copying = [(tensor, tensor._version) for tensor in trained], step
            busy = [event for lane in self._lanes.values() for event in lane.busy]
            copied = [self._table.chunks(run) for run in corrected + others]
            self._landing = self._submit(
                lambda: self._land(memory, copied, busy, check, offer, copying)
            )
        elif offer is not None and memory.step >= 0:
            offer(memory.step, self._fit)

    def _in_turn(self, runs: list[_Run], step: int, every: int, mark: Mark | None) -> list[_Run]:
        """Return the runs whose piece has its turn in this step, or has missed turns, and marked ones."""
        assert self._table is not None
        if every > 1:
            marks = marked(mark, self._table.memory.layout.nchunks)
            late = step - 2 * every
            runs = [
                run
                for run in runs
                if (step + run.piece) % every == 0
                or self._copied.get(run.piece, late) <= late
                or marks[slice(*self._table.chunks(run))].any()
            ]
        self._copied.update((run.piece, step) for run in runs)
        return runs

    def _land(
        self,
        memory: ShardMemory,
        copied: list[tuple[int, int]],
        busy: list[Event],
        check: _Check,
        offer: Callable[[int, bool], None] | None,
        copying: _Copying,
    ) -> None:
        for event in busy:
            event.wait()
        self._warn_of_changes(copying)
        self._fit = check.finite()
        memory.land(copied)
        if offer is not None:
            offer(memory.step, self._fit)

    def _warn_of_changes(self, copying: _Copying | None) -> None:
        """Warn, once, if the script has changed parameters while they were copied to the host.

        The mean of all models stays exact, for a copy differs from the one before by local updates; but peers
        may see half of each. To wait at the end of each step would cost what copies during the forward and
        backward pass gain.
        """
        if copying is None or self._has_warned:
            return
        changed = any(tensor._version != version for tensor, version in copying[0])
        # compared first: the optimizer changes parameters as soon as before_update() has replaced it
        if changed and self._copying is copying:
            self._has_warned = True
            log.warning(
                "the script changed parameters after step %d while they were copied to the host: until the "
                "next step peers may exchange parts of both. Change them before optimizer.step(), or inside "
                "`with hvd.averaging_paused():`.",
                copying[1],
            )

    def _landed(self) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.result()

    def nonfinite(self, before: int | None = None) -> list[int]:
        """Return the steps with NaN or infinite parameters, among those checked since the last call.

        Args:
            before: consider all checks of steps before this one, so that the learners of a super learner,
                whose parameters are bitwise equal, get the same answer; devices have finished these checks
                where gradients are averaged. None: consider the checks that devices have finished.
        """
        found = []
        while self._checks and self._checks[0].known(before):
            check = self._checks.popleft()
            if not check.finite():
                found.append(check.step)
        return found

    def before_update(self) -> None:
        """Let the trainer's streams wait for copies of the parameters, which the trainer changes next."""
        if self._landing is not None and not self._landing.done():
            self._warn_of_changes(self._copying)
        self._copying = None
        for lane in self._lanes.values():
            lane.before_update()

    def settle(self) -> None:
        """Wait until the devices have done all copies, and the engine's copy holds the parameters."""
        self._await_devices()
        self._landed()

    def _await_devices(self) -> None:
        for lane in self._lanes.values():
            for event in lane.busy:
                event.wait()

    def release(self) -> None:
        """End the copies and unlock the engine's memory, which is freed next."""
        try:
            self.settle()
        except RuntimeError as error:
            # the device failed: training raises this error, or has raised it
            log.warning("copies of the model from its device ended: %s", error)
        _unpin(self._pinned)
        self._lanes.clear()  # lanes refer to the engine's memory, too, and would keep that memory alive
        self._table = None

    def close(self) -> None:
        """Call `release`, and end the thread of this Staging."""
        self.release()
        if self._threads is not None:
            self._threads.shutdown()


def _unpin(pinned: dict[int, tuple[bool, Device, np.ndarray]]) -> None:
    for could_be, device, memory in pinned.values():
        if could_be:
            device.unpin(memory)
    pinned.clear()


class _Check(NamedTuple):
    """The result of a step's check for NaN and infinity: per device an event and, after it, a flag."""

    step: int
    flags: list[tuple[Event, torch.Tensor]]

    def known(self, before: int | None) -> bool:
        """Whether the devices have finished this check; with `before`, wait for it if its step is earlier."""
        if before is None:
            return all(event.done() for event, _ in self.flags)
        if self.step >= before:
            return False
        for event, _ in self.flags:
            event.wait()
        return True

    def finite(self) -> bool:
        return all(bool(flag) for _, flag in self.flags)


class _Run(NamedTuple):
    """A run: consecutive chunks of one dtype that a buffer (slot) all corrects, all replaces or all keeps.

    A run is no longer than a piece.

    Attributes:
        part: number of the part of the layout.
        first, last: numbers of the first and last chunk in that part, `last` excluded.
        kind: what the slot holds for these chunks: 0 (nothing), ADDS (corrections) or REPLACES (new values),
            as in store.pxd.
        piece: number of the piece that the run is in.
    """

    part: int
    first: int
    last: int
    kind: int
    piece: int


class _Span(NamedTuple):
    """A span: consecutive elements of a tensor, and their positions in the engine's memory of a run.

    Attributes:
        tensor: number of the tensor.
        start: first element in the tensor.
        wide, narrow: first element in the run's corrections (float32 or 64), and in its part of the mirror.
        length: number of elements.
    """

    tensor: int
    start: int
    wide: int
    narrow: int
    length: int


class _Table:
    """The engine's memory of a model as torch tensors, divided into pieces, runs and spans for copies."""

    def __init__(self, memory: ShardMemory, tensors: Sequence[torch.Tensor], piece_nbytes: int):
        self.memory = memory
        whole = sum(area.places[-1] for area in memory.areas)
        self._piece_nbytes = max(piece_nbytes, whole // _MOST_PIECES)
        self.tensors = tensors
        self.parts = memory.layout.parts
        mirrors = [area.mirror for area in memory.areas]
        self._mirrors = [None if m is None else torch.from_numpy(m) for m in mirrors]
        self._slots = [[torch.from_numpy(slot) for slot in a.shared.slots] for a in memory.areas]
        cut = [piece for part in range(len(self.parts)) for piece in self._cut(part)]
        self._pieces = [piece._replace(piece=number) for number, piece in enumerate(cut)]

    def area(self, run: _Run) -> Area:
        return self.memory.areas[run.part]

    def first_chunk(self, run: _Run) -> int:
        """Return the number of the first chunk of a run of chunks, among the chunks of all layout parts."""
        part = self.parts[run.part]
        return part.last_chunk - len(part.chunks) + run.first

    def chunks(self, run: _Run) -> tuple[int, int]:
        """Return the numbers of the first and the last chunk of a run, `last` excluded."""
        first = self.first_chunk(run)
        return first, first + run.last - run.first

    def dtype(self, run: _Run) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.parts[run.part].chunks[run.first].dtype)
        return found

    def wide(self, run: _Run) -> torch.dtype:
        """Return the dtype of the corrections for a run of chunks."""
        return torch.float64 if self.dtype(run) == torch.float64 else torch.float32

    def _cut(self, number: int) -> Iterator[_Run]:
        """Yield the pieces of layout part `number`, one copy each, as runs without entries in a slot."""
        chunks, places = self.parts[number].chunks, self.memory.areas[number].places
        first = 0
        for i in range(1, len(chunks) + 1):
            full = i < len(chunks) and places[i + 1] - places[first] > self._piece_nbytes
            if i == len(chunks) or full or chunks[i].dtype != chunks[first].dtype:
                yield _Run(number, first, i, 0, 0)
                first = i

    def runs(self, slot: int) -> list[_Run]:
        """Return all chunks as runs: `slot` holds corrections, new values or nothing for a whole run."""
        if slot == NO_SLOT:
            return self._pieces
        return [run for piece in self._pieces for run in self._split(piece, slot)]

    def _split(self, piece: _Run, slot: int) -> Iterator[_Run]:
        kinds = self.area(piece).shared.flags[slot][piece.first : piece.last]
        edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        for a, b in itertools.pairwise(edges):
            yield piece._replace(first=piece.first + a, last=piece.first + b, kind=int(kinds[a]))

    def corrections(self, run: _Run, slot: int) -> torch.Tensor:
        """Return a view of the corrections for a run of chunks in buffer `slot`."""
        places, wide = self.area(run).places, self.wide(run)
        last = self.parts[run.part].chunks[run.last - 1].count * _itemsize(wide)
        return self._slots[run.part][slot][places[run.first] : places[run.last - 1] + last].view(
            wide
        )

    def mirror(self, run: _Run) -> torch.Tensor:
        """Return a view of a run of chunks in the engine's copy of the model, the mirror (leader only)."""
        chunks, memory = self.parts[run.part].chunks, self._mirrors[run.part]
        assert memory is not None
        last = chunks[run.last - 1]
        end = last.offset + last.count * _itemsize(self.dtype(run))
        return memory[chunks[run.first].offset : end].view(self.dtype(run))

    def spans(self, run: _Run, mine: dict[int, list[tuple[int, int, int, int]]]) -> list[_Span]:
        """Return the elements (spans) of a run of chunks that belong to the tensors in `mine`.

        Args:
            run: the chunks.
            mine: by number of the chunk, a list of (tensor, first element in the tensor, first element in the
                chunk, number of elements).
        """
        chunks, places = self.parts[run.part].chunks, self.area(run).places
        narrow, wide = _itemsize(self.dtype(run)), _itemsize(self.wide(run))
        found: list[_Span] = []
        for i in range(run.first, run.last):
            corrections = (places[i] - places[run.first]) // wide
            mirror = (chunks[i].offset - chunks[run.first].offset) // narrow
            for tensor, start, offset, count in mine.get(self.first_chunk(run) + i - run.first, ()):
                span = _Span(tensor, start, corrections + offset, mirror + offset, count)
                _append(found, span)
        return found


def _itemsize(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits // 8


def _append(spans: list[_Span], span: _Span) -> None:
    """Append a span, or lengthen the last one if this continues it in tensor and memory."""
    if spans:
        last = spans[-1]
        end = (last.start + last.length, last.wide + last.length, last.narrow + last.length)
        if last.tensor == span.tensor and end == span[1:4]:
            spans[-1] = last._replace(length=last.length + span.length)
            return
    spans.append(span)


def _stretches(spans: Iterable[_Span]) -> Iterator[tuple[int, int]]:
    """Yield, for each group of contiguous spans, its first and last (excluded) element in the mirror."""
    first = last = 0
    for span in spans:
        if span.narrow != last:
            if last > first:
                yield first, last
            first = span.narrow
        last = span.narrow + span.length
    if last > first:
        yield first, last


class _Lane:
    """A lane: the streams, buffers and copies of one device.

    Attributes:
        busy: events after the last operations that this lane has queued.
    """

    def __init__(self, device: Device):
        self.device = device
        self.busy: list[Event] = []
        self._up, self._down = device.stream(), device.stream()
        self._corrections, self._copies = device.empty(0), device.empty(0)
        self._spans_of_chunk: dict[int, list[tuple[int, int, int, int]]] = {}
        self._spans: dict[_Run, list[_Span]] = {}
        # flat views of tensors, kept until the streams have used them
        self._flat: dict[int, torch.Tensor] = {}

    def bind(self, table: _Table, tensors: list[int]) -> None:
        """Use `table` as the engine's memory, and `tensors`: numbers of the tensors on this lane's device."""
        self._table, self._tensors = table, tensors
        self._spans.clear()
        self._spans_of_chunk.clear()
        spans = table.memory.layout.spans
        for tensor, start, chunk, offset, count in spans[np.isin(spans[:, 0], tensors)].tolist():
            self._spans_of_chunk.setdefault(chunk, []).append((tensor, start, offset, count))
        runs = [run for run in table.runs(NO_SLOT) if self._spans_of(run)]
        corrections = [table.corrections(run, 0).nbytes for run in runs]
        copies = [table.mirror(run).nbytes for run in runs] if table.memory.leads else []
        self._corrections = self.device.empty(max(corrections, default=0))
        self._copies = self.device.empty(max(copies, default=0))

    def absorb(self, corrected: list[_Run], others: list[_Run], slot: int, copies: bool) -> None:
        """Queue adding `slot`'s corrections to parameters; before that, if `copies`, copies to the engine."""
        current = self.device.current()
        ready = current.record()
        self._up.wait(ready)
        self._down.wait(ready)
        self._flatten()
        for run in corrected:
            copied = self._copy(run) if copies else None
            self._correct(run, slot, copied)
        if corrected:
            self._write_back()
            current.wait(self._up.record())
        for run in others if copies else ():
            self._copy(run)
        self.busy = [self._up.record(), self._down.record()]

    def _flatten(self) -> None:
        """Set `_flat`: each tensor as a vector, strided tensors through a contiguous copy on the device."""
        self._flat = {}
        strided = []
        for i in self._tensors:
            tensor = self._table.tensors[i].data
            if tensor.is_contiguous():
                self._flat[i] = tensor.view(-1)
            else:
                copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                self._flat[i] = copy
                strided.append((copy.view(tensor.shape), tensor))
        self._strided = strided
        if strided:
            self._up.enqueue(lambda: [copy.copy_(tensor) for copy, tensor in strided])
            self._down.wait(self._up.record())

    def _write_back(self) -> None:
        strided = self._strided
        if strided:
            self._up.enqueue(lambda: [tensor.copy_(copy) for copy, tensor in strided])

    def _spans_of(self, run: _Run) -> list[_Span]:
        where = run._replace(kind=0)
        if where not in self._spans:
            self._spans[where] = self._table.spans(where, self._spans_of_chunk)
        return self._spans[where]

    def _views(self, spans: Iterable[_Span]) -> list[torch.Tensor]:
        return [self._flat[s.tensor][s.start : s.start + s.length] for s in spans]

    def _copy(self, run: _Run) -> Event | None:
        """Queue the copy of a run of chunks from device to engine (mirror); return the event at its end."""
        spans = self._spans_of(run)
        if not spans:
            return None
        mirror = self._table.mirror(run)
        buffer = self._copies[: mirror.nbytes].view(mirror.dtype)
        sources, places = (
            self._views(spans),
            [buffer[s.narrow : s.narrow + s.length] for s in spans],
        )
        stretches = list(_stretches(spans))

        def copy() -> None:
            _copy_each(places, sources)
            for first, last in stretches:
                mirror[first:last].copy_(buffer[first:last], non_blocking=True)

        self._down.enqueue(copy)
        return self._down.record()

    def _correct(self, run: _Run, slot: int, copied: Event | None) -> None:
        """Queue adding corrections to a run of chunks, after event `copied` (end of its copy), if given."""
        spans = self._spans_of(run)
        if not spans:
            return
        source = self._table.corrections(run, slot)
        buffer = self._corrections[: source.nbytes].view(source.dtype)
        targets, terms = self._views(spans), [buffer[s.wide : s.wide + s.length] for s in spans]
        replaces = run.kind == _REPLACES
        self._up.enqueue(lambda: buffer.copy_(source, non_blocking=True))
        if copied is not None:
            self._up.wait(copied)
        self._up.enqueue(
            lambda: _copy_each(targets, terms) if replaces else torch._foreach_add_(targets, terms)
        )

    def check(self) -> tuple[Event, torch.Tensor]:
        """Queue a check for NaN and infinity; return an event, and a flag that then tells if all are finite.

        The check runs in the trainer's stream, before anything that the script does to the tensors next, so
        that the learners of a super learner check the same values.
        """
        flag, current = self.device.flag(), self.device.current()
        tensors = [self._table.tensors[i].data for i in self._tensors]
        current.enqueue(lambda: flag.copy_(_all_finite(tensors), non_blocking=True))
        event = current.record()
        self.busy.append(event)
        return event, flag

    def before_update(self) -> None:
        current = self.device.current()
        for event in self.busy:
            current.wait(event)


def _copy_each(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each tensor of `values` to its counterpart in `to`, in one fused operation."""
    torch._foreach_copy_(to, values)


def _all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return, as a bool on their device, whether all tensors are finite; true without tensors."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_type.setdefault(tensor.dtype, []).append(tensor)
    finite = [
        torch.stack(torch._foreach_norm(group, math.inf)).isfinite().all()
        for group in by_type.values()
    ]
    return torch.stack(finite).all() if finite else torch.ones((), dtype=torch.bool, device="cpu")
