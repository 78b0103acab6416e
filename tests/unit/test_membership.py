"""Who lives: which news change what, and who warns of a failure."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.joining import callbacks
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.lifecycle.shutdown import Teardown
from hvd_adpsgd.torch import basics

ALIVE, SUSPECT, LEFT, FAILED = PeerState


def made(own: int = 0, n: int = 4, k: int = 1) -> Membership:
    groups = [tuple(range(i * k, i * k + k)) for i in range(n)]
    return Membership(groups, [f"node{i}" for i in range(n)], own)


@pytest.fixture
def lines(caplog):
    """Messages, once for each call: (whether as a warning, the line)."""
    caplog.set_level(logging.INFO, logger="hvd_adpsgd")

    def taken():
        records = [(r.levelno == logging.WARNING, r.getMessage()) for r in caplog.records]
        caplog.clear()
        return records

    return taken


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(PeerState)), max_size=40))
def test_the_last_news_counts_but_after_a_failure(story):
    membership, states = made(n=3), [ALIVE] * 3
    for peer, state in story:
        membership.update([(peer, state)])
        states[peer] = FAILED if states[peer] is FAILED else state
        assert membership.states == states
    assert membership.failed_ranks() == tuple(i for i in range(3) if states[i] is FAILED)


def test_each_change_is_told_once_with_who_and_when(lines):
    membership = made()
    for states, step, told in (
        ([(1, SUSPECT)], 1842, ["super learner 1 (node1) is silent at step 1842 of super learner 0."]),
        ([(1, ALIVE)], None, ["super learner 1 (node1) answers again."]),
        ([(1, SUSPECT), (1, ALIVE)], None, []),
        ([(1, FAILED), (2, LEFT)], 9, ["super learner 1 (node1) has failed at step 9",
                                       "super learner 2 (node2) has left at step 9"]),
        ([(1, FAILED), (1, ALIVE)], 10, []),
    ):  # fmt: skip
        for one in states:
            membership.update([one], step)
        found = lines()
        assert len(found) == len(told)
        for (warns, line), start in zip(found, told, strict=True):
            assert line.startswith(start) and warns == ("failed" in start)


def test_an_engine_tells_of_a_failure_that_is_known(lines):
    membership = made()
    membership.fail([2])
    assert membership.failed_ranks() == (2,)
    assert lines() == []
    membership.update([(2, FAILED)])
    assert len(lines()) == 1


def test_the_first_that_lives_warns_and_the_others_inform(lines):
    for own, warns in ((0, True), (1, False), (3, False)):
        made(own).update([(2, FAILED)])
        assert [warning for warning, _ in lines()] == [warns]


@pytest.mark.parametrize("gone", [LEFT, FAILED])
def test_the_next_warns_without_those_before_it(lines, gone):
    membership = made(own=2)
    membership.update([(0, gone), (3, FAILED), (1, gone)])
    told = {line.split()[2] for warning, line in lines() if warning}
    assert told == ({"3"} if gone is LEFT else {"0", "1", "3"})


def test_who_warns_no_longer_may_not_have_warned(lines, monkeypatch):
    """0 failed soon after 3, maybe before it had told of that; long after, it had."""
    for later, told in ((1.0, ["0", "3"]), (60.0, ["0"])):
        now = [100.0]
        monkeypatch.setattr("time.monotonic", lambda now=now: now[0])
        membership = made(own=1)
        membership.update([(3, FAILED)])
        assert [warning for warning, _ in lines()] == [False]
        now[0] += later
        membership.update([(0, FAILED)])
        assert [line.split()[2] for warning, line in lines() if warning] == told


def test_a_learner_that_ends_takes_its_super_learner_along_unless_that_has_left():
    membership = made(n=3, k=2)
    membership.update([(1, LEFT)])
    assert membership.failed_ranks(ended={3, 5}) == (4, 5)
    assert membership.failed_ranks() == (), "what MPI says is not kept"
    membership.note_local_exits({5})
    assert not membership.own_failed
    membership.note_local_exits({1})
    assert membership.own_failed
    assert membership.failed_ranks() == (0, 1)


def test_a_replaced_one_lives_and_may_fail_again(lines):
    membership = made()
    membership.update([(1, FAILED), (2, FAILED)])
    lines()
    membership.use({0, 1, 3})
    assert membership.states == [ALIVE, ALIVE, FAILED, ALIVE]
    membership.update([(1, FAILED)])
    assert [warning for warning, _ in lines()] == [True]


def test_who_left_an_engine_that_is_stopped_may_be_there_still():
    membership = made()
    membership.update([(1, LEFT), (2, FAILED)])
    membership.rejoin()
    assert membership.states == [ALIVE, ALIVE, FAILED, ALIVE]


@pytest.mark.parametrize("runs", [False, True])
def test_who_says_that_it_fails_has_failed_also_if_its_engine_left_in_order(lines, runs: bool):
    """An engine that runs reports it itself, with the step."""
    membership = made(k=2)
    membership.sources += [lambda: ()] * runs
    membership.update([(1, LEFT), (2, SUSPECT)])
    membership.note_failing([3, 4])
    assert membership.states == [ALIVE, FAILED, SUSPECT if runs else FAILED, ALIVE]
    membership.rejoin()
    assert membership.failed_ranks() == ((2, 3) if runs else (2, 3, 4, 5))


def test_the_end_of_a_process_that_has_left_in_order_is_no_failure(lines):
    """Not that of a super learner which has left an engine alone."""
    membership = made(k=2)
    membership.update([(1, LEFT)])
    membership.note_left([4, 5, 6])
    lines()
    membership.update([(1, FAILED), (2, FAILED), (3, FAILED)])
    assert membership.states == [ALIVE, FAILED, LEFT, FAILED]
    assert [line.split()[2:6] for _, line in lines()] == [
        ["1", "(node1)", "has", "failed."],
        ["2", "(node2)", "has", "left."],
        ["3", "(node3)", "has", "failed."],
    ]
    membership.rejoin()
    assert membership.states[2] is LEFT and membership.failed_ranks(ended={4, 5}) == (2, 3, 6, 7)
    membership.use({0, 1, 2, 3})
    membership.update([(2, FAILED)])
    assert membership.states[2] is FAILED, "a replacement"


def test_the_learners_of_a_super_learner_share_who_has_left():
    """Only the leader is told by the engine; another learner knows whose processes have ended."""
    groups, names = [(0, 1), (2, 3), (4, 5)], ["a", "b", "c"]
    left = np.zeros(3, dtype=np.uint8)
    leader, mate = (Membership(groups, names, 0, left) for _ in range(2))
    leader.update([(1, LEFT)])
    for membership in (leader, mate):
        assert membership.failed_ranks(ended={2, 3}) == ()
        assert membership.failed_ranks(ended={3, 4}) == (4, 5)
        assert membership.have_left([2, 3])
        assert not membership.have_left([2, 4])
    leader.rejoin()
    assert mate.failed_ranks(ended={2, 3}) == (2, 3)


def test_sources_are_asked():
    membership = made()
    membership.sources.append(lambda: [(2, LEFT)])
    membership.poll_sources()
    assert membership.have_left([2])


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_that_one_learner_has_found_stays(first: int) -> None:
    """Of a sharded model each learner's engine has a peer of its own: one was killed, the other left."""
    groups, left = [(0, 1), (2, 3)], np.zeros(2, dtype=np.uint8)
    mates = [Membership(groups, ["a", "b"], 0, left) for _ in range(2)]
    for i in (first, 1 - first):
        mates[i].update([(1, (LEFT, FAILED)[i])])
    assert [mate.failed_ranks({2, 3}) for mate in mates] == [(2, 3), (2, 3)]
    assert not mates[0].have_left([2, 3])


def test_a_learner_that_does_not_lead_warns_of_nothing(lines) -> None:
    membership = made(n=2, k=2)
    membership.is_leader = False
    membership.update([(1, FAILED)])
    assert [warns for warns, _ in lines()] == [False]


def test_callbacks_are_forgotten_in_shutdown_also_without_a_call_of_admit(monkeypatch) -> None:
    """Otherwise those of a job would be called in the next one of the same process, with its ranks."""
    world = SimpleNamespace(teardown=Teardown(None, made(), (0,), np.zeros(1)), config=Config())
    monkeypatch.setattr(worlds, "_current", None)
    monkeypatch.setattr(basics.joining, "is_joining", lambda config: False)
    monkeypatch.setattr(basics.bootstrap, "init", lambda *args, **options: worlds.put(world))
    for module, name in (
        ("candidates", "open_listener"),
        ("candidates", "notify_launcher"),
        ("watching", "start"),
    ):
        monkeypatch.setattr(getattr(basics, module), name, lambda world: None)
    basics.init()
    callbacks.on_membership_change(lambda ranks: None)
    assert callbacks.are_registered()
    assert not list(world.teardown.run_stops())
    assert not callbacks.are_registered()
