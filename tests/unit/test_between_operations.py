"""Between two operations over all learners: who has ended in order, and who waits in an operation."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.lifecycle.membership import Membership
from hvd_adpsgd.messaging.messages import FIRST_PHASE
from tests.silent_network import BETWEEN, LEAVES, WAITS, SilentNetwork

FAILS, FINISHES = 1, 2  # _FAILS, _FINISHES of messaging/messages


@pytest.fixture
def network() -> SilentNetwork:
    return SilentNetwork()


@pytest.fixture
def collectives(network: SilentNetwork) -> Collectives:
    groups = [(0,), (1,), (2,)]
    membership = Membership(groups, ["a", "b", "c"], 0)
    return Collectives(None, network, 0, (0, 1, 2), 3, membership, "continue", False)


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
