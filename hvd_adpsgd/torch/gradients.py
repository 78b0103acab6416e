"""The gradients of one step: submitted to Horovod, averaged, used or dropped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__ = ["Gradients"]

Parameters = Iterable[torch.Tensor]


class _Mark(NamedTuple):
    """A gradient at one moment; torch counts up the version when the tensor is changed in place."""

    grad: weakref.ref[torch.Tensor] | None
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Mark:
        grad = parameter.grad
        return cls(None, 0) if grad is None else cls(weakref.ref(grad), grad._version)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter still has this gradient, changed or not."""
        if self.grad is None or parameter.grad is None:
            return self.grad is None and parameter.grad is None
        return self.grad() is parameter.grad

    def is_as_it_was(self, parameter: torch.Tensor) -> bool:
        """Whether it has this gradient, and the gradient is not changed."""
        grad = parameter.grad
        return self.is_of(parameter) and (grad is None or grad._version == self.version)


class Gradients:
    """What has become of the gradients of one optimizer since its last step.

    torch does not count changes by GradScaler.unscale_, by `.data` and by NumPy, so they are not noticed.

    Attributes:
        averaged: they are averaged, and neither used nor dropped since.
        by_backward: backward() has averaged them, and synchronize() was not called since.
    """

    def __init__(self) -> None:
        self.averaged = self.by_backward = False
        self._submitted: dict[torch.Tensor, _Mark] = {}
        self._averaged: dict[torch.Tensor, _Mark] = {}

    def submit(self, parameters: Parameters) -> int:
        """The gradients of these are with Horovod. Returns how many are, for the next average."""
        self.averaged = False
        self._submitted.update((p, _Mark.of(p)) for p in parameters)
        return len(self._submitted)

    def submitted(self) -> list[torch.Tensor]:
        """Parameters whose gradients are with Horovod."""
        return list(self._submitted)

    def missing(self, parameters: Parameters) -> list[torch.Tensor]:
        """Those whose gradients are not with Horovod."""
        return [p for p in parameters if p not in self._submitted]

    def changed(self) -> list[torch.Tensor]:
        """Parameters whose gradients are with Horovod and were changed or replaced meanwhile."""
        return [p for p, mark in self._submitted.items() if not mark.is_as_it_was(p)]

    def average(self, parameters: Parameters, by_backward: bool) -> None:
        """The gradients of these parameters are averaged."""
        self._submitted.clear()
        self._averaged = {p: _Mark.of(p) for p in parameters}
        self.averaged, self.by_backward = True, by_backward

    def accumulated(self, parameters: Parameters) -> list[torch.Tensor]:
        """Those of new gradients that were added to what backward() has averaged."""
        if not self.by_backward:
            return []
        marks = self._averaged
        return [p for p in parameters if p in marks and p.grad is not None and marks[p].is_of(p)]

    def is_same(self, in_place: bool) -> bool:
        """Whether no averaged gradient was replaced; with `in_place`, nor changed."""
        test = _Mark.is_as_it_was if in_place else _Mark.is_of
        return self.averaged and all(test(mark, p) for p, mark in self._averaged.items())

    def release(self) -> None:
        """They are used or dropped: new ones may come."""
        self.averaged = self.by_backward = False
        self._averaged.clear()

    def forget(self) -> None:
        """Also what is with Horovod is dropped."""
        self.release()
        self._submitted.clear()
