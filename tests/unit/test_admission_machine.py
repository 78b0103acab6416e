"""Admission as a state machine: every order of events that a process can see, and those that it cannot."""

import itertools

import pytest

from hvd_adpsgd.joining.decisions import Joiner, JoinerStage, Member, MemberStage


@pytest.mark.parametrize("all_made", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_members_go_over_if_all_have_voted_yes_and_none_was_lost(
    all_made: bool, lost: bool
) -> None:
    member = Member()
    member.begins([0, 1, 3])
    assert member.votes(True)
    assert member.goes_over(all_made, [0, 3] if lost else [3, 1, 0]) == (all_made and not lost)
    assert member.stage is MemberStage.OVER


def test_a_member_asks_in_order_and_once() -> None:
    for calls in itertools.product(range(3), repeat=3):
        member = Member()
        acts = [
            lambda m=member: m.begins([0]),
            lambda m=member: m.votes(False),
            lambda m=member: m.goes_over(True, [0]),
        ]
        if list(calls) == [0, 1, 2]:
            for call in calls:
                acts[call]()
        else:
            with pytest.raises(RuntimeError, match="a member is in stage"):
                for call in calls:
                    acts[call]()


@pytest.mark.parametrize(
    ("events", "stage"),
    [
        ("", JoinerStage.WAITS),
        ("offered let_in received", JoinerStage.TRAINS),
        ("times_out", JoinerStage.OUT),
        ("offered times_out let_in", JoinerStage.OUT),  # told too late: it has ended its engine
        ("offered let_in times_out received", JoinerStage.TRAINS),
        ("offered let_in is_abandoned received", JoinerStage.OUT),
        ("offered let_in received is_abandoned times_out", JoinerStage.TRAINS),
    ],
)
def test_a_joiner_gives_up_for_good_and_only_before_it_trains(
    events: str, stage: JoinerStage
) -> None:
    joiner = Joiner()
    for event in events.split():
        getattr(joiner, event)()
    assert joiner.stage is stage
    assert joiner.is_out == (stage is JoinerStage.OUT)


def test_a_joiner_is_not_let_in_without_an_offer() -> None:
    with pytest.raises(RuntimeError, match="a joiner is in stage WAITS, expected MAKES"):
        Joiner().let_in()
