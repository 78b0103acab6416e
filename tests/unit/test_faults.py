"""Partner states: every pair of state and event, and one message per news."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import TopologyError, WorldError
from hvd_adpsgd.faults import Event, PartnerState, PartnerTable, next_state

ALIVE, SUSPECT, LEFT, LOST = PartnerState
MISSED, ANSWERED, GOODBYE, FAILED = Event

# the whole law, row by row; None raises
LAW = {
    ALIVE: {MISSED: SUSPECT, ANSWERED: ALIVE, GOODBYE: LEFT, FAILED: LOST},
    SUSPECT: {MISSED: SUSPECT, ANSWERED: ALIVE, GOODBYE: LEFT, FAILED: LOST},
    LEFT: {MISSED: LEFT, ANSWERED: None, GOODBYE: LEFT, FAILED: LEFT},
    LOST: {MISSED: LOST, ANSWERED: None, GOODBYE: LOST, FAILED: LOST},
}


def tell(table, partner, event, **kwargs):
    method = {
        MISSED: table.missed_deadline,
        ANSWERED: table.answered,
        GOODBYE: table.said_goodbye,
        FAILED: table.failed,
    }[event]
    return method(partner, **kwargs)


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", PartnerState)
def test_law(state, event):
    expected = LAW[state][event]
    if expected is None:
        with pytest.raises(WorldError, match=f"answered although its state is {state.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event) is expected


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Event)), max_size=40))
def test_any_story(story):
    table, states, told = PartnerTable(3), [ALIVE] * 3, set()
    for partner, event in story:
        expected = LAW[states[partner]][event]
        if expected is None:
            with pytest.raises(WorldError):
                tell(table, partner, event)
            continue
        got = tell(table, partner, event)
        assert (got.partner, got.event) == (partner, event)
        assert (got.before, got.after) == (states[partner], expected)
        assert got.changed == (states[partner] is not expected)
        assert (got.message is not None) == (got.changed and (partner, expected) not in told)
        if got.message:
            told.add((partner, expected))
        states[partner] = expected
        assert [table.state(i) for i in range(3)] == states
    for state in PartnerState:
        assert table.among(state) == tuple(i for i in range(3) if states[i] is state)


def test_messages_say_who_when_and_what_now():
    table = PartnerTable(2, ["node01", "node07"])
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
        "super learner 1 (node07) is lost at step 9. Training goes on without it."
    )
    assert table.failed(1).message is None
    assert table.state(0) is ALIVE


def test_messages_without_names_and_of_a_goodbye():
    message = PartnerTable(4).said_goodbye(3).message
    assert message == "super learner 3 has left. Averaging goes on among the others."
    assert "\n" not in message


def test_sizes_and_ranks():
    assert len(PartnerTable(5)) == 5
    assert PartnerTable(5).among(ALIVE, SUSPECT) == (0, 1, 2, 3, 4)
    with pytest.raises(TopologyError):
        PartnerTable(0)
    for partner in (-1, 2):
        with pytest.raises(TopologyError):
            PartnerTable(2).state(partner)
        with pytest.raises(TopologyError):
            PartnerTable(2).failed(partner)
