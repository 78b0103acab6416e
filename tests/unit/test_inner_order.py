"""In which order operations of a super learner run over torch.distributed: the pure state, by properties."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.inner.over_torch.requests import JOIN, Decision, Order, Request

SIZES = st.integers(1, 5)


def request(name: str, same: object = 0, kind: str = "allreduce", own: object = None) -> Request:
    return Request(name, kind, same, own)


@given(st.data())
def test_each_runs_once_when_all_have_announced_it_in_whatever_order(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    names = [f"gradient {i}" for i in range(data.draw(st.integers(1, 6)))]
    orders = [data.draw(st.permutations(names)) for _ in range(size)]
    announcements = [(rank, name) for rank, order in enumerate(orders) for name in order]
    order, seen, run = Order(range(size)), dict.fromkeys(names, 0), []
    for rank, name in data.draw(st.permutations(announcements)):
        order.ask(rank, request(name, own=rank))
        seen[name] += 1
        for decision in order.decide():
            assert seen[decision.request.name] == size, "begun before all have announced it"
            assert decision.own == list(range(size)), "each learner's own part, by rank"
            assert decision.error == ""
            run.append(decision.request.name)
    assert sorted(run) == sorted(names)
    assert order.waiting() == []


@pytest.mark.parametrize(
    "other", [request("a", same=[1]), request("a", kind="broadcast"), request("a", same=None)]
)
def test_different_calls_are_an_error_that_shows_both(other: Request) -> None:
    order = Order([4, 5])  # a user knows the ranks in the job
    order.ask(0, request("a", same=[0, "float32"]))
    order.ask(1, other)
    (decision,) = order.decide()
    assert "learner 4 calls allreduce(0, float32)" in decision.error
    assert f"learner 5 calls {other.kind}(" in decision.error


def test_who_has_joined_counts_as_having_announced_reductions() -> None:
    order = Order(range(3))
    order.ask(2, request(JOIN, kind=JOIN))
    order.ask(0, request("a", own="x"))
    assert order.decide() == []
    order.ask(1, request("a", own="y"))
    (decision,) = order.decide()
    assert decision == Decision(request("a", own="x"), ["x", "y", None])
    order.ask(0, request(JOIN, kind=JOIN))
    order.ask(1, request(JOIN, kind=JOIN))
    (end,) = order.decide()
    assert (end.request.kind, end.request.same) == (JOIN, 1), "who called it last"
    order.ask(0, request("b"))
    assert order.decide() == [], "nobody is in join() any more"


@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall", "reducescatter"])
def test_nothing_but_reductions_runs_while_a_learner_is_in_join(kind: str) -> None:
    order = Order([4, 5])
    order.ask(1, request(JOIN, kind=JOIN))
    order.ask(0, request("a", kind=kind))
    (decision,) = order.decide()
    assert "join()" in decision.error
    assert "learner 5" in decision.error


def test_decisions_keep_the_order_of_the_first_announcements() -> None:
    order = Order(range(2))
    names = [f"{i}" for i in range(9)]
    for name in names:
        order.ask(0, request(name))
    for name in reversed(names):
        order.ask(1, request(name))
    run = [int(decision.request.name) for decision in order.decide()]
    assert all(a < b for a, b in pairwise(run))
