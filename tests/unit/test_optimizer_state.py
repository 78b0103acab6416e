"""Values go into the groups, states and tensors that scripts hold, on plain torch optimizers."""

import copy
import gc
import types
from typing import Any

import pytest
import torch

from hvd_adpsgd.joining import join_state
from hvd_adpsgd.joining.join_state import JoinState, pack, unpack
from hvd_adpsgd.strategies.plan import Rounds
from hvd_adpsgd.training.optimizer_state import bind, keeping_held, load_in_place, reunite
from tests.schedulers import MAKE, of_torch, optimizers, trace


def test_every_scheduler_of_torch_is_tried() -> None:
    assert set(MAKE) == of_torch()


def used() -> Any:
    """An Adam that has made two steps, and what a script may hold of it."""
    optimizer = dict(optimizers())["Adam"]
    trace(optimizer, [], 0)
    trace(optimizer, [], 1)
    return optimizer


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for each in optimizer.state.values() for v in each.values()]
    return [*state, *(group["lr"] for group in optimizer.param_groups)]


def held(optimizer: torch.optim.Optimizer) -> list[object]:
    return [optimizer.param_groups, *optimizer.param_groups, optimizer.state]


def same(some: list[Any], others: list[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("how", ["in place", "joins"])
def test_a_load_in_place_fills_tensors_too(how: str) -> None:
    giver, taker = used(), used()
    trace(giver, [], 2)
    giver.param_groups[0]["lr"].fill_(7.0)
    objects, before = held(taker), tensors(taker)
    if how == "in place":
        load_in_place(taker, copy.deepcopy(giver.state_dict()))
    else:
        unpack(pack(JoinState([giver], b"", []))).give([taker])
    assert same(held(taker), objects)
    assert same(tensors(taker), before)
    assert [t.tolist() for t in tensors(taker)] == [t.tolist() for t in tensors(giver)]


def averaging(step: int, value: float) -> Any:
    """What a join needs of the averaging of an optimizer, with one tensor of the strategy's."""
    strategy = types.SimpleNamespace(spec=lambda: "periodic_averaging:period=5")
    held = torch.tensor([value])
    return types.SimpleNamespace(
        step=step,
        pauses=0,
        holds_mean=0,
        restart=False,
        rule=types.SimpleNamespace(
            own=False,
            received=False,
            in_update=False,
            reload=lambda: None,
            moments=list,
            tensors=lambda: {"momentum": [held]},
        ),
        plan=types.SimpleNamespace(in_step=Rounds(), width=0),
        spec=types.SimpleNamespace(strategy=strategy),
        world=types.SimpleNamespace(super_rank=0, super_size=2),
    )


def test_a_join_gives_the_averaging_too_and_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Exchanges owe nothing to what a joining super learner has trained before: its engine is new."""
    monkeypatch.setattr(join_state, "live", lambda: [averaging(step=9, value=2.0)])
    gift = pack(JoinState([used()], b"", [[]]))
    taker = averaging(step=3, value=0.0)
    monkeypatch.setattr(join_state, "live", lambda: [taker])
    unpack(gift).give([used()])
    assert (taker.step, taker.restart) == (9, False)
    assert taker.rule.tensors()["momentum"][0].tolist() == [2.0]
    assert not caplog.records


def test_what_does_not_fit_is_replaced_and_what_is_gone_removed() -> None:
    giver, taker = used(), used()
    for state in giver.state.values():
        state["exp_avg"] = torch.zeros(5)
        del state["exp_avg_sq"]
        state["more"] = [1, 2]
    load_in_place(taker, giver.state_dict())
    for state in taker.state.values():
        assert sorted(state) == ["exp_avg", "more", "step"]
        assert state["exp_avg"].shape == (5,)
    giver.state.clear()
    load_in_place(taker, giver.state_dict())
    assert not taker.state


def test_a_state_dict_taken_before_a_load_keeps_its_values() -> None:
    """As in torch: one may load another state, and then the first one again."""
    optimizer = used()
    objects, first = held(optimizer), optimizer.state_dict()
    values = [t.tolist() for t in tensors(optimizer)]
    other = used()
    trace(other, [], 2)
    with keeping_held(optimizer):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert [t.tolist() for t in tensors(optimizer)] == [t.tolist() for t in tensors(other)]
    with keeping_held(optimizer):
        optimizer.load_state_dict(first)
    assert [t.tolist() for t in tensors(optimizer)] == values
    assert same(held(optimizer), objects)


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "wrapped"])
def test_groups_and_a_state_that_a_script_sets_are_shared_again(which: int) -> None:
    """The plain optimizer's schedulers act on them."""
    plain, wrapped = used(), used()
    wrapped.param_groups, wrapped.state = plain.param_groups, plain.state
    bind(plain, wrapped, lambda its: False)
    shared = plain.param_groups, plain.state
    given = [{**plain.param_groups[0], "lr": 7.0}]
    parameter = torch.nn.Parameter(torch.ones(1))
    one = (plain, wrapped)[which]
    one.param_groups, one.state = given, {parameter: {"step": 1}}
    reunite(wrapped)
    assert wrapped.param_groups is plain.param_groups is shared[0]
    assert wrapped.state is plain.state is shared[1]
    assert plain.param_groups[0] is given[0] and list(plain.state) == [parameter]


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_wrapped_optimizer_that_is_dropped_unused_is_told_once(
    has_stepped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`hvd.DistributedOptimizer(optimizer)` without `optimizer =`; after a step that is no mistake."""
    model = torch.nn.Linear(2, 1)
    plain, wrapped = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    bind(plain, wrapped, lambda its: True)
    if has_stepped:
        vars(wrapped)["_optimizer_step_post_hooks"] = plain._optimizer_step_post_hooks
        wrapped.step()
    del wrapped
    gc.collect()
    for _ in range(2):
        plain.step()
    said = [record for record in caplog.records if "averages nothing" in record.message]
    assert len(said) == (0 if has_stepped else 1)
