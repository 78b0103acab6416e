"""Which rounds a super learner owes the others, whatever the script does between gradients and step()."""

from __future__ import annotations

from hvd_adpsgd.training.round_accounting import Steps


def step(steps: Steps) -> bool:
    """A step as scripts make them. Whether its round came with it."""
    steps.averaged()
    steps.begin()
    steps.averaged()  # again, inside: nothing new
    due = steps.due
    steps.end()
    return due


def test_every_step_brings_its_round():
    steps = Steps()
    assert [step(steps) for _ in range(3)] == [True] * 3
    assert steps.owed == 0


def test_skipped_steps_are_owed_when_the_next_gradients_come():
    steps = Steps()
    steps.averaged()
    assert steps.owed == 0, "step() may still come"
    steps.averaged()
    assert steps.owed == 1
    assert step(steps)
    assert steps.owed == 2


def test_what_all_wait_for_takes_the_round_from_the_step():
    steps = Steps()
    steps.averaged()
    steps.all_wait()
    steps.all_wait()  # only once
    assert steps.owed == 1
    steps.begin()
    assert not steps.due, "its round is over already"
    steps.end()
    assert step(steps)
    assert steps.owed == 1


def test_the_next_gradients_are_another_step():
    steps = Steps()
    steps.averaged()
    steps.all_wait()
    steps.averaged()
    steps.begin()
    assert steps.due
    assert steps.owed == 1


def test_nothing_is_owed_between_steps():
    steps = Steps()
    steps.all_wait()
    assert step(steps)
    steps.all_wait()
    assert steps.owed == 0
    assert not steps.inside
    steps.begin()
    assert steps.inside


def test_a_step_left_by_an_exception_is_owed():
    steps = Steps()
    steps.averaged()
    steps.begin()
    steps.leave()
    assert not steps.inside
    assert steps.owed == 1
    assert step(steps)
    steps.leave()  # every step() is left
    assert steps.owed == 1


def test_a_round_that_is_over_is_not_owed_again():
    steps = Steps()
    steps.averaged()
    steps.all_wait()
    steps.begin()
    steps.leave()
    assert step(steps)
    assert steps.owed == 1
