"""Momentum of optimizers that is averaged, without a second moment."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hvd_adpsgd.engine.shard_memory import Arrivals
from hvd_adpsgd.errors import ModelMismatchError
from hvd_adpsgd.training import shared_moments
from hvd_adpsgd.training.shared_moments import share, shareable
from hvd_adpsgd.training.shared_momentum import Momentum, SharedMomentum


class Lion(torch.optim.Optimizer):
    """As of a script; its second group has no momentum, its third two tensors of it."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1, "keys": ("m",)})

    def momentum_keys(self, group: dict[str, Any]) -> Sequence[str]:
        return group["keys"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                for key in group["keys"]:
                    m = self.state[p].setdefault(key, torch.zeros_like(p))
                    self.state[p][key] = m.lerp(p.grad, 0.1)  # another tensor in each step
                    self.state[p]["norms"] = torch.ones(1)  # of another shape than the parameter
                p -= group["lr"] * p.grad.sign()


def ones(size: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size))


def shared() -> tuple[list[torch.nn.Parameter], Lion, SharedMomentum]:
    parameters = [ones(2), ones(3), ones(4)]
    keys = ("m",), (), ("m", "slow")
    optimizer = Lion([{"params": [p], "keys": k} for p, k in zip(parameters, keys, strict=True)])
    kind = shareable(optimizer)
    assert isinstance(kind, Momentum)
    named = list(zip("abc", parameters, strict=True))
    return parameters, optimizer, SharedMomentum(named, lambda: optimizer, kind)


def step(optimizer: Lion, rule: SharedMomentum) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    rule.pass_time(0)


def moments(rule: SharedMomentum) -> dict[str, torch.Tensor]:
    return dict(rule.averaged()[len(rule.model) :])


def test_what_is_averaged_is_the_optimizers_state() -> None:
    (a, _, c), optimizer, rule = shared()
    step(optimizer, rule)
    averaged = moments(rule)
    assert list(averaged) == ["moment.m.a", "moment.m.c", "moment.slow.c"]
    assert optimizer.state[a]["m"] is averaged["moment.m.a"]
    torch.testing.assert_close(averaged["moment.slow.c"], torch.full((4,), 0.2))
    averaged["moment.m.c"].add_(1)  # an exchange
    step(optimizer, rule)
    torch.testing.assert_close(optimizer.state[c]["m"], torch.full((4,), 0.9 * 1.2 + 0.2))


def test_states_that_are_loaded_emptied_and_received() -> None:
    (a, *_), optimizer, rule = shared()
    step(optimizer, rule)
    state = copy.deepcopy(optimizer.state_dict())
    step(optimizer, rule)
    optimizer.load_state_dict(state)
    rule.reload()
    torch.testing.assert_close(moments(rule)["moment.m.a"], torch.full((2,), 0.2))
    optimizer.state.clear()
    rule.pass_time(0)
    assert not moments(rule)["moment.m.a"].any()
    moments(rule)["moment.m.a"].fill_(5)
    rule.received = True  # by a newcomer: its own state does not count
    optimizer.load_state_dict(state)
    rule.reload()
    assert optimizer.state[a]["m"].tolist() == [5, 5]
    state["state"][0]["m"] = torch.ones(1)
    optimizer.load_state_dict(state)
    with pytest.raises(ModelMismatchError, match=r"m of 'a' has the shape \[1\], .* \[2\]"):
        rule.reload()


def test_a_group_is_added() -> None:
    _, optimizer, rule = shared()
    added = ones(5)
    optimizer.add_param_group({"params": [added]})
    assert [name for name, _ in rule.extend([("d", added)])] == ["d", "moment.m.d"]
    step(optimizer, rule)
    assert optimizer.state[added]["m"] is moments(rule)["moment.m.d"]


def test_which_optimizers_have_momentum() -> None:
    matrix = [torch.nn.Parameter(torch.ones(2, 2))]
    assert isinstance(shareable(torch.optim.Muon(matrix)), Momentum)
    half = [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))]
    assert "Muon keeps moments in 16 bits" in str(shareable(torch.optim.Muon(half)))
    adams: Any = type("Adams", (Lion,), {"second_moment_key": lambda self, group: "v"})
    assert "Adams names a second moment in a group without betas" in str(shareable(adams(matrix)))
    assert shared_moments._l2(adams(matrix), {"weight_decay": 0.5}) == 0.0
    none = Lion([{"params": matrix, "keys": ()}])
    assert "Lion names none in momentum_keys(group)" in str(shareable(none))


class Beside(torch.optim.AdamW):
    """Updates its first group by Adam's law, its second by momentum, as Muon with AdamW for vectors does."""

    def momentum_keys(self, group: dict[str, Any]) -> Sequence[str]:
        return ["m" if group.get("plain") else "exp_avg"]

    def second_moment_key(self, group: dict[str, Any]) -> str | None:
        return None if group.get("plain") else "exp_avg_sq"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[1]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p -= m.add_(p.grad)
            p.grad = None
        super().step(closure)


def test_a_second_moment_beside_momentum_is_corrected_as_adams() -> None:
    """As if its parameters had an optimizer of their own."""

    def made(kind: type, *groups: Any) -> tuple[Any, Any]:
        optimizer = kind([dict(group) for group in groups], lr=0.1)
        found = shareable(optimizer)
        assert not isinstance(found, str)
        names = zip("ab", (p for g in optimizer.param_groups for p in g["params"]), strict=False)
        asked = (lambda: optimizer), (lambda: 0.5), (lambda: 4), (lambda: Arrivals(1, 1.0))
        rule = share(found, list(names), *asked)
        rule.start()
        return optimizer, rule

    a, b, alone = ones(3), ones(2), ones(3)
    mixed = made(Beside, {"params": [a]}, {"params": [b], "plain": True})
    own = made(torch.optim.AdamW, {"params": [alone]})
    random = torch.Generator().manual_seed(5)
    for _ in range(4):
        gradient, added = (torch.randn(3, generator=random) for _ in range(2))
        for optimizer, rule in (mixed, own):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = gradient[: len(p)].clone()
            with torch.no_grad():
                optimizer.step(functools.partial(rule.before_update))
                rule.after_update()
                rule.pass_time(0)
                rule.before_corrections()
                moments(rule)["moment.exp_avg.a"].add_(added)
                rule.after_corrections()
    torch.testing.assert_close(a, alone)
    assert mixed[0].state[b]["m"] is moments(mixed[1])["moment.m.b"]
