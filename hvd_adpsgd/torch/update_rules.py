"""What a super learner does to its own model when it has averaged, on torch tensors.

Every learner of a node does it alike, from equal bits, so their models stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hvd_adpsgd.strategies import update_rules as laws

__all__ = ["UpdateRule", "make_rule"]

Tensors = list[torch.Tensor]
Named = Sequence[tuple[str, torch.Tensor]]


class UpdateRule:
    """The hooks of a rule, in the order of a step. This one leaves the model alone: averaging is all.

    Args:
        model: (name, tensor) of what the optimizer trains.

    Attributes:
        own: whether the state of one super learner is of no use to another.
    """

    own = False

    def __init__(self, model: Named):
        self.model = [tensor for _, tensor in model]
        self.names = [name for name, _ in model]

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        """What is averaged between super learners: the model, and what else a rule wants."""
        return list(zip(self.names, self.model, strict=True))

    def start(self) -> None:
        """Before the first step, when the model has its first values, and when it gets other ones."""

    def before_optimizer(self) -> None:
        """The step's gradients are averaged in the node; the optimizer steps next."""

    def pass_time(self) -> None:
        """The optimizer has stepped: a step's time is over."""

    def before_corrections(self) -> None:
        """What exchanges owe the model is added next, in a step or beside it (settle)."""

    def after_corrections(self) -> None:
        """It has been added."""

    def before_round(self) -> None:
        """A round is over; what it owes the model is taken in next."""

    def after_round(self) -> None:
        """It has been taken in."""

    def settle(self) -> None:
        """Nothing is on its way; average_model or a checkpoint comes next."""

    def tensors(self) -> dict[str, Tensors]:
        """The state, by name, for checkpoints."""
        return {}


class _BlockMomentum(UpdateRule):
    """w(t) = w(t-1) + D(t), D(t) = eta D(t-1) + zeta (mean - s(t)); see PeriodicAveraging."""

    def __init__(self, model: Named, law: laws.BlockMomentum):
        super().__init__(model)
        self._law = law
        self._global = _like(self.model)
        self._start = _like(self.model) if law.nesterov else self._global
        self._delta = _like(self.model)

    def start(self) -> None:
        _copy(self._global, self.model)
        _copy(self._start, self.model)
        torch._foreach_zero_(self._delta)

    def after_round(self) -> None:
        law = self._law
        block = torch._foreach_sub(self.model, self._start)
        _hold_frozen(self.model, self._delta)
        torch._foreach_mul_(self._delta, law.momentum)
        torch._foreach_add_(self._delta, block, alpha=law.rate)
        torch._foreach_add_(self._global, self._delta)
        _copy(self.model, self._global)
        if law.nesterov:
            torch._foreach_add_(self.model, self._delta, alpha=law.momentum)
            _copy(self._start, self.model)

    def tensors(self) -> dict[str, Tensors]:
        return {"global": self._global, "start": self._start, "delta": self._delta}


class _SlowModel(UpdateRule):
    """m' = mu m + eta bar(w - p) + eta (bar(p) - p), w' = p' = p + m'; see NoLoCo."""

    own = True

    def __init__(self, model: Named, law: laws.SlowModel):
        super().__init__(model)
        self._law = law
        self._slow = _like(self.model)
        self._momentum = _like(self.model)
        self._before: Tensors = []

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        slow = [(f"slow.{name}", p) for name, p in zip(self.names, self._slow, strict=True)]
        return super().averaged() + slow

    def start(self) -> None:
        _copy(self._slow, self.model)
        torch._foreach_zero_(self._momentum)

    def before_round(self) -> None:
        self._before = [p.clone() for p in self._slow]

    def after_round(self) -> None:
        # bar(w) - bar(p) + bar(p) - p, as the law adds them up
        pull = torch._foreach_sub(self.model, self._slow)
        torch._foreach_add_(pull, torch._foreach_sub(self._slow, self._before))
        _hold_frozen(self.model, self._momentum)
        torch._foreach_mul_(self._momentum, self._law.momentum)
        torch._foreach_add_(self._momentum, pull, alpha=self._law.rate)
        _copy(self._slow, self._before)
        torch._foreach_add_(self._slow, self._momentum)
        _copy(self.model, self._slow)
        self._before = []

    def tensors(self) -> dict[str, Tensors]:
        return {"slow": self._slow, "momentum": self._momentum}


class _Accelerate(UpdateRule):
    """The second model as its distance h = xt - x, which no gradient changes; see A2CiD2.

    In a unit of time x += h (1 - exp(-2 eta)) / 2 and h *= exp(-2 eta). An exchange that moves x by
    c moves xt by 2 alpha_tilde c, and so h by (2 alpha_tilde - 1) c.

    The two sides of an exchange apply c and -c at steps of their own. Meanwhile the coupling moves x of
    one and not of the other, so the mean of x strays a little from that of plain optimizers. Kept
    exactly is the mean of x + h / 2, the middle of both models.
    """

    own = True

    def __init__(self, model: Named, law: laws.Accelerate, exchanges_per_step: float):
        super().__init__(model)
        self._decay = math.exp(-2 * law.eta * exchanges_per_step)
        self._share = 2 * law.alpha_tilde - 1
        self._distance = _like(self.model)
        self._before: Tensors = []

    def start(self) -> None:
        torch._foreach_zero_(self._distance)

    def pass_time(self) -> None:
        torch._foreach_add_(self.model, self._distance, alpha=(1 - self._decay) / 2)
        torch._foreach_mul_(self._distance, self._decay)

    def before_corrections(self) -> None:
        self._before = [p.clone() for p in self.model]

    def after_corrections(self) -> None:
        moved = torch._foreach_sub(self.model, self._before)
        torch._foreach_add_(self._distance, moved, alpha=self._share)
        self._before = []

    def settle(self) -> None:
        """Both models go to their middle x + h/2, whose mean no exchange has changed."""
        torch._foreach_add_(self.model, self._distance, alpha=1 / 2)
        torch._foreach_zero_(self._distance)

    def tensors(self) -> dict[str, Tensors]:
        return {"distance": self._distance}


class _LateGradients(UpdateRule):
    """Steps with the mean gradient of the step before; see DelayedGradients.

    What is averaged are copies of the gradients: while the mean of these is made, the next
    gradients are computed.
    """

    def __init__(self, model: Named, law: laws.LateGradients):
        super().__init__(model)
        self._late = _like(self.model)

    def start(self) -> None:
        torch._foreach_zero_(self._late)

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"gradient.{n}", g) for n, g in zip(self.names, self._late, strict=True)]

    def before_optimizer(self) -> None:
        """Gradients and their means of the step before change places."""
        for p, late in zip(self.model, self._late, strict=True):
            if not p.requires_grad:  # frozen after it was wrapped
                late.zero_()
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            mine = p.grad.clone()
            p.grad.copy_(late)
            late.copy_(mine)

    def tensors(self) -> dict[str, Tensors]:
        return {"late": self._late}


def make_rule(law: laws.Rule | None, model: Named, exchanges_per_step: float) -> UpdateRule:
    """The rule of a plan on the tensors that an optimizer trains."""
    if isinstance(law, laws.Accelerate):
        return _Accelerate(model, law, exchanges_per_step)
    made: dict[type, Callable[..., UpdateRule]] = {
        laws.BlockMomentum: _BlockMomentum,
        laws.SlowModel: _SlowModel,
        laws.LateGradients: _LateGradients,
    }
    return UpdateRule(model) if law is None else made[type(law)](model, law)


def _like(model: Tensors) -> Tensors:
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in model]


def _hold_frozen(model: Tensors, momentum: Tensors) -> None:
    """What was frozen after it was wrapped is averaged on, and nothing carries it further."""
    for p, m in zip(model, momentum, strict=True):
        if not p.requires_grad:
            m.zero_()


def _copy(to: Tensors, values: Tensors) -> None:
    for target, source in zip(to, values, strict=True):
        target.copy_(source)
