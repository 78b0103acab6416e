"""Methods of an optimizer wrapped with op=Adasum: Horovod steps its parameters inside backward()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_adpsgd.errors import (
    GradientOrderError,
    UnsupportedOptimizerError,
)
from hvd_adpsgd.training.inner_averaging import (
    completion_of,
    first_by_name,
    submit_missing,
)

__all__ = ["ADASUM_METHODS"]


def _adasum_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Do the step of a wrapped Adasum optimizer, whose parameters have stepped inside backward()."""
    averaging = self._averaging
    with averaging.stepping(self.param_groups):
        changed = [] if closure else self._gradients.changed()
        self._gradients.forget()
        if changed:
            raise GradientOrderError(
                f"step {averaging.step}: the gradient of {first_by_name(self, changed)} was changed after "
                "backward(), without effect: op=Adasum uses gradients inside backward(). Change them in "
                "Parameter.register_post_accumulate_grad_hook, or use op=Average."
            )
        if closure is None:
            submit_missing(self)
        are_averaged = None if closure else completion_of(self)
        with averaging.reducing(len(self._requires_update), are_averaged=are_averaged):
            loss = self._horovod.step(self, closure)
        self._gradients.forget()
        averaging.finish_step()
        return loss


def _adasum_allreduce(self: Any, parameter: torch.Tensor) -> Any:
    self._averaging.before_gradient(1, len(self._requires_update))
    self._averaging.tensors.before_update()
    with self._averaging.super_learner.reducing():
        handle = self._horovod._allreduce_grad_async(self, parameter)
    self._gradients.submit((parameter,), self._requires_update)
    return handle


def _refuse_group(self: Any) -> None:
    raise UnsupportedOptimizerError(
        "add_param_group with op=Adasum, for which Horovod keeps a tensor per parameter: wrap a new "
        "optimizer with all groups instead."
    )


def _nothing(self: Any) -> None:
    """Do nothing: the parameters hold differences until step()."""


ADASUM_METHODS = {
    "step": _adasum_step,
    "synchronize": _nothing,
    "_require_extensible": _refuse_group,
    "_drop_gradients": _nothing,
    "_allreduce_grad_async": _adasum_allreduce,
}
