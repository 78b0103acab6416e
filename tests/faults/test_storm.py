"""The simulator's fault scripts on real processes: the promises hold, seen from outside (tests/storm)."""

import dataclasses
import signal
from typing import Any

import numpy as np
import pytest

from tests.storm.judge import intervals, judge
from tests.storm.play import play
from tests.storm.script import EPOCH, Fault, Script, drift, script_of
from tests.storm.story import Story

pytestmark = pytest.mark.mpi

SHORT = (13, 14)  # MPI, a kill; stop, kill, a partition
LONG = 20


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.extended, pytest.mark.slow] * (seed not in SHORT))
        for seed in range(LONG)
    ],
)
def test_the_promises_hold_on_real_processes(seed: int) -> None:
    story = play(script_of(seed))
    assert not story.broken, str(story)
    assert story.of("fault") or seed not in SHORT, str(story)


FAULTS = {  # kind and place; super learners and learners of each; who commits it: super learner, inner rank
    ("kill", "exchange"): (3, 1, [(0, 0)]),
    ("kill", "gradient"): (2, 2, [(0, 1)]),
    ("kill", "shutdown"): (2, 2, [(0, 0), (0, 1)]),
    ("stop", "gradient"): (2, 2, [(1, 0)]),
    ("leave", "moment"): (3, 1, [(0, 0)]),
    ("leave", "gradient"): (2, 2, [(1, 1)]),
    ("leave", "rest"): (2, 2, [(0, 0), (1, 1)]),
    ("exit", "step"): (4, 1, [(2, 0)]),
    ("os_exit", "step"): (4, 1, [(0, 0), (1, 0), (3, 0)]),
    ("raise", "gradient"): (2, 2, [(0, 0)]),
    ("segfault", "step"): (4, 1, [(0, 0), (1, 0), (3, 0)]),
}
FURTHER = ("raise", "segfault", "rest")


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param(*fault, marks=[pytest.mark.extended] * any(word in FURTHER for word in fault))
        for fault in FAULTS
    ],
)
def test_every_kind_of_fault_in_a_job_of_mpirun(kind: str, place: str) -> None:
    """Of a leader, its mate, a whole super learner, and all but one; the last step is one of them."""
    n, k, who = FAULTS[kind, place]
    epochs = 5
    step = epochs * EPOCH - 1 if place == "shutdown" or kind == "exit" else 7
    variables = {
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": str(k),
        "HVD_ADPSGD_LEAVE_DEADLINE_S": "2",
        "ADPSGD_SAME_HOST": "mpi",
        "ADPSGD_CHUNK_KIB": "64",
    }
    script = dataclasses.replace(
        script_of(0), launcher="mpirun", n=n, k=k, epochs=epochs, strategy="random_pairs",
        dtype="float64", share=1.0, rate=2.0, chunks=64, variables=variables, joins=None, left_out=(),
        faults=tuple(Fault(kind, one, inner, step, place, 2.0) for one, inner in who),
    )  # fmt: skip
    story = play(script)
    assert not story.broken, str(story)
    assert len(story.of("fault")) == len(who), str(story)
    if kind == "leave":
        assert len(story.of("left")) == k * len(who), str(story)
        assert k > 1 or all(each.is_exact for each in intervals(story)), str(story)
        for word in ("Traceback", "has failed", "are gone"):
            assert word not in story.errors, str(story)


SHAPE = (2, 3)


def a_story(**changes: Any) -> Story:
    """Of three super learners that average in pairs, without a fault: two epochs, and the end of all."""
    script = dataclasses.replace(script_of(0), n=3, k=1, launcher="srun", strategy="random_pairs")
    script = dataclasses.replace(script, dtype="float64", joins=None, faults=(), **changes)
    story = Story(script, statuses=[0, 0, 0])
    models = {who: np.zeros(SHAPE) for who in range(3)}
    for checkpoint in range(3):
        story.models[checkpoint] = {who: model.copy() for who, model in models.items()}
        for who in models:
            note(
                story, "checkpoint", who, checkpoint, bits="same", averagings=checkpoint, rests=True
            )
            models[who] += EPOCH * drift(who, SHAPE)
        models[0], models[1] = (models[0] + models[1]) / 2, (models[0] + models[1]) / 2
    for who in models:
        for what in ("initialized", "wrapped", "trained", "end", "down"):
            note(story, what, who, 2, total=3.0, failed=[])
    return story


def note(story: Story, what: str, who: int, checkpoint: int, **facts: Any) -> None:
    place = {"pid": who, "new": False, "rank": who, "who": who, "inner": 0}
    steps = {"step": EPOCH * checkpoint, "checkpoint": checkpoint, "at": 0.0}
    story.notes.append({"what": what, **place, **steps, **facts})


def strike(story: Story, who: int, kind: str, place: str = "step", checkpoint: int = 1) -> None:
    """A fault of a super learner behind its checkpoint: it is not seen again."""
    note(story, "fault", who, checkpoint, kind=kind, place=place)
    gone = ("trained", "end", "down")
    story.notes = [n for n in story.notes if n["who"] != who or n["what"] not in gone]
    del story.models[2][who]
    story.statuses[who] = -9


def verdict(story: Story) -> str:
    judge(story)
    return "; ".join(story.broken)


def test_a_run_without_a_fault_is_good() -> None:
    assert verdict(a_story()) == ""


def test_a_chunk_that_one_side_alone_has_merged_is_found() -> None:
    story = a_story()
    story.models[2][1][0] += 0.5
    assert "the sum moves by local updates only" in verdict(story)


def test_who_is_killed_at_rest_takes_its_own_model_only() -> None:
    story = a_story()
    strike(story, 2, "kill", "rest")
    story.statuses[0] = 75
    assert verdict(story) == ""
    story.models[2][0][0] += 1e-6
    assert "the sum moves by local updates only" in verdict(story)


def test_who_leaves_takes_no_more_than_it_has_given() -> None:
    story = a_story()
    story.left[2] = story.models[2][2].copy()
    strike(story, 2, "leave")
    story.statuses[2] = -signal.SIGTERM
    note(story, "held", 2, 2, made=2 * EPOCH)
    assert verdict(story) == ""
    story.left[2][0] += 1e-6
    assert "the sum moves by local updates only" in verdict(story)


def test_who_is_killed_in_an_exchange_leaves_no_garbage() -> None:
    story = a_story()
    strike(story, 0, "kill", "exchange")
    story.models[2][1] *= 1e3
    assert "a model stays among what models were" in verdict(story)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s.notes.remove(s.of("down")[1]), "learner 1 of 1 has not trained to its end"),
        (lambda s: s.of("trained")[1].update(total=2.0), "sums over all learners"),
        (lambda s: s.of("end")[0].update(failed=[2]), "learner 0 takes {2} for failed"),
        (lambda s: s.statuses.__setitem__(1, 75), "status 75, allowed are [0]"),
        (lambda s: strike(s, 2, "kill", "rest"), "status 75 of the first survivor"),
        (
            lambda s: note(s, "checkpoint", 2, 1, bits="other", averagings=0, rests=True),
            "same in the super",
        ),
    ],
)
def test_each_promise_can_be_broken(spoil: Any, told: str) -> None:
    story = a_story()
    spoil(story)
    assert told in verdict(story)


def test_a_script_travels_as_json() -> None:
    script = script_of(1)
    assert Script.from_json(script.to_json()) == script
