"""Adaptive optimizers under gossip: first moments are averaged, and the second moment is corrected.

An adaptive optimizer divides by the root of v, the mean square of its gradients. With G the gradient and s^2
the variance of one super learner's gradient, v is G^2 + s^2 / n in synchronous training, which has the mean
gradient of n super learners, but G^2 + s^2 on each of n that train on their own: where noise dominates, their
steps are sqrt(n) times too small. The noise of two super learners is independent, so the product of their
first moments has the mean G^2, and

    v = v_i / n + (1 - 1/n) max(0, x),   x the moving average of m_i m_j,

is the second moment of the mean gradient, without an all-reduce. First moments are averaged beside the
parameters. What an exchange adds to m_i tells m_j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adpsgd.training.update_rules import Named, Tensors, UpdateRule

__all__ = ["Adaptive", "SharedMoments", "adaptive"]

Group = dict[str, Any]


@dataclass(frozen=True)
class Adaptive:
    """The moments of a kind of optimizer: their names in a parameter's state, and their decays.

    Attributes:
        first, second: names of the first and the second moment. Without a first one, SharedMoments keeps it.
        first_decay, second_decay: decay per step, of a parameter group.
    """

    first: str | None
    second: str
    first_decay: Callable[[Group], float]
    second_decay: Callable[[Group], float]


_ADAM = Adaptive(
    "exp_avg", "exp_avg_sq", lambda g: float(g["betas"][0]), lambda g: float(g["betas"][1])
)
_RMSPROP = Adaptive(None, "square_avg", lambda g: 0.9, lambda g: float(g["alpha"]))
_KINDS: dict[type[torch.optim.Optimizer], Adaptive] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: _ADAM,
    torch.optim.RAdam: _ADAM,
    torch.optim.RMSprop: _RMSPROP,
}
_16_BITS = (torch.float16, torch.bfloat16)


def adaptive(optimizer: torch.optim.Optimizer) -> Adaptive | str:
    """Return how an optimizer keeps its moments, or why these cannot be shared, for a message.

    A subclass counts as its base class unless it has a step() of its own.
    """
    known = [kind for kind in type(optimizer).__mro__ if kind in _KINDS]
    name = type(optimizer).__name__
    if not known:
        return f"{name} is none of {', '.join(kind.__name__ for kind in _KINDS)}"
    if any(
        "step" in vars(kind)
        for kind in type(optimizer).__mro__[: type(optimizer).__mro__.index(known[0])]
    ):
        return f"{name} has a step() of its own"
    for group in optimizer.param_groups:
        for option in ("centered", "differentiable"):
            if group.get(option):
                return f"{name} has {option}=True"
        if any(p.dtype in _16_BITS for p in group["params"]):
            return f"{name} keeps moments in 16 bits"
    return _KINDS[known[0]]


class SharedMoments(UpdateRule):
    """Averages first moments, and lets the optimizer step with the second moment of the mean gradient.

    In a step, with g the gradient of this super learner, and b the decay of the second moment,

        v_i <- b v_i + (1 - b) g^2

    and the optimizer steps with v in its place; then its state is v_i again. Where r exchanges have added c
    in sum to the first moment m_i, the mean of the peers' moments is m_i + c / (r w), and

        x <- b x + (1 - b) m_i (m_i + c / (r w)),   q <- b q

    q, 1 at first, is the weight of the products that x lacks: v has x + q v_i in place of x. Moments that
    began with 0 are divided by 1 - decay^steps, as the optimizer does.

    The noise of averaged moments is not independent: each holds parts of the others. The mean of m_i m_j
    over all i and j is the square of the mean moment, G^2 + k s^2 / n, with k = (1 - a) / (1 + a) and a the
    decay of the first moment. Squares, i = j, are the largest. So x exceeds G^2 by at most k s^2 / n: with
    a = 0.9 that is 5 % of the noise that v has anyway.

    Args:
        model: see UpdateRule.
        optimizer: returns the optimizer of these parameters.
        kind: its moments.
        weight: returns w, share of the difference by which an exchange moves each side.
        training: returns n, the number of super learners that train; equal on a super learner's learners.
        arrivals: returns r since its last call, the mean of all chunks that were exchanged; 0: none was.
    """

    in_update = True

    def __init__(
        self,
        model: Named,
        optimizer: Callable[[], torch.optim.Optimizer],
        kind: Adaptive,
        weight: Callable[[], float],
        training: Callable[[], int],
        arrivals: Callable[[], float],
    ):
        super().__init__([])
        self._optimizer, self._kind, self._weight = optimizer, kind, weight
        self._training, self._arrivals = training, arrivals
        self._place: dict[int, int] = {}
        self._moment: Tensors = []
        self._cross: Tensors = []  # x
        self._lacking: Tensors = []  # q, one number per parameter
        self._steps: list[int] = []  # of the optimizer, by parameter
        self._offered: Tensors = []  # first moments as peers see them
        self._before: Tensors = []  # and before corrections from exchanges
        self._restored: tuple[Tensors, Tensors] = (
            [],
            [],
        )  # the optimizer's second moments, and their values
        self.extend(model)

    def extend(self, named: Named) -> list[tuple[str, torch.Tensor]]:
        """Share the moments of further parameters, too; return what is averaged for them."""
        for name, parameter in named:
            self._place[id(parameter)] = len(self.model)
            self.model.append(parameter)
            self.names.append(name)
            moment = torch.zeros_like(parameter, requires_grad=False)
            self._moment.append(moment)
            self._cross.append(torch.zeros_like(moment))
            self._lacking.append(torch.ones((), dtype=moment.dtype, device=moment.device))
            self._steps.append(0)
        moments = zip(named, self._moment[len(self._moment) - len(named) :], strict=True)
        return [*named, *((f"moment.{name}", moment) for (name, _), moment in moments)]

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        moments = [(f"moment.{name}", m) for name, m in zip(self.names, self._moment, strict=True)]
        return super().averaged() + moments

    def start(self) -> None:
        for x, lacking in zip(self._cross, self._lacking, strict=True):
            x.zero_()
            lacking.fill_(1)

    def tensors(self) -> dict[str, Tensors]:
        return {"cross": self._cross, "lacking": self._lacking}

    def reload(self) -> None:
        self._adopt()

    def _adopt(self) -> None:
        """Where the optimizer has other moments than before, average these in place, and take its step."""
        state, first = self._optimizer().state, self._kind.first
        for i, parameter in enumerate(self.model):
            its = state.get(parameter)
            if not its:
                continue
            step, is_new = its["step"], not self._steps[i]
            if first is not None and its[first] is not self._moment[i]:
                if not self.received:
                    self._moment[i].copy_(its[first])
                its[first], is_new = self._moment[i], True
            if is_new or not isinstance(step, torch.Tensor) or step.device.type == "cpu":
                self._steps[i] = int(step)  # on a device it would wait for the device

    # ---- the step -----------------------------------------------------------------------------

    def before_update(self) -> None:
        self._adopt()
        self._offered = [moment.clone() for moment in self._moment]
        optimizer = self._optimizer()
        for group in optimizer.param_groups:
            stepped = [
                self._place[id(p)]
                for p in group["params"]
                if p.grad is not None and id(p) in self._place
            ]
            for i in stepped:
                self._steps[i] += 1
            for steps, places in _by(self._steps, stepped):
                self._correct(optimizer, group, steps, places)

    def _correct(
        self, optimizer: torch.optim.Optimizer, group: Group, steps: int, places: list[int]
    ) -> None:
        """Give parameters of a group a second moment of which the optimizer's update makes v."""
        kind, decay = self._kind, self._kind.second_decay(group)
        square = _gradients(optimizer, [self.model[i] for i in places], group)
        if kind.first is None:
            moments = [self._moment[i] for i in places]
            torch._foreach_lerp_(moments, square, 1 - kind.first_decay(group))
        if steps == 1:  # there are no products yet: v is v_i
            return
        torch._foreach_mul_(square, square)
        second = [optimizer.state[self.model[i]][kind.second] for i in places]
        own = torch._foreach_lerp(square, second, decay)
        mean = torch._foreach_mul([self._cross[i] for i in places], 1 - decay**steps)
        lacking = [self._lacking[i].expand_as(v) for i, v in zip(places, own, strict=True)]
        torch._foreach_addcmul_(mean, own, lacking)
        torch._foreach_clamp_min_(mean, 0)
        torch._foreach_lerp_(mean, own, 1 / self._training())
        torch._foreach_add_(mean, square, alpha=decay - 1)
        torch._foreach_div_(mean, decay)
        skips = getattr(optimizer, "found_inf", None)  # GradScaler's, where the optimizer unscales
        if skips is not None:
            pairs = zip(second, own, strict=True)
            own = tuple(torch.where(skips.to(v.device) > 0, v, u) for v, u in pairs)
        torch._foreach_copy_(second, mean)
        self._restored[0].extend(second)
        self._restored[1].extend(own)

    def pass_time(self) -> None:
        second, own = self._restored
        if second:
            torch._foreach_copy_(second, own)
        self._restored = [], []
        if 1 in self._steps:  # the optimizer has made their state in this step
            self._adopt()

    def before_corrections(self) -> None:
        self._before = [moment.clone() for moment in self._moment]

    def after_corrections(self) -> None:
        arrivals, offered = self._arrivals(), self._offered
        if arrivals and offered:
            for group in self._optimizer().param_groups:
                places = [self._place[id(p)] for p in group["params"] if id(p) in self._place]
                for steps, its in _by(self._steps, [i for i in places if self._steps[i] > 1]):
                    # moments as offered are of the step before
                    known = 1 - self._kind.first_decay(group) ** (steps - 1)
                    self._multiply(its, 1 - self._kind.second_decay(group), known, arrivals)
        self._before, self._offered = [], []

    def _multiply(self, places: list[int], rate: float, known: float, arrivals: float) -> None:
        """Add products with the peers' moments to the moving averages, where exchanges added something."""
        offered, cross = [self._offered[i] for i in places], [self._cross[i] for i in places]
        product = torch._foreach_sub(
            [self._moment[i] for i in places], [self._before[i] for i in places]
        )
        arrived = torch._foreach_sign(product)
        torch._foreach_abs_(arrived)
        torch._foreach_div_(product, arrivals * self._weight())
        torch._foreach_add_(product, offered)
        torch._foreach_mul_(product, offered)
        torch._foreach_div_(product, known**2)
        torch._foreach_sub_(product, cross)
        torch._foreach_mul_(product, arrived)
        torch._foreach_add_(cross, product, alpha=rate)
        lacking = [self._lacking[i] for i in places]
        torch._foreach_mul_(lacking, self._kept(offered, arrived, rate))

    def _kept(
        self, offered: Tensors, arrived: tuple[torch.Tensor, ...], rate: float
    ) -> tuple[torch.Tensor, ...]:
        """Return 1 - rate * share by parameter: share of elements with products, of those with moments."""
        live = torch._foreach_sign(offered)
        torch._foreach_abs_(live)
        torch._foreach_maximum_(live, arrived)
        share = torch._foreach_norm(arrived, 1)
        torch._foreach_div_(share, torch._foreach_clamp_min(torch._foreach_norm(live, 1), 1))
        torch._foreach_mul_(share, -rate)
        torch._foreach_add_(share, 1)
        return share


def _by(values: list[int], places: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Return places by their value."""
    found: dict[int, list[int]] = {}
    for i in places:
        found.setdefault(values[i], []).append(i)
    return list(found.items())


def _gradients(optimizer: torch.optim.Optimizer, parameters: Tensors, group: Group) -> Tensors:
    """Return copies of the gradients as the optimizer uses them: unscaled, with L2 decay."""
    found = [p.grad.clone() for p in parameters if p.grad is not None]
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        for gradient in found:
            gradient.div_(scale.to(gradient.device))
    if group.get("weight_decay", 0) and not group.get("decoupled_weight_decay", False):
        sign = -1 if group.get("maximize") else 1
        torch._foreach_add_(found, parameters, alpha=sign * group["weight_decay"])
    return found
