"""Update rules: how a super learner changes its own model around averaging, on torch tensors.

All learners of a super learner apply the same update to bitwise equal tensors, so their models stay equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_adpsgd.strategies import DelayedGradients, GASLoC, NoLoCo, PeriodicAveraging
from hvd_adpsgd.strategies.a2cid2 import Constants

Tensors = list[torch.Tensor]
Named = Sequence[tuple[str, torch.Tensor]]


class UpdateRule:
    """Hooks of an update rule, in the order of a step. This base class changes nothing: plain averaging.

    Args:
        model: (name, tensor) pairs of the parameters that the optimizer trains.

    Attributes:
        own: whether the rule's state differs between super learners and fits only one of them.
        in_update: whether the rule has a `before_update`.
        received: whether `moments` hold the mean of other super learners, which stays when the state of one
            of these is loaded.
    """

    own = False
    in_update = False
    received = False

    def __init__(self, model: Named):
        self.model = [tensor for _, tensor in model]
        self.names = [name for name, _ in model]

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) of all that super learners average: the model, and tensors of the rule."""
        return list(zip(self.names, self.model, strict=True))

    def start(self) -> None:
        """Reset the rule's state to the model: before the first step, and after parameters are loaded."""

    def extend(self, named: Named) -> list[tuple[str, torch.Tensor]]:
        """Add parameters that the optimizer trains from now on; return (name, tensor) to average for them."""
        self.model += [tensor for _, tensor in named]
        self.names += [name for name, _ in named]
        return list(named)

    def moments(self) -> list[torch.Tensor]:
        """Return tensors whose mean over super learners a joining one receives, besides the model."""
        return []

    def reload(self) -> None:
        """Hook after a state of the optimizer was loaded."""

    def before_optimizer(self) -> None:
        """Hook before the optimizer steps, after the gradients are averaged in the super learner."""

    def before_update(self) -> None:
        """Hook in the optimizer's step, after the script's step hooks: gradients are what it updates with."""

    def after_update(self) -> None:
        """Hook after the optimizer's update, before the script's step hooks; and when the step raises."""

    def pass_time(self, step: int) -> None:
        """Hook after the optimizer has made step number `step`: advance the rule by one unit of time."""

    def before_corrections(self) -> None:
        """Hook before corrections from exchanges are added to the model, in a step or in a pause."""

    def after_corrections(self) -> None:
        """Hook after corrections from exchanges were added to the model."""

    def before_round(self) -> None:
        """Hook after a round has begun and before its correction is added to the model."""

    def after_round(self) -> None:
        """Hook after the correction of a round was added to the model."""

    def settle(self) -> None:
        """Hook of a pause, after all corrections were added: average_model or a checkpoint comes next."""

    def before_mean(self) -> None:
        """Hook before average_model sets the model to the mean of all super learners."""

    def after_mean(self) -> None:
        """Hook after average_model has set the model."""

    def adapt(self, law: Any) -> None:
        """Take the constants of `law`: this update rule for the number of super learners after a join."""

    def tensors(self) -> dict[str, Tensors]:
        """Return the rule's state for checkpoints, by name."""
        return {}


class _BlockMomentum(UpdateRule):
    """Momentum D over blocks of steps, added to the model w: w(t) = w(t-1) + D(t); see PeriodicAveraging.

    D(t) = eta D(t-1) + zeta (mean - s(t)), where s(t) is the model at the start of the block of steps.
    """

    def __init__(self, model: Named, law: PeriodicAveraging):
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
        torch._foreach_mul_(self._delta, law.block_momentum)
        torch._foreach_add_(self._delta, block, alpha=law.block_rate)
        torch._foreach_add_(self._global, self._delta)
        _copy(self.model, self._global)
        if law.nesterov:
            torch._foreach_add_(self.model, self._delta, alpha=law.block_momentum)
            _copy(self._start, self.model)

    def tensors(self) -> dict[str, Tensors]:
        return {"global": self._global, "start": self._start, "delta": self._delta}


class _SlowModel(UpdateRule):
    """A slow model p with momentum m that follows the averaged model w; see NoLoCo.

    m' = mu m + eta bar(w - p) + eta (bar(p) - p), w' = p' = p + m', where bar is the mean of a pair.
    """

    own = True

    def __init__(self, model: Named, law: NoLoCo):
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
        # (bar(w) - bar(p)) + (bar(p) - p), the sum in the class's equation, in this order
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
    """A2CiD2's second model xt, kept as its distance h = xt - x, which no gradient changes; see A2CiD2.

    In a unit of time x += h (1 - exp(-2 eta)) / 2 and h *= exp(-2 eta). An exchange that moves x by
    c moves xt by 2 alpha_tilde c, and so h by (2 alpha_tilde - 1) c.

    The two sides of an exchange apply c and -c in different steps. Between them the coupling moves x of
    one side only, so the mean of x differs slightly from that of plain optimizers. The mean of x + h / 2,
    the middle of both models, is exact.
    """

    own = True

    def __init__(self, model: Named, law: Constants, exchanges_per_step: float):
        super().__init__(model)
        self._exchanges_per_step = exchanges_per_step
        self.adapt(law)
        self._distance = _like(self.model)
        self._before: Tensors = []

    def adapt(self, law: Any) -> None:
        """Set the constants that depend on the number of super learners; see UpdateRule.adapt."""
        assert isinstance(law, Constants)
        self._decay = math.exp(-2 * law.eta * self._exchanges_per_step)
        self._share = 2 * law.alpha_tilde - 1

    def start(self) -> None:
        torch._foreach_zero_(self._distance)

    def pass_time(self, step: int) -> None:
        torch._foreach_add_(self.model, self._distance, alpha=(1 - self._decay) / 2)
        torch._foreach_mul_(self._distance, self._decay)

    def before_corrections(self) -> None:
        self._before = [p.clone() for p in self.model]

    def after_corrections(self) -> None:
        moved = torch._foreach_sub(self.model, self._before)
        torch._foreach_add_(self._distance, moved, alpha=self._share)
        self._before = []

    def settle(self) -> None:
        """Set x and the second model, x + h, to their middle x + h/2, whose mean exchanges do not change."""
        torch._foreach_add_(self.model, self._distance, alpha=1 / 2)
        torch._foreach_zero_(self._distance)

    def tensors(self) -> dict[str, Tensors]:
        return {"distance": self._distance}


class _OuterStep(UpdateRule):
    """An outer step with momentum after each block of local steps; see GASLoC.

    In a block `start` is theta + c, the model at its start with all corrections since then, so that the model
    differs from it by g. `push` is gamma (u' - u''), of the two blocks before, plus c. At the end of
    a block eta g is added to push, which is then u - u' of the law; theta' = start + eta g + gamma push.
    """

    own = True

    def __init__(self, model: Named, law: GASLoC):
        super().__init__(model)
        self._law = law
        self._start = _like(self.model)
        self._push = _like(self.model)
        self._before: Tensors = []

    def start(self) -> None:
        _copy(self._start, self.model)
        torch._foreach_zero_(self._push)

    def pass_time(self, step: int) -> None:
        law = self._law
        if (step + 1) % law.period:
            return
        moved = torch._foreach_sub(self.model, self._start)
        torch._foreach_add_(self._push, moved, alpha=law.rate)
        if not all(bool(torch.isfinite(push).all()) for push in self._push):
            self.start()  # the model was not finite in this block, and perhaps is again
            return
        _hold_frozen(self.model, self._push)
        torch._foreach_mul_(self._push, law.momentum)
        torch._foreach_add_(self.model, moved, alpha=law.rate - 1)
        torch._foreach_add_(self.model, self._push)
        _copy(self._start, self.model)

    def before_corrections(self) -> None:
        self._before = [p.clone() for p in self.model]

    def after_corrections(self) -> None:
        moved = torch._foreach_sub(self.model, self._before)
        torch._foreach_add_(self._start, moved)
        torch._foreach_add_(self._push, moved)
        self._before = []

    before_mean = before_corrections

    def after_mean(self) -> None:
        """Keep g: what the mean has moved the model by is no local update, and gets no momentum."""
        torch._foreach_add_(self._start, torch._foreach_sub(self.model, self._before))
        self._before = []

    def tensors(self) -> dict[str, Tensors]:
        return {"start": self._start, "push": self._push}


class _LateGradients(UpdateRule):
    """Lets the optimizer step with the mean gradient of the step before; see DelayedGradients.

    Copies of the gradients are averaged while the next gradients are computed.
    """

    def __init__(self, model: Named, law: DelayedGradients):
        super().__init__(model)
        self._late = _like(self.model)

    def start(self) -> None:
        torch._foreach_zero_(self._late)

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"gradient.{n}", g) for n, g in zip(self.names, self._late, strict=True)]

    def before_optimizer(self) -> None:
        """Swap this step's gradients with the mean gradients of the step before."""
        for p, late in zip(self.model, self._late, strict=True):
            if not p.requires_grad:  # frozen after the optimizer was wrapped
                late.zero_()
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            mine = p.grad.clone()
            p.grad.copy_(late)
            late.copy_(mine)

    def tensors(self) -> dict[str, Tensors]:
        return {"late": self._late}


_RULES: dict[type, Callable[..., UpdateRule]] = {
    PeriodicAveraging: _BlockMomentum,
    NoLoCo: _SlowModel,
    GASLoC: _OuterStep,
    DelayedGradients: _LateGradients,
}


def make_rule(law: Any, model: Named, exchanges_per_step: float) -> UpdateRule:
    """Return the UpdateRule of `Plan.rule` for the parameters `model`; plain averaging for None."""
    if isinstance(law, Constants):
        return _Accelerate(model, law, exchanges_per_step)
    made = (rule for kind, rule in _RULES.items() if isinstance(law, kind))
    return UpdateRule(model) if law is None else next(made)(model, law)


def _like(model: Tensors) -> Tensors:
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in model]


def _hold_frozen(model: Tensors, momentum: Tensors) -> None:
    """Zero the momentum of parameters frozen after wrapping: these are averaged and not trained."""
    for p, m in zip(model, momentum, strict=True):
        if not p.requires_grad:
            m.zero_()


def _copy(to: Tensors, values: Tensors) -> None:
    for target, source in zip(to, values, strict=True):
        target.copy_(source)
