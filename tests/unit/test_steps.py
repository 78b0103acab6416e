"""Which rounds a super learner owes the others, whatever the script does between gradients and step()."""

import pytest

from hvd_adpsgd.training.round_accounting import Steps

STEP = "averaged begin averaged due end"  # as scripts make one; gradients inside are not new


@pytest.mark.parametrize(
    ("events", "owed"),
    [
        (f"{STEP} {STEP} {STEP}", 0),
        ("averaged", 0),  # step() may still come
        ("averaged averaged", 1),  # the next gradients come: that step was skipped
        (f"averaged averaged {STEP}", 2),
        ("averaged all_wait all_wait", 1),  # what all wait for takes the round from the step, once
        (f"averaged all_wait all_wait begin over end {STEP}", 1),
        ("averaged all_wait averaged begin due", 1),  # the next gradients are another step
        (f"all_wait {STEP} all_wait", 0),  # between steps
        ("averaged begin inside leave outside", 1),  # left by an exception
        (f"averaged begin leave {STEP} leave", 1),  # every step() is left
        (f"averaged all_wait begin leave {STEP}", 1),  # a round that is over is not owed again
    ],
)
def test_what_is_owed(events: str, owed: int) -> None:
    steps = Steps()
    facts = {"due": lambda: steps.due, "over": lambda: not steps.due}
    facts |= {"inside": lambda: steps.inside, "outside": lambda: not steps.inside}
    for event in events.split():
        if event in facts:
            assert facts[event](), event
        else:
            getattr(steps, event)()
    assert steps.owed == owed
