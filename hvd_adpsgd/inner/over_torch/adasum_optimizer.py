"""Horovod's Adasum optimizer: backward() steps each parameter, and combines the steps of the learners."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_adpsgd.inner.over_torch.names import Adasum
from hvd_adpsgd.inner.over_torch.operations import allreduce_async_, synchronize

__all__ = ["AdasumMethods"]


class AdasumMethods:
    """Methods that replace those of the wrapped optimizer, where op=Adasum.

    `_starting_models` has a tensor for each parameter: its value before the step.

    Source: Maleki et al., arXiv:2006.02924.
    """

    _starting_models: dict[torch.Tensor, torch.Tensor]

    def _allreduce_grad_async(self: Any, parameter: torch.Tensor) -> Any:
        """Step `parameter` alone, and begin to combine its change with those of the other learners."""
        start = self._starting_models[parameter]
        start.data.copy_(parameter)
        whole = [group["params"] for group in self.param_groups]
        for group, its in zip(self.param_groups, whole, strict=True):
            group["params"] = [p for p in its if p is parameter]
        super(self.__class__, self).step()  # type: ignore[misc]
        for group, its in zip(self.param_groups, whole, strict=True):
            group["params"] = its
        parameter.data.sub_(start)
        compressed, context = self._compression.compress(parameter)
        name = self._parameter_names.get(parameter)
        return allreduce_async_(compressed.data, name=name, op=Adasum), context

    def synchronize(self: Any) -> None:
        """Do nothing: step() waits."""

    @contextlib.contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """Raise: step() cannot be left out."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield  # type: ignore[unreachable]

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined steps, and add them to the parameters."""
        loss = None if closure is None else closure()
        for parameter in self._requires_update - set(self._handles):
            self._handles[parameter] = (None, None)
        for parameter, (handle, context) in self._handles.items():
            if handle is None:
                handle, context = self._allreduce_grad_async(parameter)
            change = self._compression.decompress(synchronize(handle), context)
            start = self._starting_models[parameter]
            start.data.add_(change.data)
            parameter.data.copy_(start)
            self._allreduce_delay[parameter] = self.backward_passes_per_step
        self._handles.clear()
        return loss
