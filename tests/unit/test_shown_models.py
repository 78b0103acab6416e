"""Models that peers on the host read where they lie: the difference of a pair, computed once."""

import ctypes
import os
import threading
import time

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation import engine_calls

from hvd_adpsgd.engine import neighbours, shared_memory
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.neighbours import Neighbours, OutboxShape
from hvd_adpsgd.engine.shard_memory import ShardMemory
from hvd_adpsgd.engine.shared_memory import SharedSlots
from tests import kernels
from tests.elements import DTYPES, PAIRS, decode, draw, encode, raw, wide
from tests.gathers import Gathers, Mates, together
from tests.shown import CHUNK_NBYTES, Shown

OUTBOX = OutboxShape(2 * 65536, 65536)

MERGED, NOT_FINITE, CHANGING = 0, 1, 2


def average(a, b, chunk=0, wire=-1, weight=0.5):
    """A pair's average of one chunk, of which `a` computes the difference."""
    kind = a.dtype if wire < 0 else {code: name for name, code in DTYPES.items()}[wire]
    half = encode(np.zeros(a.memory.layout.parts[0].chunks[chunk].count), kind)
    found, *steps, square = engine_calls.compare(a.store, *b.place, chunk, wire, weight, raw(half))
    if found == MERGED:
        assert engine_calls.merge_half(b.store, chunk, wire, weight, raw(half)) == square
    return found, *steps, square


@pytest.mark.parametrize("n", [0, 1, 1024, 1025, 5000])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
@pytest.mark.parametrize("pending", [0, 1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_half_of_the_difference(n, dtype, wire, pending, stream):
    rng = np.random.default_rng(n + pending)
    models = []
    for _ in range(2):
        corrections = [draw(rng, n, wide(dtype)) for _ in range(pending)]
        models.append((draw(rng, n, dtype), *corrections, *[None] * (2 - pending)))
    half, keep = encode(np.ones(n), wire), encode(np.ones(n), wire)
    args = [tuple(None if part is None else raw(part) for part in model) for model in models]
    assert not kernels.half_difference(
        DTYPES[dtype], DTYPES[wire], raw(half), *args, keep=raw(keep), stream=stream
    )
    np.testing.assert_array_equal(half, keep)
    kind = np.dtype(wide(dtype)).type
    mine, theirs = (
        sum((p for p in model[1:] if p is not None), start=decode(model[0], dtype).astype(kind))
        for model in models
    )
    np.testing.assert_array_equal(half, encode(kind(0.5) * theirs - kind(0.5) * mine, wire))


@pytest.mark.parametrize("n", [0, 1, 1024, 1025, 5000])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_both_sides_merge_opposite_terms(n, dtype, wire, fresh, stream):
    rng = np.random.default_rng(n)
    half = draw(rng, n, wire)
    slots = [np.ones(n, wide(dtype)), np.ones(n, wide(dtype))]
    squares = [
        kernels.merge_half(DTYPES[dtype], DTYPES[wire], raw(slot), raw(half), weight, fresh, stream)
        for slot, weight in zip(slots, (1 / 3, -1 / 3), strict=True)
    ]
    kind = np.dtype(wide(dtype)).type
    term = kind(2) * kind(1 / 3) * decode(half, wire).astype(kind)
    start = kind(0 if fresh else 1)
    np.testing.assert_allclose(slots[0], start + term, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slots[1], start - term, rtol=1e-6, atol=1e-6)
    if fresh:
        np.testing.assert_array_equal(slots[0], -slots[1])
    assert (
        squares[0]
        == squares[1]
        == pytest.approx(4 * float((decode(half, wire).astype(np.float64) ** 2).sum()), rel=1e-5)
    )


@pytest.mark.parametrize("at", [0, 15, 1023, 1024, 1031])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_difference_that_is_not_finite_is_told(dtype, value, side, at):
    models = [np.ones(1032), np.ones(1032)]
    models[side][at] = value
    args = [(raw(encode(model, dtype)), None, None) for model in models]
    half = raw(encode(np.ones(1032), dtype))
    assert kernels.half_difference(DTYPES[dtype], DTYPES[dtype], half, *args, stream=True)


def test_models_of_the_largest_numbers_have_a_finite_difference():
    most = float(np.finfo(np.float32).max)
    a, b = Shown(np.full(100, most)), Shown(np.full(100, -most))
    assert average(a, b)[0] == MERGED
    np.testing.assert_array_equal(a.state(), 0.0)
    np.testing.assert_array_equal(b.state(), 0.0)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("seed", range(4))
def test_a_pair_comes_to_its_mean_whatever_is_pending(dtype, seed):
    """Published or not, absorbed or not, on either side; two slots here and three there."""
    rng = np.random.default_rng(seed)
    learners = [
        Shown(rng.integers(-64, 64, 3000) / 8, dtype),
        Shown(rng.integers(-64, 64, 3000) / 8, dtype, Mates(0, 2)),
        Shown(rng.integers(-64, 64, 3000) / 8, dtype),
    ]
    total = sum(x.state() for x in learners)
    for _ in range(60):
        a, b = (learners[i] for i in rng.permutation(3)[:2])
        action = rng.integers(4)
        if action == 0:
            a.apply()
        elif action == 1 and not a.memory.published:
            a.memory.publish()
        else:
            chunk = int(rng.integers(len(a.memory.layout.parts[0].chunks)))
            assert average(a, b, chunk)[0] == MERGED
            part = slice(
                *(np.cumsum([0, *(c.count for c in a.memory.layout.parts[0].chunks)])[chunk:][:2])
            )
            scale = np.abs(a.state()).max()
            close = 1e-12 if dtype == "float64" else 2e-2 if "16" in dtype else 1e-5
            np.testing.assert_allclose(a.state()[part], b.state()[part], atol=close * scale)
        np.testing.assert_allclose(sum(x.state() for x in learners), total, atol=1e-3)


def test_a_mean_that_replaces_the_model_is_what_peers_read():
    a, b = Shown(np.zeros(100)), Shown(np.ones(100))
    share, total = np.zeros(100, np.float32), np.full(100, 10.0, np.float32)
    for published in (False, True):
        assert engine_calls.share(b.store, 0, raw(share))
        assert (
            engine_calls.merge_mean(b.store, 0, True, 2.0, raw(total), raw(share)) >= 0
        )  # becomes 5
        if published:
            b.memory.publish()
        half = np.zeros(100, np.float32)
        assert engine_calls.compare(a.store, *b.place, 0, -1, 0.25, raw(half))[0] == MERGED
        np.testing.assert_array_equal(half, (5.0 - (a.state() - half / 2)) / 2)
        b.apply()
        a.apply()


def test_steps_are_those_of_the_two_snapshots():
    a, b = Shown(np.zeros(8)), Shown(np.ones(8))
    for _ in range(3):
        b.offer()
    found, step, peer_step, square = average(a, b)
    assert (found, step, peer_step, square) == (MERGED, 0, 3, 8.0)


def test_a_model_that_is_not_finite_is_left_out():
    a, b = Shown(np.zeros(8)), Shown(np.ones(8))
    b.model[3] = np.nan
    b.memory.absorb(np.array(b.addresses, np.uintp), 1)
    assert average(a, b)[0] == NOT_FINITE
    np.testing.assert_array_equal(a.state(), 0.0)


def test_a_chunk_that_is_being_changed_is_not_read():
    a, b = Shown(np.zeros(8)), Shown(np.ones(8))
    version = np.frombuffer(b.memory._shown[0].front[:8], np.int64)
    assert version[0] % 2 == 0
    version[0] += 1
    assert average(a, b)[0] == CHANGING
    np.testing.assert_array_equal(a.state(), 0.0)
    version[0] -= 1
    assert average(a, b)[0] == MERGED


def test_what_changed_while_it_was_read_is_thrown_away():
    """A trainer offers models of one number each; every difference that counts is of one of them, whole.

    In float16, which is read more slowly than it is written: a trainer that begins later overtakes.
    """
    elements = 2**20
    memories, models = [], []
    for _ in range(2):
        memory, model = ShardMemory(2 * elements, None, True, True), np.zeros(elements, np.float16)
        memory.extend([TensorSpec("model", (elements,), "float16")])
        memory.absorb(np.array([model.ctypes.data], np.uintp), 0)
        memories.append(memory)
        models.append(model)
    front = memories[1]._shown[0].front.ctypes.data
    place = front, front + memories[1]._shown[1]
    ended = threading.Event()

    def train():
        step = 0
        while not ended.is_set():
            step += 1
            models[1][:] = step % 1000
            memories[1].absorb(np.array([models[1].ctypes.data], np.uintp), step)

    trainer = threading.Thread(target=train)
    trainer.start()
    half = np.zeros(elements, np.float16)
    found = {MERGED: 0, CHANGING: 0}
    deadline = time.monotonic() + 60
    try:
        while min(found.values()) < 20 and time.monotonic() < deadline:
            outcome, _, step, _ = engine_calls.compare(
                memories[0].store, *place, 0, -1, 0.0, raw(half)
            )
            found[outcome] += 1
            if outcome == MERGED:
                assert half.min() == half.max() == step % 1000 / 2
    finally:
        ended.set()
        trainer.join()
    assert min(found.values()) >= 20, found


def meet(*memories):
    gathers = Gathers(len(memories))

    def one(me):
        return Neighbours(OUTBOX, me, gathers.of(me), memories[me] and memories[me].shown)

    return together(one, range(len(memories)))


def permissions_at(address):
    """Of the mapping of this process that begins there, such as "r--s"."""
    with open("/proc/self/maps") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{address:x}-"))


def test_of_a_peer_only_the_doorbell_can_be_written():
    a, b = Shown(np.zeros(5000)), Shown(np.ones(5000))
    near, other = meet(a.memory, b.memory)
    assert permissions_at(near.outboxes[1]) == permissions_at(near.models[1]) == "r--s"
    assert permissions_at(near.doorbells[1]) == permissions_at(near.own) == "rw-s"
    ctypes.c_uint32.from_address(near.doorbells[1]).value = 7
    assert ctypes.c_uint32.from_address(other.doorbell).value == 7
    ctypes.c_uint32.from_address(other.own).value = 9
    assert ctypes.c_uint32.from_address(near.outboxes[1]).value == 9


def test_leaders_on_a_host_map_each_others_models():
    a, b = Shown(np.zeros(5000)), Shown(np.ones(5000), inner=Mates(0, 2))
    handles = [each.memory.shown.file.handle for each in (a, b)]
    near = meet(a.memory, b.memory, None)
    assert [bool(at) for at in near[0].models] == [False, True, False]
    assert [bool(at) for at in near[1].models] == [True, False, False]
    assert not any([*near[2].outboxes, *near[2].models]) and not near[0].outboxes[2]
    half = np.zeros(1024, np.float32)
    assert (
        engine_calls.compare(a.store, near[0].models[1], near[0].areas[1], 1, -1, 0.5, raw(half))[0]
        == MERGED
    )
    np.testing.assert_array_equal(half, 0.5)
    for each, handle in zip((a, b), handles, strict=True):
        each.memory.hide()
        assert each.memory.shown is None
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(handle)


def test_models_of_another_layout_are_not_read():
    a, b = Shown(np.zeros(5000)), Shown(np.ones(5001))
    near = meet(a.memory, b.memory)
    assert not any([*near[0].outboxes, *near[0].models, *near[1].outboxes, *near[1].models])


def test_leaders_of_another_host_map_nothing(monkeypatch):
    a, b = Shown(np.zeros(5000)), Shown(np.ones(5000))
    names = iter(["one", "two"])
    monkeypatch.setattr(neighbours, "host_name", lambda: next(names))
    near = meet(a.memory, b.memory)
    assert not any([*near[0].outboxes, *near[0].models, *near[1].outboxes, *near[1].models])
    assert near[0].own == near[1].own == 0


def test_only_what_was_there_at_first_is_shown():
    a = Shown(np.zeros(5000), later=3000)
    nchunks = len(a.memory.layout.parts[0].chunks)
    assert len(a.store) > nchunks
    shared, area, _ = a.memory._shown
    assert area == -(-a.store.live_nbytes(nchunks) // 64) * 64
    assert shared.front.size == -(-(area + 4 * 5000) // 4096) * 4096


@pytest.mark.parametrize("inner", [None, Mates(0, 2)])
def test_without_room_a_model_is_not_shown(inner, monkeypatch):
    monkeypatch.setattr(shared_memory, "_has_room", lambda nbytes: False)
    memory = ShardMemory(CHUNK_NBYTES, inner, True, True)
    memory.extend([TensorSpec("model", (5000,), "float32")])
    assert memory.shown is None
    model = np.ones(5000, np.float32)
    memory.absorb(np.array([model.ctypes.data], np.uintp), 0)


@pytest.mark.parametrize("inner", [None, Mates(0, 2)])
def test_the_front_lies_apart_from_slots_and_flags(inner):
    box = SharedSlots(5000, 3, inner, 6000)
    parts = [box.front, *box.slots, *box.flags]
    for i, part in enumerate(parts):
        assert not part.any()
        part[:] = i + 1
    assert all((part == i + 1).all() for i, part in enumerate(parts))
    box.close()
    box.close()
