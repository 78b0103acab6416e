"""The gradients of one step: submitted to Horovod, averaged, used or dropped."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import shared_counters

__all__ = ["Gradients", "Replacements"]

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
        self._awaited = 0  # how many gradients the next average needs
        self._computed: dict[torch.Tensor, _Mark] = {}
        self._submitted: dict[torch.Tensor, _Mark] = {}
        self._averaged: dict[torch.Tensor, _Mark] = {}

    def computed(self, parameter: torch.Tensor) -> None:
        """backward() has computed this gradient, or added to it; Horovod has it already or later."""
        if parameter not in self._submitted:
            self._computed[parameter] = _Mark.of(parameter)

    def submit(self, parameters: Parameters, trained: Collection[torch.Tensor]) -> bool:
        """The gradients of these are with Horovod.

        Args:
            parameters: these.
            trained: all parameters of the optimizer that are averaged.

        Returns:
            Whether these were the last: only frozen parameters (requires_grad=False) are missing.
        """
        self.averaged = False
        if not self._submitted:
            self._awaited = sum(p.requires_grad for p in trained)
        for p in parameters:
            self._submitted[p] = _Mark.of(p)
            self._computed.pop(p, None)
        return len(self._submitted) >= self._awaited and all(
            p in self._submitted for p in trained if p.requires_grad
        )

    def submitted(self) -> list[torch.Tensor]:
        """Parameters whose gradients are with Horovod."""
        return list(self._submitted)

    def accumulating(self) -> list[torch.Tensor]:
        """Parameters whose gradients wait for more backward passes, or for others of their group."""
        return list(self._computed)

    def missing(self, parameters: Parameters) -> list[torch.Tensor]:
        """Those whose gradients are not with Horovod, and are not frozen."""
        return [p for p in parameters if p.requires_grad and p not in self._submitted]

    def changed(self) -> list[torch.Tensor]:
        """Parameters whose gradients were changed or replaced since backward(), and are not averaged yet."""
        marks = {**self._computed, **self._submitted}
        return [p for p, mark in marks.items() if not mark.is_as_it_was(p)]

    def average(self, parameters: Parameters, by_backward: bool) -> None:
        """The gradients of these parameters are averaged."""
        self._submitted.clear()
        self._computed.clear()
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

    def replaced(self, parameters: Parameters) -> list[torch.Tensor]:
        """Gradients that are other tensors than those that were averaged."""
        marks = self._averaged
        return [
            p.grad
            for p in parameters
            if p.grad is not None and not (p in marks and marks[p].is_of(p))
        ]

    def release(self) -> None:
        """They are used or dropped: new ones may come."""
        self.averaged = self.by_backward = False
        self._averaged.clear()

    def forget(self) -> None:
        """Also what is with Horovod is dropped."""
        self.release()
        self._submitted.clear()
        self._computed.clear()


_STEPPED, _BITS = range(2)  # columns
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replacements:
    """Whether the learners of a super learner step with the same gradients, if these replace averaged ones.

    Each notes in shared memory with which it steps, and all compare after their next all-reduce, in which
    every learner takes part only after its step. So nobody waits, and all find the same. A note stays until
    the set after the next one, for which every learner must have compared: two rows are enough.

    Args:
        inner: communicator of the super learner (mpi4py).
        rank: of this learner in it.
    """

    def __init__(self, inner: Any, rank: int):
        self._rows: NDArray[np.int64] = shared_counters(4, inner).reshape(-1, 2, 2)
        self._mine = self._rows[rank]

    def step(self, sets: int, replaced: Iterable[torch.Tensor]) -> None:
        """Note that this learner steps with these instead of averaged gradients, after so many sets."""
        self._mine[sets % 2] = sets + 1, _bits(replaced)

    def differ(self, sets: int) -> bool:
        """Whether learners stepped with different ones after so many sets."""
        rows = self._rows[:, sets % 2]
        return len(set(rows[rows[:, _STEPPED] == sets + 1, _BITS])) > 1


def _bits(tensors: Iterable[torch.Tensor]) -> int:
    """Equal for bit-identical tensors; 0 for none."""
    total = 0
    for tensor in tensors:
        parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
        for part in parts:
            total += int(part.detach().view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64))
        total += 1
    return total % 2**62
