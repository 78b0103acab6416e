"""Trainer and engine at their meeting place, one process, driven by hand."""

from __future__ import annotations

import mmap
import platform
import threading
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation import engine_calls
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.layout import Layout, TensorSpec
from hvd_adpsgd.engine.shard_memory import NONE, ShardMemory
from hvd_adpsgd.engine.shared_memory import SharedSlots, private_memory
from hvd_adpsgd.engine.store import Store
from hvd_adpsgd.engine.turns import LONGEST, LOOKS, Moves, steps_between_copies
from tests.elements import DTYPES, decode, encode, wide
from tests.gathers import Mates

ROUNDING = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}


class Learner:
    """A model in a store of small chunks.

    Args:
        values: of the model.
        dtype: of its parameters.
        node: it is the leader of a super learner of several learners.
        leader: of its super learner, if it is not the leader itself.
    """

    def __init__(
        self,
        values: np.ndarray,
        dtype: str = "float64",
        node: bool = False,
        leader: Learner | None = None,
    ):
        self.dtype = dtype
        self.model = encode(values, dtype)
        layout = Layout(64)
        part = layout.extend([TensorSpec("model", values.shape, dtype)])
        self.spans, self.chunks = layout.spans, part.chunks
        places = list(accumulate((c.slot_nbytes for c in part.chunks), initial=0))
        inner = Mates(0, 2) if node or leader else None
        self.shared = leader.shared if leader else SharedSlots(places[-1], len(self.chunks), inner)
        self.mirror = None if leader else private_memory(part.nbytes)
        self.store = Store(len(self.shared.slots))
        for i, chunk in enumerate(self.chunks):
            self.store.add_chunk(
                0 if self.mirror is None else self.mirror.ctypes.data + chunk.offset,
                [slot.ctypes.data + places[i] for slot in self.shared.slots],
                [flags.ctypes.data + i for flags in self.shared.flags],
                chunk.count,
                DTYPES[dtype],
            )
        self.addresses = np.array([self.model.ctypes.data], dtype=np.uintp)
        self.step = 0

    @property
    def values(self) -> np.ndarray:
        return decode(self.model, self.dtype)

    def update(self, change: np.ndarray) -> np.ndarray:
        """A local step. Returns by how much the model has really moved."""
        before = self.values.astype(np.float64)
        self.model[:] = encode(before + change, self.dtype)
        return self.values - before

    def absorb(self, slot: int, every: int = 1) -> None:
        finite, _ = self.store.absorb(
            self.spans, self.addresses, slot, self.step, (0,), every, every, self.step
        )
        assert finite
        self.step += 1

    def snapshot(self, chunk: int, offered_only: bool = False) -> np.ndarray:
        out = encode(np.zeros(self.chunks[chunk].count), self.dtype)
        finite, _ = engine_calls.snapshot(self.store, chunk, -1, out.view(np.uint8), offered_only)
        assert finite
        return out

    def state(self) -> np.ndarray:
        """The model with everything that is owed to it, in float64."""
        shares = [np.zeros(c.count, wide(self.dtype)) for c in self.chunks]
        assert all(
            engine_calls.share(self.store, i, x.view(np.uint8)) for i, x in enumerate(shares)
        )
        return np.concatenate(shares).astype(np.float64)


def offered(*args: Any, **how: Any) -> Learner:
    learner = Learner(*args, **how)
    learner.absorb(-1)
    return learner


def exchange(a: Learner, b: Learner, chunk: int, weight: float = 0.5) -> None:
    merge(a, b, chunk, a.snapshot(chunk), b.snapshot(chunk), weight)


def merge(
    a: Learner, b: Learner, chunk: int, x: np.ndarray, y: np.ndarray, weight: float = 0.5
) -> None:
    engine_calls.merge(a.store, chunk, -1, weight, y.view(np.uint8), x.view(np.uint8))
    engine_calls.merge(b.store, chunk, -1, weight, x.view(np.uint8), y.view(np.uint8))


def test_a_snapshot_holds_the_offered_model_and_what_it_lacks():
    a, b = offered(np.zeros(20)), offered(np.full(20, 8.0))
    exchange(a, b, 0)
    np.testing.assert_array_equal(a.snapshot(0), 4.0)
    np.testing.assert_array_equal(a.snapshot(0, offered_only=True), 0.0)
    slot = a.store.publish()
    np.testing.assert_array_equal(a.snapshot(0), 4.0)  # published, not yet in the mirror
    exchange(a, b, 0)
    a.absorb(slot)
    np.testing.assert_array_equal(a.snapshot(0), a.model[: a.chunks[0].count])
    np.testing.assert_array_equal(a.model[: a.chunks[0].count], 4.0)
    np.testing.assert_array_equal(a.snapshot(1), 0.0)


def test_a_published_slot_tells_how_many_exchanges_it_holds():
    """The mean of the chunks that have some; what comes later counts for the next slot."""
    a, b = Learner(np.zeros(20)), Learner(np.full(20, 8.0))
    for learner in (a, b):
        learner.absorb(-1)
    assert a.store.arrivals == 0
    for chunk in (0, 0, 0, 1):
        exchange(a, b, chunk)
    assert a.store.arrivals == 0
    a.store.publish()
    exchange(a, b, 1)
    assert a.store.arrivals == 2
    both = a.store.covered
    a.store.publish()
    assert a.store.arrivals == 1
    assert a.store.covered == both / 2
    a.store.publish()
    assert a.store.arrivals == a.store.covered == 0


def test_mates_learn_of_a_publication_alike():
    """The number of super learners that train, and the exchanges of the slot: as of the publication."""
    leader, mate = (ShardMemory(64, Mates(0, 2), leads) for leads in (True, False))
    for memory in (leader, mate):
        memory.extend([TensorSpec("model", (20,), "float64")])
    mate._notes = leader._notes  # in shared memory
    received, sent = np.ones(8).view(np.uint8), np.zeros(8).view(np.uint8)
    for training, exchanges in ((3, 1), (2, 2), (2, 0)):
        leader.training = training
        for _ in range(exchanges):
            engine_calls.merge(leader.store, 0, -1, 0.5, received, sent)
        for memory in (leader, mate):
            memory.publish()
        engine_calls.merge(leader.store, 0, -1, 0.5, received, sent)  # of the next slot
        for memory in (leader, mate):
            memory.all_met()
            memory.take()
            assert memory.training == training
        arrivals = leader.take_arrivals()
        assert arrivals == mate.take_arrivals()
        assert arrivals.exchanges == exchanges + (training < 3)
        assert arrivals.pace == pytest.approx(1 / len(leader.store))  # one chunk in each step
        assert mate.take_arrivals() == NONE


def test_merging_goes_on_while_a_late_learner_reads_the_slot_of_the_step_before():
    """It may do so until the all-reduce that follows the next publication is over."""
    leader = Learner(np.zeros(8), node=True)
    late = Learner(np.zeros(8), leader=leader)
    other = Learner(np.full(8, 8.0))
    leader.absorb(-1)
    other.absorb(-1)
    for _ in range(5):
        exchange(leader, other, 0)
        slot = leader.store.publish()
        leader.absorb(slot)  # step t
        behind = leader.model.copy()
        leader.store.publish()  # in the gradient of step t + 1, which the late one has not begun
        other.model += 1
        other.absorb(other.store.publish())
        before = leader.state()
        exchange(leader, other, 0)
        assert (leader.state() > before).all(), "an exchange has not changed the model"
        late.absorb(slot)
        np.testing.assert_array_equal(late.model, behind)
        slot = leader.store.published
        leader.absorb(slot)
        late.absorb(slot)
        np.testing.assert_array_equal(leader.model, late.model)


def test_a_lease_is_of_one_chunk():
    """Who works on a chunk lets others work on all other chunks."""
    a, b = offered(np.zeros(40)), offered(np.ones(40))
    x, y = a.snapshot(0), b.snapshot(0)
    engine_calls.lease(a.store, 0)
    passes = threading.Thread(target=exchange, args=(a, b, 1), daemon=True)
    passes.start()
    passes.join(60)
    assert not passes.is_alive(), "waits for a lease of another chunk"
    waits = threading.Thread(target=merge, args=(a, b, 0, x, y), daemon=True)
    waits.start()
    waits.join(0.1)
    assert waits.is_alive(), "two at once in one chunk"
    engine_calls.end_lease(a.store, 0)
    waits.join(60)
    assert not waits.is_alive()
    np.testing.assert_array_equal(a.state()[:16], 0.5)


def test_chunks_stay_where_they_are_while_others_are_added():
    """An engine may hold the lease of one."""
    a = offered(np.zeros(8))
    engine_calls.lease(a.store, 0)
    for _ in range(1000):
        a.store.add_chunk(
            a.mirror.ctypes.data,
            [slot.ctypes.data for slot in a.shared.slots],
            [flags.ctypes.data for flags in a.shared.flags],
            8,
            DTYPES["float64"],
        )
    engine_calls.end_lease(a.store, 0)
    assert len(a.store) == 1001
    assert a.snapshot(0).tobytes() == a.snapshot(0).tobytes()
    engine_calls.lease(a.store, 0)
    engine_calls.end_lease(a.store, 0)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_store_has_two_or_three_slots(slots):
    with pytest.raises(ValueError, match="2 to 3"):
        Store(slots)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.sampled_from([1, 4]), st.data())
def test_the_mean_moves_only_by_local_updates(dtype, every, data):
    """Any order of updates, publications, absorptions and chunk exchanges; two of them may overlap.

    The mean of model + published + pending follows the sum of local updates, also in 16 bits."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    learners = [offered(rng.standard_normal(37), dtype) for _ in range(3)]
    expected = np.mean([learner.values.astype(np.float64) for learner in learners], axis=0)
    waiting: dict[int, int] = {}
    on_the_way: list[tuple[Learner, Learner, int, np.ndarray, np.ndarray]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        i, j = data.draw(st.permutations(range(3)))[:2]
        action = data.draw(st.sampled_from(["update", "publish", "absorb", "send", "merge"]))
        if action == "update":
            expected += learners[i].update(rng.standard_normal(37)) / 3
        elif action == "publish" and i not in waiting:
            waiting[i] = learners[i].store.publish()
        elif action == "absorb" and i in waiting:
            learners[i].absorb(waiting.pop(i), every)
        elif action == "send" and len(on_the_way) < 2:
            chunk = data.draw(st.integers(0, len(learners[0].chunks) - 1))
            pair = learners[i], learners[j]
            on_the_way.append((*pair, chunk, pair[0].snapshot(chunk), pair[1].snapshot(chunk)))
        elif action == "merge" and on_the_way:
            merge(*on_the_way.pop(data.draw(st.integers(0, len(on_the_way) - 1))), 1 / 3)
    for i, learner in enumerate(learners):
        if i in waiting:
            learner.absorb(waiting[i])
        learner.absorb(learner.store.publish())
    mean = np.mean([learner.state() for learner in learners], axis=0)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_mean_of_16_bit_models_is_kept_over_a_thousand_exchanges(dtype):
    """To rounding of float32, and the learners of a super learner take the same bits.

    Each exchange moves the models by less than half a unit in the last place in most elements."""
    rng = np.random.default_rng(7)
    start = 1 + rng.random(200)
    a = Learner(start, dtype, node=True)
    late = Learner(start, dtype, leader=a)
    b = Learner(start, dtype)
    a.absorb(-1)
    b.absorb(-1)
    expected = (a.values + b.values).astype(np.float64) / 2
    for step in range(1000):
        expected += b.update(0.01 * rng.standard_normal(200)) / 2
        chunk = step % len(a.chunks)
        exchange(a, b, chunk, weight=0.1)
        a.absorb(a.store.publish())
        late.absorb(a.store.published)
        assert late.model.tobytes() == a.model.tobytes()
        b.absorb(b.store.publish())
    off = (a.state() + b.state()) / 2 - expected
    assert np.abs(off).max() < 1000 * 2**-24 * 2, np.abs(off).max()
    assert np.abs(a.state() - a.values).max() > 0, "nothing was held back"
    ulp = np.abs(a.values).max() * 2.0 ** (-7 if dtype == "bfloat16" else -10)
    assert np.abs(a.state() - a.values).max() <= ulp, "more was held back than rounding can"


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1.7014e38), ("bfloat16", 1.6947e38), ("float64", 8.98e307)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_of_finite_models_makes_none_infinite(dtype, most, sign):
    """The distance from the mean of one that is far beyond it: larger numbers take no part in means."""
    for value, fits in ((most, True), (1.01 * most, False)):
        learner = Learner(np.array([1.0, sign * value, 0.0]), dtype)
        learner.absorb(-1)
        shares = [np.ones(chunk.count, wide(dtype)) for chunk in learner.chunks]
        told = [
            engine_calls.share(learner.store, i, x.view(np.uint8)) for i, x in enumerate(shares)
        ]
        assert all(told) == fits
    largest = np.array([most], wide(dtype))
    assert np.isfinite(largest - -largest).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_that_replaces_16_bit_models_leaves_them_with_the_same_bits(dtype):
    """Also what it holds back: the models of the next mean are equal."""
    rng = np.random.default_rng(3)
    learners = [offered(rng.standard_normal(20), dtype) for _ in range(3)]
    exchange(learners[0], learners[1], 0, weight=0.3)
    for learner in learners:
        learner.absorb(learner.store.publish())  # what rounding holds back is in the open slot
    for chunk, spec in enumerate(learners[0].chunks):
        shares = np.zeros((3, spec.count), np.float32)
        for learner, share in zip(learners, shares, strict=True):
            assert engine_calls.share(learner.store, chunk, share.view(np.uint8))
        total = shares.sum(axis=0)
        for learner, share in zip(learners, shares, strict=True):
            square = engine_calls.merge_mean(
                learner.store, chunk, True, 3.0, total.view(np.uint8), share.view(np.uint8)
            )
            assert square > 0
    for learner in learners:
        learner.absorb(learner.store.publish())
    assert len({learner.model.tobytes() for learner in learners}) == 1
    assert len({learner.state().tobytes() for learner in learners}) == 1


def test_nothing_is_held_back_of_parameters_that_were_replaced():
    """Of those alone: another tensor in the same chunk keeps what it has."""
    rng = np.random.default_rng(5)
    a, b = (offered(rng.standard_normal(20), "bfloat16") for _ in range(2))
    exchange(a, b, 0, weight=0.3)
    a.absorb(a.store.publish())
    before = a.state()
    assert (before != a.values)[:16].any() and (before != a.values)[16:].any()
    a.store.forget(np.array([[0, 0, 0, 0, 16]]))
    np.testing.assert_array_equal(a.state()[:16], a.values[:16])
    np.testing.assert_array_equal(a.state()[16:], before[16:])


def test_a_16_bit_model_that_gets_no_correction_holds_nothing_back():
    a = Learner(np.linspace(0, 1, 20), "bfloat16")
    for _ in range(3):
        finite, corrected = a.store.absorb(a.spans, a.addresses, a.store.publish(), 0)
        assert finite and not corrected
    assert not any(flags.any() for flags in a.shared.flags)


def test_a_model_that_is_not_finite_is_reported():
    learner = Learner(np.ones(20))
    learner.model[13] = np.nan
    assert learner.store.absorb(learner.spans, learner.addresses, -1, 0) == (False, False)
    finite, _ = engine_calls.snapshot(learner.store, 1, -1, np.zeros(64, np.uint8))
    assert not finite


def test_private_memory_is_there_before_it_is_touched():
    """Else the first steps would wait for it; Linux 5.14 and newer."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("the kernel cannot populate memory")
    before = resident()
    memory = private_memory(64 * 2**20)
    assert resident() - before > 60 * 2**20
    assert memory.size == 64 * 2**20 and not memory.any()
    assert private_memory(0).size == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replace", [False, True])
def test_a_copy_takes_what_is_pending_and_the_model_stays(dtype: str, replace: bool) -> None:
    """In the published slot and in the open one; or a mean in the open one, which takes the place of all."""
    rng = np.random.default_rng(8)
    learner = offered(rng.standard_normal(100), dtype)
    before = learner.model.copy()
    expected, there = learner.values.astype(wide(dtype)), []
    for _ in range(2):
        for i, chunk in enumerate(learner.chunks):
            a, b = (encode(rng.standard_normal(chunk.count), dtype) for _ in range(2))
            engine_calls.merge(learner.store, i, -1, 0.5, a.view(np.uint8), b.view(np.uint8))
            there.append(0.5 * (decode(a, dtype) - decode(b, dtype)))
        if len(there) == len(learner.chunks):
            learner.store.publish()
    half = len(there) // 2
    expected = expected + np.concatenate(there[:half]) + np.concatenate(there[half:])
    if replace:
        expected = rng.standard_normal(100).astype(wide(dtype))
        ends = list(accumulate((c.count for c in learner.chunks), initial=0))
        for i, own in enumerate(np.split(expected, ends[1:-1])):
            raw = np.ascontiguousarray(own).view(np.uint8)
            engine_calls.merge_mean(learner.store, i, True, 1.0, raw, raw)
    copy = np.ascontiguousarray(learner.values.astype(wide(dtype)))
    learner.store.add_pending(learner.spans, np.array([copy.ctypes.data], dtype=np.uintp))
    np.testing.assert_allclose(copy, expected, rtol=0, atol=10 * ROUNDING[dtype])
    np.testing.assert_array_equal(learner.model, before)


def passed(learner: Learner, slot: int, every: int = 4, checked: int = 8) -> tuple[bool, list[int]]:
    """Make a pass; return whether what it looked at is finite, and each chunk's step in the mirror."""
    finite, _ = learner.store.absorb(
        learner.spans, learner.addresses, slot, learner.step, (0,), every, checked, learner.step
    )
    learner.step += 1
    steps = []
    for i, chunk in enumerate(learner.chunks if learner.mirror is not None else ()):
        out = encode(np.zeros(chunk.count), learner.dtype)
        steps.append(engine_calls.snapshot(learner.store, i, -1, out.view(np.uint8))[1])
    return finite, steps


def test_chunks_without_a_correction_take_turns():
    a = Learner(np.zeros(64))  # 8 chunks of 8 elements
    assert passed(a, -1) == (True, [0] * 8)  # the first pass copies all
    seen = [passed(a, -1)[1] for _ in range(8)]
    assert seen[0] == [0, 0, 0, 1, 0, 0, 0, 1]  # step 1: chunks 3 and 7
    for step, steps in enumerate(seen, 1):
        assert max(steps) == step
        assert all(step - at < 4 for at in steps)
        assert sum(at == step for at in steps) == 2
    assert passed(a, -1, every=1)[1] == [9] * 8  # exchanges move more again
    a.update(np.ones(64))
    _, steps = passed(a, -1, every=2)
    for i, at in enumerate(steps):
        assert (a.snapshot(i) == float(at == 10)).all()


def test_a_chunk_with_a_correction_is_always_copied():
    a, b = Learner(np.zeros(64)), Learner(np.full(64, 8.0))
    for learner in (a, b):
        passed(learner, -1)
        learner.update(np.ones(64))
    exchange(a, b, 2)  # as offered: local updates since then are not in the mirror
    finite, steps = passed(a, a.store.publish())
    assert finite
    assert steps == [0, 0, 1, 1, 0, 0, 0, 1]
    assert (a.values[16:24] == 1 + 4).all()
    assert (a.snapshot(2) == 5).all()
    assert (a.snapshot(0) == 0).all()


def test_what_is_not_finite_is_found_by_all_learners_alike():
    """The leader copies each second step, other learners not at all: they look in the same steps."""
    leader = Learner(np.zeros(64), node=True)
    other = Learner(np.zeros(64), leader=leader)
    for learner in (leader, other):
        assert passed(learner, -1, every=2)[0]
        learner.model[8 * 5] = np.nan  # chunk 5 is looked at in steps 3, 11, ...
    found = [[passed(learner, -1, every=2)[0] for _ in range(16)] for learner in (leader, other)]
    assert found[0] == found[1] == [step not in (3, 11) for step in range(1, 17)]


def test_a_pass_whose_turns_do_not_fit_is_refused():
    a = Learner(np.zeros(8))
    for every, checked in ((3, 8), (0, 8), (1, 0)):
        with pytest.raises(ValueError, match=f"every {every}, checked {checked}: the first must"):
            passed(a, -1, every, checked)


@pytest.mark.parametrize(
    ("share", "rate", "chunks", "steps"),
    [
        (1.0, 1.0, 40, 1), (0.25, 1.0, 40, 2), (0.2, 1.0, 40, 2), (0.125, 1.0, 40, 4),
        (1 / 16, 1.0, 40, 8), (0.001, 1.0, 4000, 8), (1 / 8, 2.0, 40, 2), (1 / 16, 0.1, 40, 8),
        (1 / 16, 1.0, 4, 2), (1 / 16, 1.0, 1, 1), (0.5, 0.0, 40, 8), (0.1, 1.0, 0, 1),
    ],
)  # fmt: skip
def test_a_chunk_is_copied_as_often_as_exchanges_move_it(share, rate, chunks, steps):
    assert steps_between_copies(Moves(share, rate), chunks) == steps
    assert LOOKS % LONGEST == LONGEST % steps == 0
