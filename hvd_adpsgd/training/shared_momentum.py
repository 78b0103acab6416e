"""Momentum under gossip: super learners average the momentum of their optimizers beside the parameters.

Muon steps with a non-linear function of its momentum: it orthogonalizes it. Applied to the noise of a single
super learner, that function gives other steps than applied to the mean of all. SGD is linear in its momentum,
and the mean of all models would not change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_adpsgd.errors import ModelMismatchError
from hvd_adpsgd.training.update_rules import Named, Tensors, UpdateRule

Group = dict[str, Any]
Keys = Sequence[str]
KEYS: dict[str, Keys] = {"Muon": ("momentum_buffer",)}  # by class of torch.optim
_16_BITS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Momentum:
    """Which tensors in an optimizer's state are momentum.

    Attributes:
        keys: their names, by id of the parameter.
        second: by id of parameters that are updated by Adam's law, the name of their second moment.
    """

    keys: dict[int, Keys]
    second: dict[int, str] = field(default_factory=dict)


def momentum(optimizer: torch.optim.Optimizer) -> Momentum | str:
    """Return which tensors are momentum, or why that is not known, for a message."""
    groups, name = optimizer.param_groups, type(optimizer).__name__
    for group in groups:
        if reason := unshareable(group):
            return f"{name} {reason}"
    keys = {id(p): keys_of(optimizer, group) for group in groups for p in group["params"]}
    if not any(keys.values()):
        return f"{name} names none in momentum_keys(group)"
    seconds = [(second_of(optimizer, group), group["params"]) for group in groups]
    second = {id(p): key for key, parameters in seconds if key for p in parameters}
    if second and {len(each) for each in keys.values()} != {1}:
        return f"{name} names second moments, and not exactly one momentum of each parameter"
    if len({(keys[p][0], key) for p, key in second.items()}) > 1:
        return f"{name} names second moments, or their momentum, differently between groups"
    if any(key and "betas" not in group for group, (key, _) in zip(groups, seconds, strict=True)):
        return f"{name} names a second moment in a group without betas"
    return Momentum(keys, second)


def keys_of(optimizer: torch.optim.Optimizer, group: Group) -> Keys:
    """Return the names of a group's momentum in the state of a parameter."""
    own = getattr(optimizer, "momentum_keys", None)
    return known_keys(optimizer) if own is None else tuple(own(group))


def second_of(optimizer: torch.optim.Optimizer, group: Group) -> str:
    """Return the name of the second moment of a group that is updated by Adam's law, "" for others."""
    own = getattr(optimizer, "second_moment_key", None)
    return "" if own is None else own(group) or ""


def known_keys(optimizer: torch.optim.Optimizer) -> Keys:
    """Return the names of the momentum of a class in KEYS, none for others."""
    named = ((getattr(torch.optim, name, ()), keys) for name, keys in KEYS.items())
    return next((keys for kind, keys in named if isinstance(optimizer, kind)), ())


def unshareable(group: Group) -> str:
    """Return why moments of a parameter group cannot be shared, for a message; "" if they can."""
    for option in ("centered", "differentiable"):
        if group.get(option):
            return f"has {option}=True"
    # in a saved state parameters are numbers
    if any(isinstance(p, torch.Tensor) and p.dtype in _16_BITS for p in group["params"]):
        return "keeps moments in 16 bits"
    return ""


class SharedMomentum(UpdateRule):
    """Averages momentum in place: the tensors of the optimizer's state are those that exchanges change.

    Args:
        model: see UpdateRule.
        optimizer: returns the optimizer of these parameters.
        kind: which tensors of its state are momentum.
    """

    def __init__(
        self, model: Named, optimizer: Callable[[], torch.optim.Optimizer], kind: Momentum
    ):
        super().__init__([])
        self._optimizer, self._keys = optimizer, kind.keys
        self._moment: Tensors = []
        self._of: list[tuple[int, str]] = []  # parameter and name in its state, of each
        self._held: set[int] = set()  # moments that the optimizer's state has
        self.extend(model)

    def extend(self, named: Named) -> list[tuple[str, torch.Tensor]]:
        """Share the moments of further parameters, too; return what is averaged for them."""
        first = len(self._moment)
        for name, parameter in named:
            for key in self._keys_of(parameter):
                self._moment.append(torch.zeros_like(parameter, requires_grad=False))
                self._of.append((len(self.model), key))
            self.model.append(parameter)
            self.names.append(name)
        return [*named, *self._named_moments(first)]

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        return super().averaged() + self._named_moments(0)

    def _named_moments(self, first: int) -> list[tuple[str, torch.Tensor]]:
        names = [f"moment.{key}.{self.names[i]}" for i, key in self._of[first:]]
        return list(zip(names, self._moment[first:], strict=True))

    def moments(self) -> list[torch.Tensor]:
        return list(self._moment)

    def reload(self) -> None:
        """Where the optimizer has other moments than before, average these in place."""
        state = self._optimizer().state
        for place in range(len(self._of)):
            self._adopt_one(place, state)

    def pass_time(self, step: int) -> None:
        self.reload()

    def _keys_of(self, parameter: torch.Tensor) -> Keys:
        keys = self._keys.get(id(parameter))
        return keys_of(self._optimizer(), self._group_of(parameter)) if keys is None else keys

    def _group_of(self, parameter: torch.Tensor) -> Group:
        groups = self._optimizer().param_groups
        return next(group for group in groups if any(p is parameter for p in group["params"]))

    def _adopt_one(self, place: int, state: Any) -> None:
        i, key = self._of[place]
        its = state.get(self.model[i], {})
        if its.get(key) is not None:
            if its[key] is not self._moment[place]:
                self._take(place, its)
            self._held.add(place)
        elif place in self._held:  # the state was emptied
            self._held.remove(place)
            if not self.received:
                self._moment[place].zero_()

    def _take(self, place: int, state: Any) -> None:
        """Put a moment into a parameter's state, in the place of another one."""
        i, key = self._of[place]
        self._require_shape(i, key, state[key])
        if not self.received:
            self._moment[place].copy_(state[key])
        state[key] = self._moment[place]

    def _require_shape(self, i: int, key: str, moment: torch.Tensor) -> None:
        """Raise ModelMismatchError if a moment of parameter `i` was loaded with another shape than it has."""
        shape = self.model[i].shape
        if moment.shape != shape:
            raise ModelMismatchError(
                f"load_state_dict: {key} of {self.names[i]!r} has the shape {list(moment.shape)}, the "
                f"parameter {list(shape)}. Load a checkpoint of this model, whose optimizer has the "
                "same parameters in the same order."
            )
