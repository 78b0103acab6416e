"""Engines that leave, or were stopped meanwhile: exchanges are cut short, in bounded time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "programs"
SHARED, SENT = (), ("--no-share",)
LEFT = 2  # as in Loop.peers
LEAVE_S = 16.0


def learners(n: int, program: str, *args: object) -> list[dict[str, Any]]:
    """What each learner of a program said, by rank."""
    arguments = [str(a) for a in args]
    return run_learners(n, PROGRAMS / program, args=arguments).checked().by_rank()


@pytest.mark.parametrize(
    ("who", "way"),
    [
        ("first", SHARED),
        pytest.param("both", SENT, marks=pytest.mark.extended),
        pytest.param("first", SENT, marks=pytest.mark.extended),
    ],
)
def test_who_leaves_cuts_a_long_exchange_short_and_loses_nothing(
    who: str, way: tuple[str, ...]
) -> None:
    """After half of leave_deadline_s; what either side has begun is averaged on both.

    In the other half the exchange ends. It takes milliseconds; on a busy machine it may take seconds.
    """
    told = learners(2, "cut_short.py", "--who", who, "--leave-s", 10, *way)
    merged = [one["merged"] for one in told]
    assert merged[0] == merged[1] and 0 < merged[0] < 100, told
    assert all(one["moved"] < 1e-15 and one["lost"] == [] for one in told), told


@pytest.mark.parametrize(
    "way",
    [("--twice",), *(pytest.param(way, marks=pytest.mark.extended) for way in (SENT, SHARED))],
)
def test_one_that_was_stopped_while_its_partner_left_waits_for_nothing(
    way: tuple[str, ...],
) -> None:
    """The rest of their exchange never comes: it comes to rest all the same, and leaves in good order.

    So has who left, though the other had come back in between.
    """
    told = learners(3, "left_behind.py", "--leave-s", LEAVE_S, *way)
    # for half of it the first waits for its partner, and the second for nothing
    assert told[0]["left_behind"] == 1 and told[0]["leave_s"] < LEAVE_S, told
    assert told[1]["rests"] and told[1]["leave_s"] < LEAVE_S / 2, told
    assert told[2]["peers"] == [LEFT, LEFT], told
