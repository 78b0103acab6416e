"""Between operations over all learners: steps that peers wait for, peers that leave, and that have ended."""

import pickle
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_adpsgd.collectives import collectives as module
from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.errors import CollectiveMismatchError
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.messaging.messages import FIRST_PHASE
from tests.silent_network import ABANDON, BETWEEN, LEAVES, WAITS, SilentNetwork

ME = 0
OF = (0, "sets")  # the optimizer, and what is counted
CALLER = ("barrier", "train.py", 31)
FAILS, FINISHES = 1, 2  # _FAILS, _FINISHES of messaging/messages


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


def nobody(living: set[int], heard: object) -> tuple[bool, list[tuple[int, object]]]:
    return False, []


def leaves(network: SilentNetwork, place: int, how: int) -> None:
    network.arrives(place, LEAVES, np.array([how, place], dtype=np.int32).tobytes())


def test_who_has_ended_its_script_stays_so_when_a_super_learner_has_joined(
    network: SilentNetwork, collectives: Collectives
) -> None:
    """The connections that include the new one know nothing of the old ones' messages."""
    leaves(network, 1, FINISHES)
    leaves(network, 2, FAILS)
    assert not collectives.confer("admit", nobody)
    assert collectives.finished() == {1}
    collectives.use(None, SilentNetwork(2), (0, 3), 4)
    assert collectives.finished() == {1}
    collectives.note_finished({2})  # others know more
    assert collectives.finished() == {1, 2}


def test_one_that_closed_its_optimizer_and_then_failed_has_failed(
    network: SilentNetwork, collectives: Collectives
) -> None:
    """As where a framework closes it: the engine left in order, the script ended by an exception."""
    membership = collectives._membership
    membership.update([(1, PeerState.LEFT), (2, PeerState.LEFT)])
    leaves(network, 1, FINISHES)
    leaves(network, 2, FAILS)
    assert collectives.left() == {1}
    membership.rejoin()
    assert membership.failed_ranks() == (2,)


def test_a_learner_that_has_joined_in_the_place_of_an_ended_one_has_not_ended(
    network: SilentNetwork, collectives: Collectives
) -> None:
    leaves(network, 1, FINISHES)
    collectives.confer("admit", nobody)
    collectives.use(None, SilentNetwork(3), (0, 1, 2))
    assert collectives.finished() == set()


@pytest.mark.parametrize(("operation", "begins"), [("admit", True), ("averaged", False)])
def test_an_operation_begins_where_another_learner_waits_in_it(
    network: SilentNetwork, collectives: Collectives, operation: str, begins: bool
) -> None:
    network.arrives_pickled(1, WAITS, ((operation, "train.py", 3), {}))
    assert collectives.confer("admit", nobody) is begins


@pytest.mark.parametrize("how", ["waits", "has begun"])
def test_one_that_has_ended_in_an_operation_waits_for_nobody(
    network: SilentNetwork, collectives: Collectives, how: str
) -> None:
    """Else all would leave the meeting that replaces it, for an operation that they never call."""
    if how == "waits":
        network.arrives_pickled(1, WAITS, (("averaged", "train.py", 7), {}))
    else:
        network.arrives(1, FIRST_PHASE, b"its call")
    collectives.confer("admit", nobody)
    assert collectives.is_awaited
    leaves(network, 1, FAILS)
    collectives.confer("admit", nobody)
    assert not collectives.is_awaited


def test_topics_have_messages_of_their_own(
    network: SilentNetwork, collectives: Collectives
) -> None:
    """What a topic sends comes to the same topic, between operations and while this learner waits in one."""
    heard: list[tuple[set[int], list[tuple[int, object]]]] = []

    def talk(living: set[int], messages: list[tuple[int, object]]) -> list[tuple[int, object]]:
        heard.append((living, messages))
        return [(2, "answer")] if messages else []

    collectives.topics.by_name["data"] = SimpleNamespace(talk=talk)
    network.arrives_pickled(1, BETWEEN, ("data", "question"))
    network.arrives_pickled(1, BETWEEN, ("admit", "other"))
    collectives.serve()
    assert heard == [({0, 1, 2}, [(1, "question")])]
    assert [
        (place, pickle.loads(data)) for place, channel, data in network.sent if channel == BETWEEN
    ] == [(2, ("data", "answer"))]
    leaves(network, 2, FAILS)
    network.arrives_pickled(1, BETWEEN, ("data", "more"))
    with collectives.lock.turn():  # an operation runs: it serves itself while it waits
        collectives.serve()
        assert len(heard) == 1
        collectives.messages.poll()
        collectives.messages.look_around()
    assert heard[1:] == [({0, 1}, [(1, "more")])]
    assert collectives.messages.heard_between("admit") == [(1, "other")]
