"""Joining super learners that were offered a super_rank which another one has taken since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvd_adpsgd.joining.candidates import JoiningSuperLearner, JoinRequest, JoinServer
from hvd_adpsgd.torch import admission


@pytest.mark.parametrize(
    ("number", "instead_of", "stays"),
    [
        (2, None, True),  # the next super_rank: nobody has it
        (1, None, False),  # another one came first
        (1, 1, False),  # so it did in place of a failed one
        (0, 0, True),  # super learner 0 is lost, and waits for this one
        (0, None, False),  # another one had 0, and is lost: its host is not that of this one
    ],
)
def test_who_comes_too_late_is_dismissed_and_counts_as_no_failure(
    number: int, instead_of: int | None, stays: bool
) -> None:
    here, one = JoinServer(), JoiningSuperLearner(number, 0.0)
    one.request = JoinRequest((), instead_of)
    here.candidates.append(one)
    world = SimpleNamespace(groups=((0,), (1,)), collectives=SimpleNamespace(ranks=(1,)))
    failures = dict(admission._failures)
    admission._dismiss_late(here, cast(Any, world))
    assert (one in here.candidates) is stays
    assert admission._failures == failures
