"""Parameters on devices: exact, the same in the node, and in order, with devices that lag behind the host.

Each learner has devices of its own, whose operations are done late and in a seeded order (tests/lagging.py).
Where a GPU needs an event they need it too: without it an operation comes too early.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.model_memory import ModelMemory
from hvd_adpsgd.torch.staging import Staging
from tests.lagging import Lagging, Scheduler

SHAPES = [(7, 5), (), (0, 3), (40,), (6, 4), (3,)]
STRIDED = 4  # that tensor is a transposed one
CHUNK_NBYTES = 64
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}


class Node:
    """A communicator of threads: what the learners of a node ask when they make their memory."""

    def __init__(self, size: int):
        self.size = size
        self.told: list[object] = [None] * size
        self.barrier = threading.Barrier(size)

    def member(self, rank: int) -> Member:
        return Member(self, rank)


class Member:
    def __init__(self, node: Node, rank: int):
        self.node, self.rank = node, rank

    def Get_size(self) -> int:
        return self.node.size

    def Get_rank(self) -> int:
        return self.rank

    def allgather(self, value: object) -> list[object]:
        self.node.told[self.rank] = value
        self.node.barrier.wait(30)
        told = list(self.node.told)
        self.node.barrier.wait(30)
        return told

    def bcast(self, value: object) -> object:
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


class Learner:
    """A learner whose tensors are on devices.

    Args:
        member: of its node.
        trainer_lags: its own operations lag too; else the host is as far as they are.
        strided: one tensor is.
    """

    def __init__(
        self, values, dtype, member: Member, seed, devices=1, trainer_lags=True, strided=True
    ):
        scheduler = Scheduler(seed, eager=random.Random(seed).choice([0.0, 0.2, 0.45]))
        self.devices = [Lagging(scheduler, trainer_lags) for _ in range(devices)]
        self.dtype = dtype
        self.tensors = tensors_of(values, dtype, strided)
        self.leads = member.rank == 0
        self.memory = ModelMemory(CHUNK_NBYTES, member, self.leads)
        specs = [TensorSpec(f"p{i}", shape, dtype) for i, shape in enumerate(SHAPES)]
        self.memory.extend(specs)
        self.landing: Deferred | None = None
        where = {id(t): self.devices[i % devices] for i, t in enumerate(self.tensors)}
        self.staging = Staging(self._submit, lambda t: where[id(t)], piece_nbytes=4 * CHUNK_NBYTES)
        self.staging.bind(self.memory, self.tensors)
        self.offered: list[tuple[int, bool]] = []
        self.moved = np.zeros(self.values.size)
        self.before: dict[int, np.ndarray] = {}  # by step: parameters before its corrections
        self.seen: list[bytes] = []  # what each forward pass saw
        self.lands_as: np.ndarray | None = None  # the mirror, once it had landed
        self.copied = 0

    def _submit(self, function) -> Deferred:
        self.landing = Deferred(function)
        self.copied += 1
        return self.landing

    @property
    def values(self) -> np.ndarray:
        """All elements, in the order of the layout."""
        return np.concatenate([t.detach().double().reshape(-1).numpy() for t in self.tensors])

    def do(self, operation) -> None:
        """On the trainer's stream of the first device, between what those of the others do."""
        first = self.devices[0].current()
        for device in self.devices[1:]:
            first.wait(device.current().record())
        first.do(operation)
        for device in self.devices[1:]:
            device.current().wait(first.record())

    def update(self, change: np.ndarray, step: int) -> None:
        """The user's optimizer."""
        self.staging.before_update()

        def optimizer() -> None:
            before = self.values
            for tensor, part in zip(self.tensors, tensors_of(change, "float64"), strict=True):
                tensor.add_(part.to(tensor.dtype))
            self.moved += self.values - before
            self.before[step] = self.values

        self.do(optimizer)

    def absorb(self, step: int, wants: bool = True) -> None:
        self.staging.absorb(step, wants, lambda *told: self.offered.append(told))
        self.do(lambda: self.seen.append(self.values.tobytes()))

    def land(self) -> None:
        """Let the copy that is on its way come, and look at it: the mirror is the model of one step."""
        if self.landing is None or self.landing.done():
            return
        slot, step = self.memory.landing
        self.landing.run()
        self.landing.result()
        expected = self.before[step]
        if slot >= 0:
            expected = corrected(expected, self.slot(slot), self.dtype)
        np.testing.assert_array_equal(self.mirror(), expected)
        self.lands_as = expected

    def look(self) -> None:
        """Each number of the mirror is of the last model that came, or of the one that is coming."""
        if self.lands_as is None:
            return
        mirror, allowed = self.mirror(), self.lands_as == self.mirror()
        if self.memory.landing is not None:
            allowed |= self.before.get(self.memory.landing.step, self.lands_as) == mirror
        assert allowed.all()

    def mirror(self) -> np.ndarray:
        """In the order of the layout."""
        area, out = self.memory.areas[0], np.zeros(self.moved.size)
        flat = torch.from_numpy(area.mirror).view(getattr(torch, self.dtype)).double().numpy()
        out[:] = flat[: out.size]
        return out

    def slot(self, slot: int) -> np.ndarray:
        """Corrections in the order of the layout, zero where there are none."""
        area, parts = self.memory.areas[0], []
        wide = np.float64 if self.dtype == "float64" else np.float32
        for i, chunk in enumerate(self.memory.layout.parts[0].chunks):
            held = area.mailbox.slots[slot][area.places[i] :].view(np.uint8)
            numbers = held[: chunk.count * wide().itemsize].view(wide)
            parts.append(numbers * bool(area.mailbox.flags[slot][i]))
        return np.concatenate(parts).astype(np.float64)

    def state(self) -> np.ndarray:
        """The mirror with everything that is owed to it."""
        wide = np.float64 if self.dtype == "float64" else np.float32
        shares = [np.zeros(c.count, wide) for c in self.memory.layout.parts[0].chunks]
        assert all(self.memory.store.share(i, x.view(np.uint8)) for i, x in enumerate(shares))
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


COUNT = sum(int(np.prod(shape)) for shape in SHAPES)


def make_node(values, dtype, size, seed, **how) -> list[Learner]:
    """The learners of a super learner, made together."""
    node, made = Node(size), [None] * size

    def make(rank: int) -> None:
        made[rank] = Learner(values, dtype, node.member(rank), (seed << 8) + rank, **how)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return made


class Job:
    """Super learners that train and exchange, one host thread for all, in a seeded order."""

    def __init__(self, seed, dtype, sizes, **how):
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        starts = [self.rng.standard_normal(COUNT) for _ in sizes]
        self.nodes = [
            make_node(start, dtype, size, (seed << 4) + i, **how)
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
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
                self.random.choice(node).devices[0].scheduler.do_any()

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
            learner.absorb(step, wants=learner.memory.wants(step, due, rate=0.3))

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
        finite, _ = leader.memory.store.snapshot(chunk, -1, out)
        assert finite
        return out

    def merge(self, sent) -> None:
        a, b, chunk, x, y = sent
        a.memory.store.merge(chunk, -1, 0.5, y, x)
        b.memory.store.merge(chunk, -1, 0.5, x, y)
        self.exchanges += 1

    def finish(self) -> None:
        """Merge what is on its way, then apply all of it, as a pause does; no operation is left."""
        while self.sent:
            self.merge(self.sent.pop())
        for node in self.nodes:
            for _ in range(2):
                self.take_in(node)
            for learner in node:
                while learner.devices[0].scheduler.do_any():
                    pass

    def take_in(self, node: list[Learner]) -> None:
        for learner in node:
            learner.land()
            learner.staging.settle()
        for learner in node:
            learner.memory.publish()
        for learner in node:
            learner.memory.all_met()
            learner.before[-2] = learner.values
            learner.absorb(-2)
            learner.land()
            learner.staging.settle()

    def off(self) -> float:
        """By how much the mean over super learners has moved beside local updates."""
        states = [node[0].state() for node in self.nodes]
        moved = np.mean([node[0].moved for node in self.nodes], axis=0)
        return float(np.abs(np.mean(states, axis=0) - self.start - moved).max())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1, 3)])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_mean_moves_only_by_local_updates(dtype, sizes, devices):
    exchanges = copies = 0
    for seed in range(6):
        job = Job(seed, dtype, sizes, devices=devices, trainer_lags=seed % 3 > 0)
        job.run(150)
        job.finish()
        assert job.off() < ROUNDING[dtype], seed
        for node in job.nodes:
            np.testing.assert_array_equal(node[0].mirror(), node[0].values)
            for learner in node[1:]:
                assert learner.seen == node[0].seen, seed
        exchanges += job.exchanges
        copies += sum(node[0].copied for node in job.nodes)
    assert exchanges > 60 and copies > 60


WAITS = [
    ("up", "absorb"),  # corrections are added after the optimizer
    ("down", "absorb"),  # parameters are copied after the optimizer
    ("down", "_flatten"),  # ... strided ones from their contiguous copy
    ("up", "_correct"),  # ... and before corrections are added
    ("trainer", "absorb"),  # the forward pass sees corrected parameters
    ("trainer", "before_update"),  # the next optimizer leaves them alone until they are copied
]


@pytest.mark.parametrize("forgets", WAITS, ids="-".join)
def test_a_missing_wait_is_found(forgets):
    """Of the device, not of the host. Each makes the test above fail within a few seeds."""
    for seed in range(40):
        job = Job(seed, "float32", (2, 1), strided=forgets[1] == "_flatten")
        for learner in (learner for node in job.nodes for learner in node):
            learner.devices[0].scheduler.forgets = forgets
        try:
            job.run(100)
            job.finish()
            assert job.off() < ROUNDING["float32"]
            assert all(learner.seen == node[0].seen for node in job.nodes for learner in node)
        except AssertionError:
            return
    pytest.fail(f"40 seeds are right without {forgets}")


# ---- one learner ---------------------------------------------------------------------------------


def alone(values=None, dtype="float32", **how) -> Learner:
    (learner,) = make_node(np.ones(COUNT) if values is None else values, dtype, 1, 5, **how)
    return learner


def add_to_slot(learner: Learner, amount: float) -> None:
    """The engine merges: every element gets a correction."""
    for i, chunk in enumerate(learner.memory.layout.parts[0].chunks):
        ones, zeros = (
            np.full(chunk.count, x, np.float32).view(np.uint8) for x in (2 * amount, 0.0)
        )
        learner.memory.store.merge(i, -1, 0.5, ones, zeros)


def test_corrections_come_in_although_a_copy_is_always_on_its_way_when_they_are_published():
    """The next copy is left out for them."""
    learner = alone()
    for step in range(6):
        learner.memory.publish()  # in the backward pass
        learner.land()  # while the optimizer runs
        learner.update(np.zeros(COUNT), step)
        learner.absorb(step, wants=learner.memory.wants(step, True, 1.0))
        if step == 2:
            add_to_slot(learner, 0.25)
    learner.staging.settle()
    np.testing.assert_array_equal(learner.values, 1.25)


def test_a_copy_is_made_when_the_engine_asks_next_and_as_often_as_exchanges_begin():
    memory = alone().memory
    assert memory.wants(0, due=False, rate=0.25), "nothing is there to be averaged"
    memory.depart(-1, 0)
    memory.land()
    assert memory.wants(1, due=True, rate=0.25)
    asked = [memory.wants(step, due=False, rate=0.25) for step in (1, 3, 4, 9)]
    assert asked == [False, False, True, True]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_model_that_is_not_finite_is_told_of_late_and_offered_as_such():
    for bad in (np.nan, np.inf, -np.inf):
        learner = alone()
        for step, change in enumerate([0.0, bad, 0.0]):
            learner.update(np.where(np.arange(COUNT) == COUNT - 1, change, 0.0), step)
            learner.absorb(step)
            if step < 2:  # the next copy is not on its way yet when this one lands
                learner.landing.run()
            assert learner.staging.nonfinite(before=step) == ([1] if step == 2 else [])
        learner.staging.settle()
        assert learner.staging.nonfinite() == [2]
        assert learner.offered == [(0, True), (1, False), (2, False)]


def test_what_is_told_of_a_step_is_the_same_whenever_the_devices_look():
    """`before` a step: of all those before, however late; of none from there on, although they are done."""
    learner = alone()
    learner.update(np.full(COUNT, np.nan), 0)
    learner.absorb(0)
    while learner.devices[0].scheduler.do_any():
        pass
    assert learner.staging.nonfinite(before=0) == []
    assert learner.staging.nonfinite(before=1) == [0]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_mean_that_replaces_models_makes_them_equal_to_the_bit(dtype):
    """Also on a device, and what it holds back."""
    rng = np.random.default_rng(3)
    learners = [alone(rng.standard_normal(COUNT), dtype) for _ in range(3)]
    wide = np.float64 if dtype == "float64" else np.float32
    for learner in learners:
        learner.update(rng.standard_normal(COUNT), 0)
        learner.absorb(0)
        learner.land()
    for i, chunk in enumerate(learners[0].memory.layout.parts[0].chunks):
        shares = np.zeros((3, chunk.count), wide)
        for learner, share in zip(learners, shares, strict=True):
            assert learner.memory.store.share(i, share.view(np.uint8))
        total = shares.sum(axis=0).view(np.uint8)
        for learner, share in zip(learners, shares, strict=True):
            assert learner.memory.store.merge_mean(i, True, 3.0, total, share.view(np.uint8)) > 0
    for learner in learners:
        learner.memory.publish()
        learner.absorb(1)
        learner.staging.settle()
        np.testing.assert_array_equal(learner.mirror(), learner.values)
    assert len({learner.values.tobytes() for learner in learners}) == 1
    assert len({learner.state().tobytes() for learner in learners}) == 1


def test_a_copy_lands_while_the_host_does_something_else():
    learner = alone()
    offered = threading.Event()
    staging = Staging(devices=lambda tensor: learner.devices[0])
    staging.bind(learner.memory, learner.tensors)
    staging.absorb(7, True, lambda step, finite: offered.set())
    assert offered.wait(30), "in a thread of its own"
    assert learner.memory.step == 7
    np.testing.assert_array_equal(learner.mirror(), learner.values)
    staging.close()


def test_memory_is_locked_once_and_until_it_is_freed():
    learner = alone(devices=2)
    area = learner.memory.areas[0]
    expected = [area.mailbox.memory.ctypes.data, area.mirror.ctypes.data]
    learner.staging.bind(learner.memory, learner.tensors)  # as after add_param_group
    assert learner.devices[0].pinned == expected
    assert learner.devices[1].pinned == []
    learner.staging.close()
    assert learner.devices[0].pinned == []


def test_a_device_that_fails_is_an_error_of_the_next_step():
    learner = alone()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    learner.devices[0].scheduler.eager = 0.0
    learner.update(np.zeros(COUNT), 0)
    learner.do(fail)
    learner.staging.absorb(0, True)
    learner.landing.run()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        learner.staging.absorb(1, True)
    learner.staging.release()


def test_a_device_holds_two_pieces_beside_the_model():
    learner = alone(np.ones(COUNT), "bfloat16")
    (lane,) = learner.staging._lanes.values()
    assert lane._corrections.nbytes <= 4 * CHUNK_NBYTES
    assert lane._copies.nbytes <= 2 * CHUNK_NBYTES
