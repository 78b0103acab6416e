"""Parameters on devices: exact, in order, and the same in a super learner; devices lag behind the host.

Each learner has devices of its own, whose operations are done late and in a seeded order (tests/lagging.py).
Where a GPU needs an event they need it too: without it an operation comes too early.
"""

import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hvd_adpsgd_lab.simulation import engine_calls

from hvd_adpsgd.engine.shard_memory import ShardMemory
from hvd_adpsgd.engine.turns import LOOKS
from hvd_adpsgd.training.devices import Device
from hvd_adpsgd.training.staging import Staging
from tests.staged import (
    CHUNK_NBYTES,
    COUNT,
    ROUNDING,
    Job,
    Learner,
    OnLagging,
    copy_every_fourth,
    make_node,
)


def require_exact(job: Job) -> None:
    """Local updates alone move the mean; a super learner sees the same bits; mirrors are models."""
    assert job.off() < ROUNDING[job.dtype]
    for node in job.nodes:
        np.testing.assert_array_equal(node[0].mirror(), node[0].values)
        for learner in node[1:]:
            assert learner.seen == node[0].seen


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1, 3)])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_mean_moves_only_by_local_updates(dtype, sizes, devices):
    exchanges = copies = 0
    for seed in range(6):
        places = partial(OnLagging, devices=devices, trainer_lags=seed % 3 > 0)
        job = Job(seed, dtype, sizes, places)
        job.run(150)
        job.finish()
        require_exact(job)
        exchanges += job.exchanges
        copies += sum(node[0].copied for node in job.nodes)
    assert exchanges > 60 and copies > 60


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("devices", [1, 2])
def test_pieces_that_take_turns_keep_the_mean(dtype, devices):
    """Corrections are added to all of the mirror, also to what was not copied with them."""
    exchanges = copied = whole = 0
    for seed in range(6):
        job = Job(seed, dtype, (2, 1, 3), partial(OnLagging, devices=devices), seldom=True)
        assert job.nodes[0][0].memory.turns() == (4, LOOKS)
        job.run(150)
        leaders = [node[0] for node in job.nodes]
        copied += sum(leader.staging.down_nbytes for leader in leaders)
        whole += sum(leader.copied * leader.memory.areas[0].mirror.nbytes for leader in leaders)
        job.finish()
        require_exact(job)
        exchanges += job.exchanges
    assert exchanges > 60
    assert copied < 0.8 * whole


def test_bytes_are_those_of_the_turns_and_of_corrections():
    """A model of two pieces; with corrections in every chunk all of it goes down, and up."""
    learner = alone()
    copy_every_fourth(learner.memory)
    sizes = [
        learner.staging._table.mirror(piece).nbytes for piece in learner.staging._table._pieces
    ]
    assert len(sizes) == 2
    for step in range(13):
        learner.update(np.ones(COUNT), step)
        learner.absorb(step, whole=False)
        learner.land()
    assert learner.staging.down_nbytes == 4 * sum(sizes)  # the first time, then three turns of each
    assert learner.staging.up_nbytes == 0
    add_to_slot(learner, 0.25)
    learner.memory.publish()
    learner.update(np.ones(COUNT), 13)
    learner.absorb(13, whole=False)
    learner.land()
    assert learner.staging.down_nbytes == 5 * sum(sizes)
    assert learner.staging.up_nbytes == learner.staging.down_nbytes // 5
    learner.staging.settle()
    np.testing.assert_array_equal(learner.mirror(), learner.values)


def test_a_piece_that_an_exchange_moves_next_is_copied_out_of_turn():
    learner = alone()
    copy_every_fourth(learner.memory)
    pieces = learner.staging._table._pieces

    def mark(marks: np.ndarray) -> None:
        marks[0] = 1

    for step in range(2):  # step 1 is the turn of neither
        learner.update(np.ones(COUNT), step)
        learner.staging.absorb(step, True, None, False, mark)
        learner.land()
    sizes = [learner.staging._table.mirror(piece).nbytes for piece in pieces]
    assert learner.staging.down_nbytes == sum(sizes) + sizes[0]


def beside_the_host(seed: int) -> OnLagging:
    """Every second tensor is in the host's own memory."""
    place = OnLagging(seed, trainer_lags=False)
    place.devices.append(Device(torch.device("cpu")))
    return place


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_the_host_and_of_a_device_share_chunks(dtype):
    for seed in range(4):
        job = Job(seed, dtype, (2, 1), beside_the_host)
        job.run(100)
        job.finish()
        assert job.exchanges > 3
        require_exact(job)


def test_the_host_waits_for_nothing_and_only_the_leader_copies():
    """Steps are given to the devices of a super learner, which have done nothing of it yet."""
    leader, follower = make_node(np.ones(COUNT), "float32", 2, 5, OnLagging, strided=True)
    for learner in (leader, follower):
        learner.place.scheduler.eager = 0.0
    for step in range(4):
        for learner in (leader, follower):
            learner.memory.publish()
        for learner in (leader, follower):
            learner.memory.all_met()
            learner.update(np.ones(COUNT), step)
            learner.absorb(step)
    assert leader.place.scheduler.done == follower.place.scheduler.done == 0
    assert (leader.copied, follower.copied) == (1, 0)
    leader.staging.settle()
    follower.staging.settle()
    np.testing.assert_array_equal(follower.values, 5.0)
    np.testing.assert_array_equal(leader.values, 5.0)
    # of the first step: the next copy had to wait
    np.testing.assert_array_equal(leader.mirror(), 2.0)


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
            learner.place.scheduler.forgets = forgets
        try:
            job.run(100)
            job.finish()
            require_exact(job)
        except AssertionError:
            return
    pytest.fail(f"40 seeds are right without {forgets}")


def alone(values=None, dtype="float32", places=OnLagging) -> Learner:
    values = np.ones(COUNT) if values is None else values
    (learner,) = make_node(values, dtype, 1, 5, places, strided=True)
    return learner


def add_to_slot(learner: Learner, amount: float) -> None:
    """The engine merges: every element gets a correction."""
    for i, chunk in enumerate(learner.memory.layout.parts[0].chunks):
        ones, zeros = (
            np.full(chunk.count, x, np.float32).view(np.uint8) for x in (2 * amount, 0.0)
        )
        engine_calls.merge(learner.memory.store, i, -1, 0.5, ones, zeros)


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
    learner.place.finish()
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
            assert engine_calls.share(learner.memory.store, i, share.view(np.uint8))
        total = shares.sum(axis=0).view(np.uint8)
        for learner, share in zip(learners, shares, strict=True):
            assert (
                engine_calls.merge_mean(
                    learner.memory.store, i, True, 3.0, total, share.view(np.uint8)
                )
                > 0
            )
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
    assert offered.wait(60), "in a thread of its own"
    assert learner.memory.step == 7
    np.testing.assert_array_equal(learner.mirror(), learner.values)
    staging.close()


def test_memory_is_locked_once_and_until_it_is_freed():
    learner = alone(places=partial(OnLagging, devices=2))
    area = learner.memory.areas[0]
    expected = [area.shared.memory.ctypes.data, area.mirror.ctypes.data]
    learner.staging.bind(learner.memory, learner.tensors)  # as after add_param_group
    assert learner.devices[0].pinned == expected
    assert learner.devices[1].pinned == []
    learner.staging.close()
    assert learner.devices[0].pinned == []


def test_memory_is_not_locked_when_nobody_has_closed_what_copied():
    learner = alone()
    device = learner.devices[0]
    assert device.pinned
    memory = learner.memory
    del learner
    gc.collect()
    assert device.pinned == []
    assert memory.areas, "memory outlives its lock"


def test_when_it_is_closed_it_keeps_no_memory():
    learner = alone()
    memory = ShardMemory(CHUNK_NBYTES, None, True)
    memory.extend(learner.memory.layout.tensors)
    staging = Staging(devices=lambda tensor: learner.devices[0])
    staging.bind(memory, learner.tensors)
    staging.absorb(0, True)
    staging.close()
    held = weakref.ref(memory)
    del memory
    gc.collect()
    assert held() is None


def test_a_device_that_fails_is_an_error_of_the_next_step():
    learner = alone()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    learner.place.scheduler.eager = 0.0
    learner.update(np.zeros(COUNT), 0)
    learner.enqueue(fail)
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


@pytest.mark.parametrize("when", ["before it is known", "before it is copied", "in the next step"])
def test_parameters_that_a_script_changes_while_they_are_copied(when, caplog):
    """As weights that are swapped for their moving average: peers may see a mixture, so it warns, once."""
    [learner] = make_node(np.arange(float(COUNT)), "float32", 1, 5, OnLagging, False)
    learner.place.scheduler.eager = 0.0
    for tensor in learner.tensors:
        tensor.requires_grad_()
    for step in range(2):
        learner.staging.absorb(step, True)
        if when == "in the next step":
            learner.staging.before_update()
        with torch.no_grad():
            learner.tensors[0].add_(1.0)
        if when == "before it is known":
            learner.staging.before_update()
        learner.landing.run()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (when != "in the next step"), told
    assert all("after step 0 while they were copied to the host" in line for line in told)
