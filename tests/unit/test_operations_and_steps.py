"""Between operations over all learners: steps that peers wait for, and peers that leave."""

import threading

import numpy as np
import pytest

from hvd_adpsgd.collectives import collectives as module
from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.errors import CollectiveMismatchError
from hvd_adpsgd.lifecycle.membership import Membership
from tests.silent_network import ABANDON, LEAVES, WAITS, SilentNetwork

ME = 0
OF = (0, "sets")  # the optimizer, and what is counted
CALLER = ("barrier", "train.py", 31)


@pytest.fixture
def network():
    return SilentNetwork()


@pytest.fixture
def collectives(network, monkeypatch):
    """Of one optimizer, whose thread is this one, and which has made five steps."""
    monkeypatch.setattr(module, "_TOGETHER_S", 0.0)
    groups = [(0,), (1,), (2,)]
    made = Collectives(
        None, network, ME, (0, 1, 2), 3, Membership(groups, ["a", "b", "c"], 0), "continue", False
    )
    made.steps.append(count)
    return made


def count():
    return module.Made(OF, threading.get_ident(), 5)


@pytest.mark.parametrize("made", [0, 4])
def test_a_peer_in_an_operation_without_the_step_that_is_awaited_is_an_error_of_all(
    collectives, network, made
):
    network.arrives_pickled(1, WAITS, (CALLER, {OF: made}))
    text = (
        rf"learner 1 is in barrier at train.py:31 after {made} steps, "
        "and learner 0 waits for step 5 of learner 1"
    )
    for _ in range(2):  # where the script tries again
        with pytest.raises(CollectiveMismatchError, match=text):
            collectives.require_step(OF, 4, [1])
    left = network.sent_on(ABANDON)
    assert [place for place, _ in left] == [1, 2], "once"
    assert {reason[0] for _, reason in left} == {"CollectiveMismatchError"}
    assert collectives.messages.agreement.voted


@pytest.mark.parametrize(
    ("place", "number", "made", "why"),
    [
        (1, 0, {OF: 5}, "it has made that step, and its round may still run"),
        (1, 0, {}, "another thread is in the operation, and the step may still come"),
        (1, 1, {OF: 3}, "this learner may be in the operation before that one"),
        (2, 0, {OF: 3}, "nothing of it is awaited"),
        (1, 0, {(1, "sets"): 3}, "it waits with another optimizer"),
    ],
)
def test_other_waits_are_none_of_its_business(collectives, network, place, number, made, why):
    network.arrives_pickled(place, WAITS, (CALLER, made), number)
    collectives.require_step(OF, 4, [1])
    assert network.sent == [], why


def test_an_operation_that_another_thread_of_this_learner_has_entered_is_none(collectives, network):
    network.arrives_pickled(1, WAITS, (CALLER, {OF: 3}))
    number = collectives.lock.take()
    collectives.require_step(OF, 4, [1])
    collectives.lock.leave(number)
    assert network.sent == []


def test_a_step_that_waits_for_one_that_was_given_up_is_given_up_too(collectives, network):
    reason = ("CollectiveMismatchError", "learner 2 waits", 1)
    network.arrives_pickled(1, ABANDON, reason)
    collectives.require_step(OF, 4, [2])
    with pytest.raises(CollectiveMismatchError, match="learner 2 waits"):
        collectives.require_step(OF, 4, [1, 2])


@pytest.mark.parametrize("is_step", [True, False])
def test_what_peers_learn_of_an_operation_that_lasts(collectives, network, monkeypatch, is_step):
    """Nothing, where another thread makes the steps."""
    collectives.steps[:] = [lambda: module.Made(OF, threading.get_ident() if is_step else 0, 5)]
    collectives._caller = module.Caller(*CALLER)
    with collectives.blocking():
        for _ in range(2):
            collectives.messages.look_around()
    expected = [(place, (CALLER, {OF: 5})) for place in (1, 2)] if is_step else []
    assert network.sent_on(WAITS) == expected and len(network.sent) == len(expected)


def test_a_step_of_a_mate_ends_an_operation_without_the_decision_of_all(collectives, network):
    """Learners that train on may come to the operation much later."""
    network.arrives_pickled(1, ABANDON, ("CollectiveMismatchError", "learner 1 waits", 1))
    with pytest.raises(CollectiveMismatchError, match="learner 1 waits"):
        collectives.run("barrier", lambda attempt: attempt.barrier())
    assert collectives.messages.agreement.voted


def test_who_may_not_go_on_leaves_the_operation_that_it_waits_in(collectives, network):
    """Another thread finds why; the others continue, as this learner counts as failed."""
    reason = CollectiveMismatchError("no step ends")
    network.look_for_failures = lambda: collectives.leave(reason)
    for _ in range(2):
        with pytest.raises(CollectiveMismatchError, match="barrier: no step ends"):
            collectives.run("barrier", lambda attempt: attempt.barrier())
    left = [
        (to, np.frombuffer(data, np.int32).tolist())
        for to, on, data in network.sent
        if on == LEAVES
    ]
    assert left == [(1, [1, ME]), (2, [1, ME])], "once"


def test_who_leaves_is_known_before_the_next_operation(collectives, network):
    """Also of learners that one says it of, but not while a thread is in an operation, which notes it."""
    membership = collectives._membership
    network.arrives(2, LEAVES, np.array([0, 1, 2], dtype=np.int32).tobytes())
    number = collectives.lock.take()
    collectives.poll_departures()
    assert membership.states == [PeerState.ALIVE] * 3
    collectives.lock.leave(number)
    collectives.poll_departures()
    assert membership.states == [PeerState.ALIVE, PeerState.LEFT, PeerState.LEFT]
    membership.update([(1, PeerState.FAILED)])
    assert membership.failed_ranks(ended={1, 2}) == ()


def test_who_leaves_because_of_a_failure_has_failed(collectives, network):
    """Operations continue without it, and it counts as failed, also on learners that no engine tells."""
    network.arrives(2, LEAVES, np.array([1, 1, 2], dtype=np.int32).tobytes())
    collectives.poll_departures()
    assert collectives.messages.failed == {1, 2}
    assert collectives._membership.states == [PeerState.ALIVE] + 2 * [PeerState.FAILED]
    assert collectives._membership.failed_ranks() == (1, 2)


def test_a_super_learner_says_of_all_its_learners_that_they_leave(
    collectives, network, monkeypatch
):
    monkeypatch.setattr(module, "_PUSHES", 0)
    collectives.announce_departure([0, 1])
    assert network.sent == [(2, LEAVES, np.array([0, 0, 1], dtype=np.int32).tobytes())]
