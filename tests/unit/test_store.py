"""Trainer and engine at their meeting place, one process, driven by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adpsgd.engine.layout import DTYPE_CODES, Layout, TensorSpec
from hvd_adpsgd.engine.shared_memory import Mailbox, private_memory
from hvd_adpsgd.engine.store import Store


class Learner:
    """A float64 model in a store of small chunks."""

    def __init__(self, values: np.ndarray, mirror: bool = True):
        self.model = values.copy()
        layout = Layout(64)
        generation = layout.extend([TensorSpec("model", values.shape, "float64")])
        self.spans = layout.spans
        self.chunks = generation.chunks
        self.mailbox = Mailbox(generation.nbytes, len(self.chunks))
        self.mirror = private_memory(generation.nbytes) if mirror else None
        self.store = Store()
        for i, chunk in enumerate(self.chunks):
            self.store.add_chunk(
                self.mirror.ctypes.data + chunk.offset if mirror else 0,
                self.mailbox.slots[0].ctypes.data + chunk.offset,
                self.mailbox.slots[1].ctypes.data + chunk.offset,
                self.mailbox.flags[0].ctypes.data + i,
                self.mailbox.flags[1].ctypes.data + i,
                chunk.count,
                DTYPE_CODES["float64"],
            )
        self.addresses = np.array([self.model.ctypes.data], dtype=np.uintp)
        self.step = 0

    def absorb(self, slot: int) -> None:
        assert not self.store.absorb(self.spans, self.addresses, slot, self.step)
        self.step += 1

    def snapshot(self, chunk: int, offered_only: bool = False) -> np.ndarray:
        out = np.zeros(self.chunks[chunk].count)
        finite, _ = self.store.snapshot(chunk, -1, out.view(np.uint8), offered_only)
        assert finite
        return out

    def state(self) -> np.ndarray:
        """The model with everything that is owed to it, as the engine sees it."""
        return np.concatenate([self.snapshot(c) for c in range(len(self.chunks))])


def exchange(a: Learner, b: Learner, chunk: int, weight: float = 0.5) -> None:
    x, y = a.snapshot(chunk), b.snapshot(chunk)
    a.store.merge(chunk, -1, weight, y.view(np.uint8), x.view(np.uint8))
    b.store.merge(chunk, -1, weight, x.view(np.uint8), y.view(np.uint8))


def test_a_snapshot_holds_the_offered_model_and_what_it_lacks():
    a, b = Learner(np.zeros(20)), Learner(np.full(20, 8.0))
    a.absorb(-1)
    b.absorb(-1)
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


def test_local_updates_made_meanwhile_are_kept():
    a, b = Learner(np.zeros(8)), Learner(np.full(8, 2.0))
    a.absorb(-1)
    b.absorb(-1)
    exchange(a, b, 0)
    a.model += 10.0
    a.absorb(a.store.publish())
    np.testing.assert_array_equal(a.model, 11.0)


def test_a_follower_reads_what_its_leader_published():
    leader, follower = Learner(np.zeros(8)), Learner(np.zeros(8), mirror=False)
    other = Learner(np.full(8, 2.0))
    leader.absorb(-1)
    other.absorb(-1)
    exchange(leader, other, 0)
    for i in (0, 1):  # stands for the shared memory
        follower.mailbox.slots[i][:] = leader.mailbox.slots[i]
        follower.mailbox.flags[i][:] = leader.mailbox.flags[i]
    slot = leader.store.publish()
    follower.absorb(slot)
    leader.absorb(slot)
    np.testing.assert_array_equal(leader.model, follower.model)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_mean_moves_only_by_local_updates(data):
    """Any order of updates, publications, absorptions and chunk exchanges; two of them may overlap.

    The mean of model + published + pending follows the sum of local updates."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    learners = [Learner(rng.standard_normal(19)) for _ in range(3)]
    for learner in learners:
        learner.absorb(-1)
    expected = np.mean([learner.model for learner in learners], axis=0)
    waiting: dict[int, int] = {}
    on_the_way: list[tuple[Learner, Learner, int, np.ndarray, np.ndarray]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        i, j = data.draw(st.permutations(range(3)))[:2]
        action = data.draw(st.sampled_from(["update", "publish", "absorb", "send", "merge"]))
        if action == "update":
            change = rng.standard_normal(19)
            learners[i].model += change
            expected += change / 3
        elif action == "publish" and i not in waiting:
            waiting[i] = learners[i].store.publish()
        elif action == "absorb" and i in waiting:
            learners[i].absorb(waiting.pop(i))
        elif action == "send" and len(on_the_way) < 2:
            chunk = data.draw(st.integers(0, len(learners[0].chunks) - 1))
            pair = learners[i], learners[j]
            on_the_way.append((*pair, chunk, pair[0].snapshot(chunk), pair[1].snapshot(chunk)))
        elif action == "merge" and on_the_way:
            a, b, chunk, x, y = on_the_way.pop(data.draw(st.integers(0, len(on_the_way) - 1)))
            a.store.merge(chunk, -1, 1 / 3, y.view(np.uint8), x.view(np.uint8))
            b.store.merge(chunk, -1, 1 / 3, x.view(np.uint8), y.view(np.uint8))
    for i, learner in enumerate(learners):
        if i in waiting:
            learner.absorb(waiting[i])
        learner.absorb(learner.store.publish())
    mean = np.mean([learner.model for learner in learners], axis=0)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)


def test_a_model_that_is_not_finite_is_reported():
    learner = Learner(np.ones(20))
    learner.model[13] = np.nan
    assert learner.store.absorb(learner.spans, learner.addresses, -1, 0)
    finite, _ = learner.store.snapshot(1, -1, np.zeros(64, np.uint8))
    assert not finite


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_private_memory_is_zero(n):
    memory = private_memory(n)
    assert memory.size == n
    assert not memory.any()
