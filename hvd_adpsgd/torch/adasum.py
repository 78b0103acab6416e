"""op=Adasum, with Horovod inside: backward() steps each parameter, and the learners' steps are combined.

Source: Maleki et al., arXiv:2006.02924.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_adpsgd.errors import GradientOrderError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.inner_averaging import AveragingReducer
from hvd_adpsgd.training.reducer import Group, Running


class AdasumReducer(AveragingReducer):
    """Combines the steps that parameters make alone. From backward() to step() a parameter holds its change.

    Attributes:
        averaging: None in a job of one super learner.
        step_alone: makes a step of the optimizer; set before `start`.
    """

    averaging: Averaging | None = None  # type: ignore[assignment]
    step_alone: Callable[[], object]

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.process_set != horovod.global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        self._starts: dict[torch.Tensor, torch.Tensor] = {}  # parameters before the step

    def start(self, averages: bool) -> None:
        super().start(averages)
        if self.averaging is not None:
            self.averaging.changing = self._starts
        for p in self.trained:
            p.grad = torch.zeros_like(p, requires_grad=False)

    def _submit(self, group: Group) -> None:
        if self.averaging is None:
            group.running = self._begin(group.parameters)
        else:
            self.averaging.before_gradient(1, len(self.trained))
            self.averaging.tensors.before_update()
            with self.averaging.super_learner.reducing():
                group.running = self._begin(group.parameters)
            self.gradients.submit(group.parameters, self.trained)
        self._submitted.append(group)

    @torch.no_grad()
    def _begin(self, parameters: tuple[torch.Tensor, ...]) -> list[Running]:
        """Step a parameter alone, and begin to combine its change with those of the other learners."""
        (parameter,) = parameters
        start = self._starts[parameter] = parameter.detach().clone()
        whole = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p is parameter]
        with torch.enable_grad():
            self.step_alone()
        for group, params in zip(self.param_groups, whole, strict=True):
            group["params"] = params
        parameter.sub_(start)
        compressed, context = self._compression.compress(parameter.detach())
        name = self.names[parameter]
        handle = horovod.allreduce_async_(compressed, name=name, op=horovod.Adasum)
        return [Running(parameters, (handle,), (context,))]

    @torch.no_grad()
    def _finish(self, running: Running) -> None:
        (parameter,), (handle,), (context,) = running
        change = self._compression.decompress(horovod.synchronize(handle), context)
        parameter.copy_(self._starts.pop(parameter).add_(change))

    def synchronize(self) -> None:
        """Do nothing: step() waits."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield  # type: ignore[unreachable]

    def drop(self) -> None:
        """Do nothing: parameters hold changes until step()."""

    def step(self, averaging: Averaging | None, closure: Callable[[], Any] | None) -> Any:
        """Wait for the combined steps, and add them to the parameters; return the closure's loss."""
        if averaging is None:
            return self._reduced_after(closure)
        with averaging.stepping(self.param_groups):
            changed = [] if closure else self.gradients.changed()
            self.gradients.forget()
            if changed:
                raise GradientOrderError(
                    f"step {averaging.step}: the gradient of {self.first_by_name(changed)} was changed after "
                    "backward(), without effect: op=Adasum uses gradients inside backward(). Change them in "
                    "a hook, by Parameter.register_post_accumulate_grad_hook before "
                    "hvd.DistributedOptimizer, or use op=Average."
                )
            if closure is None:
                self.submit_missing()
            are_averaged = None if closure else self.is_reduced
            with averaging.reducing(len(self.trained), are_averaged=are_averaged):
                loss = self._reduced_after(closure)
            self.gradients.forget()
            averaging.finish_step()
            return loss

    def _reduced_after(self, closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else closure()
        self.reduce()
        self.is_synchronized = False
        return loss


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    return self._reducer.step(self._averaging, closure)


_step.hooked = True  # type: ignore[attr-defined]  # parameters step by themselves, with torch's hooks

ADASUM_METHODS = {"step": _step}
