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

import inspect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvd_adpsgd.engine.shard_memory import Arrivals
from hvd_adpsgd.training.devices import Event, device_of
from hvd_adpsgd.training.moment_passes import Product, Second, copy_all, correct, multiply
from hvd_adpsgd.training.sharded import local
from hvd_adpsgd.training.shared_momentum import (
    KEYS,
    Group,
    Keys,
    Momentum,
    SharedMomentum,
    known_keys,
    momentum,
    second_of,
    unshareable,
)
from hvd_adpsgd.training.update_rules import Named, Tensors

log = logging.getLogger("hvd_adpsgd")


@dataclass(frozen=True)
class Adaptive:
    """The moments of a kind of optimizer: their names in a parameter's state, and their decays.

    Attributes:
        first, second: names of the first and the second moment. Without a first one, SharedMoments keeps it.
        first_decay, second_decay: decay per step, of a parameter group.
        beside: what is momentum where a class updates only some parameters by Adam's law; None: it does all.
    """

    first: str | None
    second: str
    first_decay: Callable[[Group], float]
    second_decay: Callable[[Group], float]
    beside: Momentum | None = None


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
SHARED = ", ".join([*(kind.__name__ for kind in _KINDS), *KEYS])  # for messages
_WEIGHT = 0.95  # by which a step reduces the weight of v_i in x
_LARGEST_RATE = 0.5  # of a product in x
_LARGEST = 80.0  # logarithm of the largest bound, a float32
_LARGEST_V = "max_exp_avg_sq"
_LARGE = 1e20  # a second moment after a gradient of 1e11
_LOOK_EVERY = 128  # updates: on a GPU the host waits for the look


def adaptive(optimizer: torch.optim.Optimizer) -> Adaptive | str:
    """Return how an optimizer keeps its moments, or why these cannot be shared, for a message.

    A subclass counts as its base class unless it has a step() of its own.
    """
    kinds, name = type(optimizer).__mro__, type(optimizer).__name__
    known = [kind for kind in kinds if kind in _KINDS]
    if not known:
        return f"{name} is none of {SHARED}, and has no momentum_keys"
    # torch sets a step() with its hooks on the class of each optimizer that it makes
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(known[0].step):
        return f"{name} has a step() of its own"
    for group in optimizer.param_groups:
        if reason := unshareable(group):
            return f"{name} {reason}"
    return _KINDS[known[0]]


def shareable(optimizer: torch.optim.Optimizer) -> Adaptive | Momentum | str:
    """Return which moments of an optimizer are shared, or why none can be, for a message."""
    if not (hasattr(optimizer, "momentum_keys") or known_keys(optimizer)):
        return adaptive(optimizer)
    found = momentum(optimizer)
    if isinstance(found, str) or not found.second:
        return found
    parameter, second = next(iter(found.second.items()))
    return replace(_ADAM, first=found.keys[parameter][0], second=second, beside=found)


class SharedMoments(SharedMomentum):
    """Averages first moments, and lets the optimizer step with the second moment of the mean gradient.

    In a step, with g the gradient of this super learner, and b the decay of the second moment,

        v_i <- b v_i + (1 - b) g^2

    and the optimizer steps with v in its place; then its state is v_i again. Where r exchanges have added c
    in sum to the first moment m_i, the mean of the peers' moments is m_i + c / (r w), and

        x <- b^p x + (1 - b^p) m_i (m_i + c / (r w)),   q <- b^p q

    with a product in every pth step, and 1 - b^p at most a half: x forgets as v_i does, and learns as fast
    from fewer products, for moments change little in a few steps. q, 1 at first, is the weight of the
    products that x lacks. v has (1 - q^h) x / (1 - q) + q^h v_i in place of x, h such that q^h falls by 5 %
    with a step, or as q where that is faster. Moments that began with 0 are divided by 1 - decay^steps, as
    the optimizer does.

    A first moment of own gradients has m_i^2 <= R^2 v_i, R^2 = (1 - a)^2 / ((1 - b) (1 - a^2 / b)), with a
    the decay of the first moment (Cauchy-Schwarz). Where it is larger, it is of peers: of a row of an
    embedding, for instance, that this super learner has not used. There x is made at least (m_i / R)^2, or
    steps would have no bound.

    A single gradient of, say, 1e20 reaches all super learners with the first moments, and x would forget its
    square as slowly as v_i does. So x is at most 1e4 times the larger of m_i^2 and v_i: when the moment has
    decayed, steps are at most a hundred times too small, a factor that decays with x. The super learner with
    that gradient has it in v_i, as with torch; every _LOOK_EVERY updates `after_update` looks for such a v_i,
    and warns once. With amsgrad the largest v that the optimizer remembers is at most the largest v_i.

    The noise of averaged moments is not independent: each holds parts of the others. The mean of m_i m_j
    over all i and j is the square of the mean moment, G^2 + k s^2 / n, with k = (1 - a) / (1 + a). Squares,
    i = j, are the largest. So x exceeds G^2 by at most k s^2 / n: with a = 0.9 that is 5 % of the noise that
    v has anyway. Where super learners differ in noise, because they differ in size, s^2 is its mean: v is
    right on average over them, and each is off by its own share, 1 / n.

    Where G is 0, the standard deviation of x is at most that of moments which nobody averages,

        k s^2 sqrt((1 - b) / (1 + b) (1 + b a^2) / (1 - b a^2)),

    for products of independent moments correlate as a^2 does: 0.023 s^2 for a = 0.9, b = 0.95, and 0.0036 s^2
    for b = 0.999. Averaged moments give less: 0.003 s^2 for b = 0.95, n = 32, a tenth of the noise of the
    mean gradient.

    Args:
        model: see UpdateRule.
        optimizer: returns the optimizer of these parameters.
        kind: its moments.
        weight: returns w, share of the difference by which an exchange moves each side.
        training: returns n, the number of super learners that train; equal on a super learner's learners.
        arrivals: returns r since its last call, the mean of all chunks that were exchanged, 0 if none was;
            and 1 / p.
    """

    in_update = True

    def __init__(
        self,
        model: Named,
        optimizer: Callable[[], torch.optim.Optimizer],
        kind: Adaptive,
        weight: Callable[[], float],
        training: Callable[[], int],
        arrivals: Callable[[], Arrivals],
    ):
        self._kind, self._weight = kind, weight
        self._training, self._arrivals = training, arrivals
        self._place: dict[int, int] = {}
        self._cross: Tensors = []  # x
        self._lacking: Tensors = []  # q, one number per parameter
        self._steps: list[int] = []  # of the optimizer, by parameter
        # room for first moments as peers see them; and for this super learner's second moments during the
        # update, then for first moments before corrections
        self._offered: Tensors = []
        self._other: Tensors = []
        self._corrected: list[int] = []  # parameters whose second moment is v
        self._largest: list[tuple[int, torch.Tensor]] = []  # amsgrad's largest v before the update
        self._updates, self._has_warned = 0, False
        self._follows = False  # whether a step, not a pause, precedes the corrections
        # parameters that the last step has changed, if it was not skipped
        self._stepped: list[int] = []
        self._skips: tuple[Event, torch.Tensor] | None = None  # whether it was, behind the event
        super().__init__(model, optimizer, kind.beside or Momentum({}))

    def extend(self, named: Named) -> list[tuple[str, torch.Tensor]]:
        """Share the moments of further parameters, too; return what is averaged for them."""
        averaged = super().extend(named)
        for i in range(len(self._steps), len(self.model)):
            parameter, moment = self.model[i], self._moment[i]
            if is_adaptive := self._is_adaptive(parameter):
                self._place[id(parameter)] = i
            self._cross.append(
                torch.zeros_like(moment) if is_adaptive else torch.empty(0, device=moment.device)
            )
            self._lacking.append(torch.ones((), dtype=moment.dtype, device=moment.device))
            self._steps.append(0)
        return averaged

    def _is_adaptive(self, parameter: torch.Tensor) -> bool:
        beside = self._kind.beside
        if beside is None or id(parameter) in beside.keys:
            return beside is None or id(parameter) in beside.second
        return bool(second_of(self._optimizer(), self._group_of(parameter)))

    def _keys_of(self, parameter: torch.Tensor) -> Keys:
        if self._kind.beside is None:
            return (self._kind.first or "mean",)
        return super()._keys_of(parameter)

    def start(self) -> None:
        for x, lacking in zip(self._cross, self._lacking, strict=True):
            x.zero_()
            lacking.fill_(1)

    def tensors(self) -> dict[str, Tensors]:
        return {"cross": self._cross, "lacking": self._lacking}

    def reload(self) -> None:
        self._adopt(reads=True)

    def _adopt(self, reads: bool = False) -> None:
        """Where the optimizer has other moments than before, average these in place, and take its step.

        Args:
            reads: whether to read all steps, also those on a device, for which the host waits.
        """
        if self._skips is not None:
            self._take_back(*self._skips)
        state, first = self._optimizer().state, self._kind.first
        for i, parameter in enumerate(self.model):
            its = state.get(parameter)
            if id(parameter) not in self._place:
                self._adopt_one(i, state)
                continue
            if not its:
                if self._steps[i]:  # the state was emptied
                    self._forget(i)
                continue
            step, is_new = its["step"], not self._steps[i]
            if first is not None and its[first] is not self._moment[i]:
                for key in {self._kind.second, _LARGEST_V} & set(its):
                    self._require_shape(i, key, its[key])
                self._take(i, its)
                is_new = True
            if reads or is_new or not _is_on_device(step):
                self._steps[i] = int(step)

    def _take_back(self, event: Event, flag: torch.Tensor) -> None:
        """Do not count the last step if a fused optimizer has skipped it, as its device has set the flag.

        The host waits for the update of that step only: the next forward and backward pass are queued behind.
        """
        self._skips = None
        event.wait()
        if flag:
            for i in self._stepped:
                self._steps[i] -= 1

    def _await_skips(self, found: torch.Tensor) -> None:
        """Let the device tell whether it skips this step; `found`: GradScaler's count of infinite values."""
        device = device_of(found)
        flag, current = device.flag(), device.current()
        current.enqueue(lambda: flag.copy_(found > 0, non_blocking=True))
        self._skips = current.record(), flag

    def _forget(self, i: int) -> None:
        """Begin anew with a parameter."""
        self._steps[i] = 0
        self._cross[i].zero_()
        self._lacking[i].fill_(1)
        if not self.received:
            self._moment[i].zero_()

    def before_update(self) -> None:
        self._adopt()
        self._make_room()
        copy_all(self._offered, self._moment)
        self._follows = True
        self._stepped = []
        optimizer = self._optimizer()
        for group in optimizer.param_groups:
            stepped = [i for i in self._places(group) if self.model[i].grad is not None]
            for i in stepped:
                self._steps[i] += 1
            for steps, places in _by(self._steps, stepped):
                self._correct(optimizer, group, steps, places)
            self._stepped += stepped
        # set where the optimizer unscales in its update; steps that the host can read need no flag
        if (found := getattr(optimizer, "found_inf", None)) is not None:
            self._await_skips(found)

    def _correct(self, optimizer: Any, group: Group, steps: int, places: list[int]) -> None:
        """Give parameters of a group a second moment of which the optimizer's update makes v."""
        kind = self._kind
        parameters = [self.model[i] for i in places]
        gradients = _seen(optimizer, parameters, group)
        l2 = _l2(optimizer, group)
        if kind.first is None:
            seen = torch._foreach_add(gradients, parameters, alpha=l2) if l2 else gradients
            moments = [self._moment[i] for i in places]
            torch._foreach_lerp_(moments, seen, 1 - kind.first_decay(group))
        decay = kind.second_decay(group)
        # in the first step there are no products yet: v is v_i; with decay 0 its square
        if steps == 1 or not 0 < decay < 1:
            return
        second = [optimizer.state[p][kind.second] for p in parameters]
        own, moment = _taken(places, self._other, self._moment)
        cross, lacking = _taken(places, self._cross, self._lacking)
        known, first = 1 - decay**steps, 1.0 if kind.first is None else kind.first_decay(group)
        haste = max(1.0, math.log(_WEIGHT) / math.log(decay))
        bound = _bound(first, decay, steps)
        law = Second(decay, known, 1 / self._training(), l2, first, bound, haste)
        if group.get("amsgrad"):
            held = [(i, local(optimizer.state[self.model[i]][_LARGEST_V])) for i in places]
            self._largest += [(i, largest.clone()) for i, largest in held]
        skips = getattr(optimizer, "found_inf", None)
        before = None if skips is None else [v.clone() for v in second]
        correct(law, second, own, gradients, parameters, moment, cross, lacking)
        if skips is not None and before is not None:
            for mine, v in zip(own, before, strict=True):
                mine.copy_(torch.where(skips.to(v.device) > 0, v, mine))
        self._corrected += places

    @torch.no_grad()
    def after_update(self) -> None:
        its = self._corrected
        if not its:
            return
        optimizer = self._optimizer()
        second = [optimizer.state[self.model[i]][self._kind.second] for i in its]
        copy_all(second, *_taken(its, self._other))
        for i, before in self._largest:
            largest = local(optimizer.state[self.model[i]][_LARGEST_V])
            torch.minimum(largest, local(self._other[i]), out=largest)
            torch.maximum(largest, before, out=largest)
        self._corrected, self._largest = [], []
        self._updates += 1
        if self._updates % _LOOK_EVERY == 0:
            self._warn_of_large(its, second)

    def _warn_of_large(self, places: list[int], second: Tensors) -> None:
        """Warn, once, of a parameter that a second moment of this super learner stops for long."""
        parts = [(i, p) for i, v in zip(places, second, strict=True) if (p := local(v)).numel()]
        if self._has_warned or not parts:
            return
        norms = torch._foreach_norm([part for _, part in parts], math.inf)
        largest = torch.stack([norm.double().cpu() for norm in norms])
        v, number = (each.item() for each in largest.max(dim=0))
        if not v > _LARGE:
            return
        self._has_warned = True
        place = parts[int(number)][0]
        decay = self._kind.second_decay(self._group_of(self.model[place]))
        log.warning(
            "the second moment of %s is %.1g on this super learner, after a gradient of about %.1g: "
            "%s hardly moves some of its elements for about %.0f steps. Resume from an earlier checkpoint; "
            "use torch.nn.utils.clip_grad_norm_ before each step.",
            self.names[place],
            v,
            math.sqrt(v / (1 - decay)),
            type(self._optimizer()).__name__,
            math.log(v) / -math.log(decay),
        )

    def pass_time(self, step: int) -> None:
        if 1 in self._steps:  # the optimizer has made their state in this step
            self._adopt()

    def before_corrections(self) -> None:
        self._arrivals()  # of corrections that were added elsewhere, as in hvd.join
        self._make_room()
        copy_all(self._other, self._moment)

    def after_corrections(self) -> None:
        arrivals = self._arrivals()
        if arrivals.exchanges and self._follows:
            for group in self._optimizer().param_groups:
                for steps, places in _by(self._steps, self._places(group)):
                    if steps > 1:
                        self._multiply(group, steps, places, arrivals)
        self._follows = False
        if self._offered and self._offered[0].device.type != "cpu":
            self._offered, self._other = [], []

    def _multiply(self, group: Group, steps: int, places: list[int], arrivals: Arrivals) -> None:
        kind = self._kind
        offered = steps - 1  # moments as offered are of the step before
        known = 1 - kind.first_decay(group) ** offered
        rate = min(1 - kind.second_decay(group) ** (1 / arrivals.pace), _LARGEST_RATE)
        law = Product(rate, 1 / (arrivals.exchanges * self._weight()), known**2)
        every = (self._cross, self._lacking, self._moment, self._other, self._offered)
        multiply(law, *_taken(places, *every))

    def _places(self, group: Group) -> list[int]:
        return [self._place[id(p)] for p in group["params"] if id(p) in self._place]

    def _make_room(self) -> None:
        """Allocate memory for two copies of all first moments; on the host it is kept between steps."""
        for room in (self._offered, self._other):
            if len(room) < len(self._moment):
                room += map(torch.empty_like, self._moment[len(room) :])


def _bound(first: float, second: float, steps: int) -> float:
    """Return the largest m^2 / v that gradients can give, for moments of these decays after some steps."""
    if first == 1:
        return math.inf
    ratio = first**2 / second
    if ratio > 1 and steps * math.log(ratio) > _LARGEST:
        return math.inf
    terms = steps if ratio == 1 else (1 - ratio**steps) / (1 - ratio)
    return (1 - first) ** 2 / (1 - second) * terms


def _is_on_device(step: Any) -> bool:
    """Whether the host would wait for a device to read an optimizer's step."""
    return isinstance(step, torch.Tensor) and step.device.type != "cpu"


def _by(values: list[int], places: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Return places by their value."""
    found: dict[int, list[int]] = {}
    for i in places:
        found.setdefault(values[i], []).append(i)
    return list(found.items())


def _taken(places: list[int], *every: Tensors) -> list[Tensors]:
    """Return the tensors at these places, of each list."""
    return [list(map(tensors.__getitem__, places)) for tensors in every]


def _seen(optimizer: torch.optim.Optimizer, parameters: Tensors, group: Group) -> Tensors:
    """Return the gradients as the optimizer uses them: with its sign, and without GradScaler's factor."""
    found = [p.grad for p in parameters if p.grad is not None]
    scale = getattr(optimizer, "grad_scale", None)  # where the optimizer unscales in its update
    if scale is not None:
        found = [gradient / scale.to(gradient.device) for gradient in found]
    return list(torch._foreach_neg(found)) if group.get("maximize") else found


def _l2(optimizer: torch.optim.Optimizer, group: Group) -> float:
    """Return the factor with which the optimizer adds the parameter to its gradient."""
    # older torch has no such entry in the groups of AdamW; classes of scripts may have none
    unsaid = isinstance(optimizer, torch.optim.AdamW) or hasattr(optimizer, "second_moment_key")
    decoupled = group.get("decoupled_weight_decay", unsaid)
    return 0.0 if decoupled else float(group.get("weight_decay", 0))


def share(
    kind: Adaptive | Momentum,
    model: Named,
    optimizer: Callable[[], torch.optim.Optimizer],
    weight: Callable[[], float],
    training: Callable[[], int],
    arrivals: Callable[[], Arrivals],
) -> SharedMomentum:
    """Return the rule that shares the moments of a `kind`; the other arguments: see SharedMoments."""
    if isinstance(kind, Momentum):
        return SharedMomentum(model, optimizer, kind)
    return SharedMoments(model, optimizer, kind, weight, training, arrivals)
