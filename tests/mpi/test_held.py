"""What a script holds of its optimizer stays alive (programs/held.py): schedulers, groups, state, hooks."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "held.py"
PLACES = ("2x1", "plain")  # two super learners of one learner; one of two
MADE = ("0 plain", *(f"{calls} {which}" for calls in range(1, 5) for which in ("plain", "wrapped")))


@functools.cache
def by_case() -> dict[str, list[dict[str, Any]]]:
    return run_learners(2, PROGRAM).checked().by_case()


def said(case: str) -> list[dict[str, Any]]:
    """By rank."""
    assert len(by_case()[case]) == 2, case
    return by_case()[case]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("place", PLACES)
def test_schedulers_do_what_they_do_in_plain_torch(place: str, made: str, optimizer: str) -> None:
    """Made of the plain or of the wrapped optimizer, after so many of wrap, broadcast, and two loads."""
    for facts in said(f"{place}/{made} {optimizer}"):
        assert facts["same"]
        assert facts["told"] == []


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("place", PLACES)
def test_a_broadcast_fills_what_is_held(place: str, momentum: float) -> None:
    for facts in said(f"{place}/root {momentum}"):
        assert facts["kept"], "other groups, states or tensors"
        assert facts["rate"] == 0.05, "half of the root's"
        assert facts["buffers"] == ([[1.0] * 3] if momentum else []), "the root's"


@pytest.mark.parametrize("place", PLACES)
def test_wrapping_takes_everything_over(place: str) -> None:
    for facts in said(f"{place}/carried"):
        assert facts["buffer"] == [3.0] * 3
        assert facts["limit"] == 5
        assert facts["more"] == 1, "of the hook of state_dict()"
        assert facts["called"] == ["pre", "post"], "each hook once, and not the one removed"
        assert facts["sum"] == 7.0, "of Adagrad's argument"
        assert facts["demanding"] == 2.5, "of a constructor that needs it"
        assert facts["around"] == [0.75] * 3


@pytest.mark.parametrize("place", PLACES)
def test_a_class_may_derive_from_that_of_a_wrapped_optimizer(place: str) -> None:
    for facts in said(f"{place}/derived"):
        assert facts["grad"] == [0.0] * 3
        assert facts["groups"] == 4, "rates of two groups: one was added"


@pytest.mark.parametrize("place", PLACES)
def test_parameters_that_were_added_are_averaged(place: str) -> None:
    """Inside the super learner of two: the mean of the gradients 1 and 2."""
    moved = [1.0, 2.0] if place == "2x1" else [1.5, 1.5]
    for rank, facts in enumerate(said(f"{place}/grown")):
        assert facts["moved"] == [moved[rank]] * 3
        assert facts["shared"]


@pytest.mark.parametrize("place", PLACES)
def test_gradients_before_a_load_are_dropped(place: str) -> None:
    moved = [[3.0] * 3, [6.0] * 3] if place == "2x1" else [[4.5] * 3] * 2
    assert [facts["moved"] for facts in said(f"{place}/backward then load")] == moved


@pytest.mark.parametrize("place", PLACES)
def test_what_wrapping_would_lose_is_refused_by_name(place: str) -> None:
    for case, words in (("patched", "step() of its own"), ("taken", "attribute '_alone'")):
        for facts in said(f"{place}/{case}"):
            assert facts["error"] == "UnsupportedOptimizerError"
            assert words in facts["text"]
