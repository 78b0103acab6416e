"""Peer states: every pair of state and event, and one message per news."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine.peers import (
    LAST_WORDS_S,
    Event,
    Losses,
    PeerState,
    PeerTable,
    next_state,
)
from hvd_adpsgd.errors import TopologyError, WorldError

ALIVE, SUSPECT, LEFT, FAILED = PeerState
MISSED, ANSWERED, GOODBYE, FAILED = Event

# the whole law, row by row; None raises
LAW = {
    ALIVE: {MISSED: SUSPECT, ANSWERED: ALIVE, GOODBYE: LEFT, FAILED: FAILED},
    SUSPECT: {MISSED: SUSPECT, ANSWERED: ALIVE, GOODBYE: LEFT, FAILED: FAILED},
    LEFT: {MISSED: LEFT, ANSWERED: None, GOODBYE: LEFT, FAILED: LEFT},
    FAILED: {MISSED: FAILED, ANSWERED: None, GOODBYE: FAILED, FAILED: FAILED},
}


def tell(table, peer, event, **kwargs):
    method = {
        MISSED: table.missed_deadline,
        ANSWERED: table.answered,
        GOODBYE: table.said_goodbye,
        FAILED: table.failed,
    }[event]
    return method(peer, **kwargs)


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", PeerState)
def test_law(state, event):
    expected = LAW[state][event]
    if expected is None:
        with pytest.raises(WorldError, match=f"answered although its state is {state.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event) is expected


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Event)), max_size=40))
def test_any_story(story):
    table, states, told = PeerTable(3), [ALIVE] * 3, set()
    for peer, event in story:
        expected = LAW[states[peer]][event]
        if expected is None:
            with pytest.raises(WorldError):
                tell(table, peer, event)
            continue
        got = tell(table, peer, event)
        assert (got.peer, got.event) == (peer, event)
        assert (got.before, got.after) == (states[peer], expected)
        assert got.changed == (states[peer] is not expected)
        assert (got.message is not None) == (got.changed and (peer, expected) not in told)
        if got.message:
            told.add((peer, expected))
        states[peer] = expected
        assert [table.state(i) for i in range(3)] == states
    for state in PeerState:
        assert table.among(state) == tuple(i for i in range(3) if states[i] is state)


def test_messages_say_who_when_and_what_now():
    table = PeerTable(2, ["node01", "node07"])
    silent = table.missed_deadline(1, step=1842, detail="1.3 s of deadline_s = 1.0")
    assert silent.message == (
        "super learner 1 (node07) is silent at step 1842: 1.3 s of deadline_s = 1.0. Averaging "
        "passes over it until it answers; raise HVD_ADPSGD_DEADLINE_S if it is only slow."
    )
    assert table.answered(1).message.startswith("super learner 1 (node07) answers again. ")
    assert table.missed_deadline(1).message is None
    assert table.answered(1).message is None
    lost = table.failed(1, step=9)
    assert lost.message == (
        "super learner 1 (node07) has failed at step 9. Training goes on without it."
    )
    assert table.failed(1).message is None
    assert table.state(0) is ALIVE


def test_messages_without_names_and_of_a_goodbye():
    message = PeerTable(4).said_goodbye(3).message
    assert message == "super learner 3 has left. Averaging goes on among the others."
    assert "\n" not in message


def test_sizes_and_ranks():
    assert len(PeerTable(5)) == 5
    assert PeerTable(5).among(ALIVE, SUSPECT) == (0, 1, 2, 3, 4)
    with pytest.raises(TopologyError):
        PeerTable(0)
    for peer in (-1, 2):
        with pytest.raises(TopologyError):
            PeerTable(2).state(peer)
        with pytest.raises(TopologyError):
            PeerTable(2).failed(peer)


# ---- who tells of a loss -------------------------------------------------------------------------

SOON, LATE = LAST_WORDS_S / 2, 2 * LAST_WORDS_S


def warnings(rank: int, *story: tuple[float, list[int], list[int]]) -> list[str]:
    """What the leader `rank` warns of, in a story of (when, who is noticed to have failed, who lives)."""
    losses, told = Losses(rank), []
    for when, lost, alive in story:
        for peer in lost:
            losses.noticed(peer, str(peer), when)
        told += [message for warn, message in losses.to_tell(alive) if warn]
    return told


def test_the_first_living_leader_warns_and_nobody_else():
    story = [(0.0, [2], [0, 1, 3]), (LATE, [1], [0, 3]), (LATE + SOON, [], [0, 3])]
    assert warnings(0, *story) == ["2", "1"]
    assert warnings(3, *story) == []


@pytest.mark.parametrize("order", [[0, 2], [2, 0]])
def test_all_lost_at_once_are_told_by_the_first_that_lives(order):
    assert warnings(1, (0.0, order, [1, 3])) == [str(peer) for peer in order]
    assert warnings(3, (0.0, order, [1, 3]), (SOON, [], [1, 3])) == []


def test_the_next_one_warns_in_place_of_one_lost_soon_after():
    soon = [(0.0, [2], [0, 1, 3]), (SOON, [0], [1, 3])]
    assert warnings(1, *soon) == ["2", "0"]
    assert warnings(3, *soon) == []
    assert warnings(3, *soon, (2 * SOON - 0.1, [1], [3])) == ["2", "0", "1"]
    assert warnings(1, (0.0, [2], [0, 1, 3]), (LATE, [0], [1, 3])) == ["0"]


@pytest.mark.parametrize(("knew", "told"), [([2], []), ([], ["2"]), ([3], ["2"])])
def test_the_next_one_warns_in_place_of_one_that_left_before_it_knew(knew, told):
    for first_it_leaves in (True, False):
        losses = Losses(1)
        if not first_it_leaves:
            losses.noticed(2, "2", 0.0)
            assert losses.to_tell([0, 1, 4]) == [(False, "2")]
        losses.left(0, knew)
        if first_it_leaves:
            losses.noticed(2, "2", 0.0)
        assert [line for warn, line in losses.to_tell([1, 4]) if warn] == told
        assert losses.to_tell([1, 4]) == []


def test_who_left_thinking_that_another_would_warn_has_not_warned():
    """0 is to warn of 2 and is killed; 1 leaves meanwhile, and knows of 2 only."""
    losses = Losses(3)
    losses.noticed(2, "2", 0.0)
    assert losses.to_tell([0, 1, 3]) == [(False, "2")]
    losses.noticed(0, "0", 1.0)
    losses.left(1, [2])
    assert losses.to_tell([3]) == [(True, "2"), (True, "0")]


def test_who_leaves_tells_what_its_goodbye_knew_and_leaves_the_rest_to_others():
    losses = Losses(0)
    losses.noticed(2, "2", 0.0)
    losses.noticed(3, "3", 0.1)
    losses.left(0, [2])
    assert losses.to_tell([1, 4]) == [(True, "2"), (False, "3")]


def test_the_last_one_that_leaves_tells_all():
    losses = Losses(0)
    losses.noticed(1, "1", 0.0)
    losses.left(0, [])
    assert losses.to_tell([]) == [(True, "1")]
