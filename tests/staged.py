"""Jobs of learners whose parameters are on devices, in one process: staging, store and exchanges only.

The devices lag behind the host (`OnLagging`), or are GPUs (tests/gpu). The jobs keep book: of local updates,
of what each forward pass saw, of the parameters that each copy to the mirror must hold.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from hvd_adpsgd_lab.simulation import engine_calls

from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shard_memory import ShardMemory
from hvd_adpsgd.engine.turns import Moves
from hvd_adpsgd.training.staging import Staging
from tests.gathers import Gathers, Mates, together
from tests.lagging import Lagging, Scheduler

SHAPES = [(7, 5), (), (0, 3), (40,), (6, 4), (3,)]
STRIDED = 4  # that tensor is a transposed one
CHUNK_NBYTES = 64
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}


class Member(Mates):
    """... where the learners are threads."""

    def __init__(self, gathers: Gathers, rank: int, size: int):
        super().__init__(rank, size)
        self.allgather = gathers.of(rank)  # type: ignore[method-assign]

    def bcast(self, value: object, root: int = 0) -> object:
        return self.allgather(value)[0]


class Deferred(Future):
    """A landing that the test carries out when it likes, or whoever waits for it."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def run(self) -> None:
        if not self.done():
            try:
                self.set_result(self._function())
            except BaseException as error:
                self.set_exception(error)

    def result(self, timeout=None):
        self.run()
        return super().result(timeout)


class OnLagging:
    """Devices that lag behind the host, by a seed.

    Args:
        seed: of what they do when.
        devices: how many.
        trainer_lags: the learner's own operations lag too; else the host is as far as they are.
    """

    def __init__(self, seed: int, devices: int = 1, trainer_lags: bool = True):
        eager = random.Random(seed).choice([0.0, 0.2, 0.45])
        self.scheduler = Scheduler(seed, eager)
        self.devices = [Lagging(self.scheduler, trainer_lags) for _ in range(devices)]

    def put(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The tensor on one of the devices, soon."""
        return tensor

    def poke(self) -> None:
        """Let something happen there."""
        self.scheduler.do_any()

    def finish(self) -> None:
        """Let all happen that they were given."""
        while self.scheduler.do_any():
            pass

    def trains(self) -> AbstractContextManager[object]:
        """Inside, torch's own stream is the learner's on its first device, as in a script."""
        return nullcontext()


class Learner:
    """A learner whose tensors are on devices.

    Args:
        member: of its super learner.
        place: its devices; they have its tensors in turn.
        strided: one tensor is.
    """

    def __init__(self, values, dtype, member: Member, place: OnLagging, strided=True):
        self.place, self.devices = place, place.devices
        self.dtype = dtype
        self.tensors = self.on_devices(tensors_of(values, dtype, strided))
        self.leads = member.rank == 0
        self.memory = ShardMemory(CHUNK_NBYTES, member, self.leads)
        specs = [TensorSpec(f"p{i}", shape, dtype) for i, shape in enumerate(SHAPES)]
        self.memory.extend(specs)
        self.landing: Deferred | None = None
        where = {id(t): self.devices[i % len(self.devices)] for i, t in enumerate(self.tensors)}
        self.staging = Staging(self._submit, lambda t: where[id(t)], piece_nbytes=4 * CHUNK_NBYTES)
        self.staging.bind(self.memory, self.tensors)
        self.offered: list[tuple[int, bool]] = []
        self.moves = [torch.zeros_like(t, dtype=torch.float64) for t in self.tensors]
        # by step: parameters before its corrections
        self.before: dict[int, list[torch.Tensor]] = {}
        self.saw: list[list[torch.Tensor]] = []  # each forward pass
        self.lands_as: np.ndarray | None = None  # the mirror, once it had landed
        self.copied = 0

    def _submit(self, function) -> Deferred:
        self.landing = Deferred(function)
        self.copied += 1
        return self.landing

    def on_devices(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.place.put(t, i % len(self.devices)) for i, t in enumerate(tensors)]

    @property
    def values(self) -> np.ndarray:
        """Of the model, as far as the devices are; in the order of the layout."""
        return flat(self.tensors)

    @property
    def moved(self) -> np.ndarray:
        """The sum of local updates, as they were rounded."""
        return flat(self.moves)

    @property
    def seen(self) -> list[bytes]:
        return [flat(tensors).tobytes() for tensors in self.saw]

    def enqueue(self, operation: Callable[[], object]) -> None:
        """On the trainer's stream of the first device, between what those of the others do."""
        first = self.devices[0].current()
        for device in self.devices[1:]:
            first.wait(device.current().record())
        first.enqueue(operation)
        for device in self.devices[1:]:
            device.current().wait(first.record())

    def update(self, change: np.ndarray, step: int) -> None:
        """The user's optimizer."""
        self.staging.before_update()

        def optimizer() -> None:
            parts = self.on_devices(tensors_of(change, self.dtype))
            for tensor, part, moves in zip(self.tensors, parts, self.moves, strict=True):
                moves.sub_(tensor)
                tensor.add_(part)
                moves.add_(tensor)
            self.before[step] = [tensor.clone() for tensor in self.tensors]

        self.enqueue(optimizer)

    def absorb(self, step: int, wants: bool = True, whole: bool = True) -> None:
        with self.place.trains():
            self.staging.absorb(step, wants, lambda *told: self.offered.append(told), whole)
        self.enqueue(lambda: self.saw.append([tensor.clone() for tensor in self.tensors]))

    def land(self) -> None:
        """Let the copy that is on its way come, and look at it: what was copied is the model of one step."""
        if self.landing is None or self.landing.done():
            return
        slot, step = self.memory.landing
        self.landing.run()
        self.landing.result()
        expected = flat(self.before[step])
        if slot >= 0:
            expected = corrected(expected, self.slot(slot), self.dtype)
        if self.lands_as is not None:
            expected = np.where(self.copied_in(step), expected, self.lands_as)
        np.testing.assert_array_equal(self.mirror(), expected)
        self.lands_as = expected

    def copied_in(self, step: int) -> np.ndarray:
        """Which elements the mirror has of a step, in the order of the layout."""
        found = []
        for i, chunk in enumerate(self.memory.layout.parts[0].chunks):
            size = torch.finfo(getattr(torch, self.dtype)).bits // 8
            _, its = engine_calls.snapshot(
                self.memory.store, i, -1, np.zeros(chunk.count * size, np.uint8)
            )
            found.append(np.full(chunk.count, its == step))
        return np.concatenate(found)

    def look(self) -> None:
        """Each number of the mirror is of the last model that came, or of the one that is coming."""
        if self.lands_as is None:
            return
        mirror = self.mirror()  # once: it may be coming in
        allowed = self.lands_as == mirror
        if self.memory.landing is not None and self.memory.landing.step in self.before:
            allowed |= flat(self.before[self.memory.landing.step]) == mirror
        assert allowed.all()

    def mirror(self) -> np.ndarray:
        """In the order of the layout."""
        numbers = torch.from_numpy(self.memory.areas[0].mirror).view(getattr(torch, self.dtype))
        return flat([numbers])[:COUNT]

    def slot(self, slot: int) -> np.ndarray:
        """Corrections in the order of the layout, zero where there are none."""
        area, parts = self.memory.areas[0], []
        wide = np.float64 if self.dtype == "float64" else np.float32
        for i, chunk in enumerate(self.memory.layout.parts[0].chunks):
            held = area.shared.slots[slot][area.places[i] :].view(np.uint8)
            numbers = held[: chunk.count * wide().itemsize].view(wide)
            parts.append(numbers * bool(area.shared.flags[slot][i]))
        return np.concatenate(parts).astype(np.float64)

    def state(self) -> np.ndarray:
        """The mirror with everything that is owed to it."""
        wide = np.float64 if self.dtype == "float64" else np.float32
        shares = [np.zeros(c.count, wide) for c in self.memory.layout.parts[0].chunks]
        assert all(
            engine_calls.share(self.memory.store, i, x.view(np.uint8)) for i, x in enumerate(shares)
        )
        return np.concatenate(shares).astype(np.float64)


def tensors_of(values: np.ndarray, dtype: str, strided: bool = False) -> list[torch.Tensor]:
    """The model; one of its tensors may be strided."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    parts = np.split(values, np.cumsum(sizes)[:-1])
    found = []
    for i, (part, shape) in enumerate(zip(parts, SHAPES, strict=True)):
        tensor = torch.from_numpy(part.copy()).reshape(shape).to(getattr(torch, dtype))
        found.append(tensor.t().contiguous().t() if strided and i == STRIDED else tensor)
    return found


def corrected(values: np.ndarray, correction: np.ndarray, dtype: str) -> np.ndarray:
    """values + correction, rounded as the dtype is."""
    kind = torch.float64 if dtype == "float64" else torch.float32
    total = torch.from_numpy(values).to(kind) + torch.from_numpy(correction).to(kind)
    rounded = total.to(getattr(torch, dtype)).double().numpy()
    return np.where(correction == 0, values, rounded)


def flat(tensors: list[torch.Tensor]) -> np.ndarray:
    """All elements, in float64 on the host."""
    return np.concatenate([t.detach().double().cpu().reshape(-1).numpy() for t in tensors])


COUNT = sum(int(np.prod(shape)) for shape in SHAPES)


def make_node(values, dtype, size, seed, places, strided) -> list[Learner]:
    """The learners of a super learner, made together; `places`: by seed."""
    gathers = Gathers(size)

    def make(rank: int) -> Learner:
        member = Member(gathers, rank, size)
        return Learner(values, dtype, member, places((seed << 8) + rank), strided)

    return together(make, range(size))


def copy_every_fourth(memory: ShardMemory) -> None:
    """Let each chunk have its turn in every fourth step, as if two exchanges moved it in ten."""
    memory.moves = Moves(share=0.0, rate=memory.layout.nchunks / 10)


class Job:
    """Super learners that train and exchange, one host thread for all, in a seeded order."""

    def __init__(self, seed, dtype, sizes, places=OnLagging, strided=True, seldom=False):
        self.whole = not seldom
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        starts = [self.rng.standard_normal(COUNT) for _ in sizes]
        self.nodes = [
            make_node(start, dtype, size, (seed << 4) + i, places, strided)
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        for learner in (learner for node in self.nodes for learner in node):
            if seldom:
                copy_every_fourth(learner.memory)
        self.start = np.mean([node[0].values for node in self.nodes], axis=0)
        self.steps = [0] * len(sizes)
        self.exchanges = 0
        self.sent: list[tuple[Learner, Learner, int, np.ndarray, np.ndarray]] = []

    def run(self, actions: int) -> None:
        for node in range(len(self.nodes)):
            self.step(node)
        for _ in range(actions):
            action = self.random.choice(["step", "send", "merge", "land", "look", "device"])
            node = self.random.choice(self.nodes)
            if action == "step":
                self.step(self.nodes.index(node))
            elif action == "send" and len(self.sent) < 3:
                self.send(*self.random.sample(self.nodes, 2))
            elif action == "merge" and self.sent:
                self.merge(self.sent.pop(self.random.randrange(len(self.sent))))
            elif action == "land":
                node[0].land()
            elif action == "look":
                node[0].look()
            elif action == "device":
                self.random.choice(node).place.poke()

    def step(self, number: int) -> None:
        node, step = self.nodes[number], self.steps[number]
        self.steps[number] += 1
        change = 0.1 * self.rng.standard_normal(COUNT)
        waits = self.random.random() < 0.5
        if len(node) > 1:  # a learner alone publishes in step(), after its optimizer
            for learner in self.random.sample(node, len(node)):
                learner.memory.publish()
            self.all_reduce(node, waits)
        for learner in self.random.sample(node, len(node)):
            learner.memory.all_met()
            learner.update(change, step)
            if len(node) == 1:
                learner.memory.publish()
            due = self.random.random() < 0.5
            wants = learner.memory.wants(step, due, rate=0.3)
            learner.absorb(step, wants, self.whole)

    def all_reduce(self, node: list[Learner], waits: bool) -> None:
        """Of gradients: no stream goes on before all have come. Horovod's host waits, or does not."""
        reached = [d.current().record() for learner in node for d in learner.devices]
        for event in reached:
            if waits:
                event.wait()
            for learner in node:
                for device in learner.devices:
                    device.current().wait(event)

    def send(self, a: list[Learner], b: list[Learner]) -> None:
        chunk = self.random.randrange(len(a[0].memory.layout.parts[0].chunks))
        if a[0].memory.step < 0 or b[0].memory.step < 0:
            return
        self.sent.append(
            (a[0], b[0], chunk, self.snapshot(a[0], chunk), self.snapshot(b[0], chunk))
        )

    def snapshot(self, leader: Learner, chunk: int) -> np.ndarray:
        count = leader.memory.layout.parts[0].chunks[chunk].count
        out = np.zeros(count * torch.finfo(getattr(torch, self.dtype)).bits // 8, np.uint8)
        finite, _ = engine_calls.snapshot(leader.memory.store, chunk, -1, out)
        assert finite
        return out

    def merge(self, sent) -> None:
        a, b, chunk, x, y = sent
        engine_calls.merge(a.memory.store, chunk, -1, 0.5, y, x)
        engine_calls.merge(b.memory.store, chunk, -1, 0.5, x, y)
        self.exchanges += 1

    def finish(self) -> None:
        """Merge what is on its way, then apply all of it, as a pause does; no operation is left."""
        while self.sent:
            self.merge(self.sent.pop())
        for node in self.nodes:
            for _ in range(2):
                self.take_in(node)
            for learner in node:
                learner.place.finish()

    def close(self) -> None:
        """Free the memory of all learners."""
        for learner in (learner for node in self.nodes for learner in node):
            learner.staging.close()

    def take_in(self, node: list[Learner]) -> None:
        for learner in node:
            learner.land()
            learner.staging.settle()
        for learner in node:
            learner.memory.publish()
        for learner in node:
            learner.memory.all_met()
            learner.place.finish()
            learner.before[-2] = [tensor.clone() for tensor in learner.tensors]
            learner.place.finish()
            learner.absorb(-2)
            learner.land()
            learner.staging.settle()

    def off(self) -> float:
        """By how much the mean over super learners has moved beside local updates."""
        states = [node[0].state() for node in self.nodes]
        moved = np.mean([node[0].moved for node in self.nodes], axis=0)
        return float(np.abs(np.mean(states, axis=0) - self.start - moved).max())
