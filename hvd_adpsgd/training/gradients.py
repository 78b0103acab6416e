"""The state of an optimizer's gradients: computed, submitted to Horovod, averaged, used or dropped."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

Parameters = Iterable[torch.Tensor]

REQUIRES_GRAD = operator.attrgetter("requires_grad")


class _Mark(NamedTuple):
    """A parameter's gradient tensor and its version, which torch increments when it is changed in place."""

    grad: weakref.ref[torch.Tensor] | None
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Mark:
        grad = parameter.grad
        return cls(None, 0) if grad is None else cls(weakref.ref(grad), grad._version)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient still is this tensor, with unchanged or changed values."""
        if self.grad is None or parameter.grad is None:
            return self.grad is None and parameter.grad is None
        return self.grad() is parameter.grad

    def is_as_it_was(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient still is this tensor, and was not changed in place."""
        grad = parameter.grad
        if self.grad is None or grad is None:
            return self.grad is None and grad is None
        return self.grad() is grad and grad._version == self.version


class Gradients:
    """Which gradients of one optimizer are computed, submitted to Horovod or averaged since its last step.

    Changes by GradScaler.unscale_, by `.data` and by NumPy do not increment a tensor's version, so they are
    not detected.

    Attributes:
        averaged: whether the gradients are averaged, and neither used by step() nor dropped since.
        by_backward: whether backward() has averaged them, and synchronize() was not called since.
    """

    def __init__(self) -> None:
        self.averaged = self.by_backward = False
        self._awaited = 0  # number of gradients that the set of gradients under way needs
        self._computed: dict[torch.Tensor, _Mark] = {}
        self._submitted: dict[torch.Tensor, _Mark] = {}
        self._averaged: dict[torch.Tensor, _Mark] = {}

    def computed(self, parameter: torch.Tensor) -> None:
        """Record that backward() has computed a parameter's gradient, or has added to it."""
        if parameter not in self._submitted:
            self._computed[parameter] = _Mark.of(parameter)

    def submit(self, parameters: Parameters, trained: Collection[torch.Tensor]) -> bool:
        """Record that the gradients of `parameters` are submitted to Horovod, or will be with their group.

        Args:
            parameters: parameters whose gradients are submitted.
            trained: all parameters of the optimizer whose gradients are averaged.

        Returns:
            Whether the set is complete: no gradient is missing but those of frozen parameters
            (requires_grad=False).
        """
        self.averaged = False
        if not self._submitted:
            self._awaited = sum(map(REQUIRES_GRAD, trained))
        for p in parameters:
            if p not in self._submitted:
                self._submitted[p] = _Mark.of(p)
                self._computed.pop(p, None)
        if len(self._submitted) < self._awaited:
            return False
        return self._submitted.keys() >= set(filter(REQUIRES_GRAD, trained))

    @property
    def is_pending(self) -> bool:
        """Whether a gradient is computed and not averaged yet."""
        return bool(self._submitted or self._computed)

    def submitted(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are submitted to Horovod and not averaged yet."""
        return list(self._submitted)

    def accumulating(self) -> list[torch.Tensor]:
        """Return the parameters whose computed gradients wait for more backward passes or for their group."""
        return list(self._computed)

    def missing(self, parameters: Parameters) -> list[torch.Tensor]:
        """Return those of `parameters` that are not frozen and whose gradients Horovod lacks."""
        return [p for p in parameters if p.requires_grad and p not in self._submitted]

    def changed(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients the script changed or replaced before they were averaged."""
        marks = {**self._computed, **self._submitted}
        return [p for p, mark in marks.items() if not mark.is_as_it_was(p)]

    def average(self, parameters: Parameters, by_backward: bool) -> None:
        """Record that the gradients of `parameters` are averaged, in backward() or by a later call."""
        self.drop()
        self._averaged = {p: _Mark.of(p) for p in parameters}
        self.averaged, self.by_backward = True, by_backward

    def accumulated(self, parameters: Parameters) -> list[torch.Tensor]:
        """Return those of `parameters` whose new gradients were added to averages made by backward()."""
        if not self.by_backward:
            return []
        marks = self._averaged
        return [p for p in parameters if p in marks and p.grad is not None and marks[p].is_of(p)]

    def is_same(self, in_place: bool) -> bool:
        """Whether no averaged gradient was replaced by another tensor; with `in_place`, also none changed."""
        test = _Mark.is_as_it_was if in_place else _Mark.is_of
        return self.averaged and all(test(mark, p) for p, mark in self._averaged.items())

    def replaced(self, parameters: Parameters) -> list[torch.Tensor]:
        """Return gradients that the script has set in `parameters` in place of the averaged ones."""
        marks = self._averaged
        return [
            p.grad
            for p in parameters
            if p.grad is not None and not (p in marks and marks[p].is_of(p))
        ]

    def release(self) -> None:
        """Forget the averaged gradients, which step() has used or the script has dropped."""
        self.averaged = self.by_backward = False
        self._averaged.clear()

    def drop(self) -> None:
        """Forget the gradients that are not averaged."""
        self._submitted.clear()
        self._computed.clear()

    def forget(self) -> None:
        """Forget all gradients: averaged, submitted to Horovod and computed ones."""
        self.release()
        self.drop()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the tensors' bits: equal for bitwise equal tensors, 0 for no tensors."""
    total = 0
    for tensor in tensors:
        parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
        for part in parts:
            total += int(part.detach().view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64))
        total += 1
    return total % 2**62
