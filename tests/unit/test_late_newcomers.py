"""Joining super learners that were offered a super_rank which another one has taken since."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import LaunchError
from hvd_adpsgd.joining import admission, join_state, joining
from hvd_adpsgd.joining.candidates import JoiningSuperLearner, JoinRequest, JoinServer, _difference
from hvd_adpsgd.joining.reconnect import RECONNECT_S
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import MOST_SUPER_LEARNERS
from hvd_adpsgd.training.parameters import Parameters


@pytest.mark.parametrize(
    ("number", "instead_of", "stays"),
    [
        (2, None, True),  # the next super_rank: nobody has it
        (1, None, False),  # another one came first
        (1, 1, False),  # so it did in place of a failed one
        (0, 0, True),  # super learner 0 is lost, and waits for this one
        (0, None, False),  # another one had 0, and is lost: its host is not that of this one
    ],
)
def test_who_comes_too_late_is_dismissed_and_counts_as_no_failure(
    number: int, instead_of: int | None, stays: bool
) -> None:
    here, one = JoinServer(), JoiningSuperLearner(number, 0.0)
    one.request = JoinRequest((), instead_of)
    here.candidates.append(one)
    world = SimpleNamespace(groups=((0,), (1,)), collectives=SimpleNamespace(ranks=(1,)))
    admission._dismiss_late(here, cast(Any, world))
    assert (one in here.candidates) is stays
    assert here.failures == {}


class _Hears:
    """A conversation that remembers what it sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def received(self) -> list[Any]:
        return []

    def send(self, value: Any) -> None:
        self.sent.append(value)

    def close(self) -> None:
        self.sent.append("closed")


@pytest.mark.parametrize("alone", [False, True], ids=["all meet", "without a meeting"])
def test_one_more_than_a_job_can_have_is_refused(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has a number: no learner has memory for what it would note about this one."""
    here, one, hears = JoinServer(), JoiningSuperLearner(None, 0.0), _Hears()
    one.enters(cast(Any, hears), JoinRequest((), None))
    here.candidates.append(one)
    monkeypatch.setattr(admission, "MOST_SUPER_LEARNERS", 2)
    world = cast(
        Any,
        SimpleNamespace(
            rank=0,
            groups=((0,), (1,)),
            collectives=SimpleNamespace(ranks=(0, 1)),
            living=lambda: {0, 1},
        ),
    )
    if alone:
        admission._offer_alone(here, world, [], 1.0)
    else:
        asks = [admission._Coming(None, "requesting", one.request, 0)]
        assert admission._give_number(here, world, [], [], asks, set(), 1.0) == {}, (
            "on another learner"
        )
        assert admission._give_number(here, world, [], [one], asks, set(), 1.0) == {}
    error, closed = hears.sent
    assert closed == "closed" and isinstance(error, LaunchError)
    assert "had 2 super learners, the most is 2" in str(error)
    assert here.candidates == []


def test_all_that_a_job_can_have_are_noted() -> None:
    """What the learners of a super learner share has a byte for each, on those that join late as well."""
    communicator = SimpleNamespace(Get_size=lambda: 1)
    left = worlds._flags(communicator, plain=False)[2]
    assert left.size == MOST_SUPER_LEARNERS


def test_a_joining_super_learner_waits_as_long_as_members_may_vote() -> None:
    """They wait for a learner that has stopped until it has failed; then they would switch to a ghost."""
    patience: list[float] = []

    class Late(_Hears):
        def receive(self, seconds: float) -> bool:
            patience.append(seconds)
            return True

    one = joining.JoiningLearner.__new__(joining.JoiningLearner)
    one.conversation = cast(Any, Late())
    world = SimpleNamespace(
        config=Config(failure_timeout_s=300.0),
        collectives=SimpleNamespace(gather=lambda doing, said: [None, said]),
    )
    assert one.verdict(cast(Any, world)) is True
    assert patience[0] > RECONNECT_S + 300.0


@pytest.mark.parametrize(
    ("sizes", "given", "difference"),
    [
        ((4,), 1, ""),
        ((2, 2), 1, "it averages 2 parameters in param_group 0, the others 2 as parameter 2 of par"),
        ((4, 0), 1, "it averages 0 parameters in param_group 1, the others 0 float32[1]"),
        ((4,), 2, "it averages 2 optimizer(s) given to hvd.admit, the others 1 optimizer(s)"),
    ],
)  # fmt: skip
def test_states_that_would_not_load_are_told_before_a_join(
    sizes: tuple[int, ...], given: int, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's state goes by the place of each parameter in its param_groups, frozen ones too."""
    tensors = [torch.nn.Parameter(torch.zeros(1), requires_grad=i < 3) for i in range(4)]

    def terms(sizes: tuple[int, ...], given: int) -> list[str]:
        left = iter(tensors)
        groups: Any = [{"params": list(itertools.islice(left, n))} for n in sizes]
        named = [(str(i), t) for i, t in enumerate(tensors) if t.requires_grad]
        strategy = SimpleNamespace(spec=lambda: "random_pairs")
        spec = SimpleNamespace(strategy=strategy, arguments=[], trained=named, named=named)
        averaging = SimpleNamespace(
            spec=spec,
            tensors=SimpleNamespace(specs=[[]], shards=1, parameters=Parameters()),
            optimizer=lambda: SimpleNamespace(param_groups=groups),
        )
        monkeypatch.setattr(join_state, "live", lambda: [averaging])
        return join_state.terms([cast(Any, None)] * given)

    found = _difference(terms(sizes, given), terms((4,), 1))
    assert found.startswith(difference) and bool(found) is bool(difference)
