"""Gradient averaging in a super learner: these functions replace methods of Horovod's optimizer.

If all gradients are submitted, backward() waits for their averages at its end, as with DDP: so a script that
changes gradients before step() (clip, unscale, log, zero) handles the same values on all learners. If a
gradient is missing then (unused parameters, several backward passes), synchronize() or step() waits instead.

`self` is the wrapped optimizer; its `_gradients` tracks the submitted gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.amp import grad_scaler

from hvd_adpsgd.errors import (
    AdpsgdError,
    GradientOrderError,
)
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch.torch_group import abort_group, has_aborted
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.super_learner import SuperLearner
from hvd_adpsgd.training.supported import ddp_of

__all__ = [
    "Reducible",
    "allreduce_grad_async",
    "average_for_step",
    "completion_of",
    "drop_gradients",
    "drop_hooks",
    "first_by_name",
    "gradients_of",
    "grouped_allreduce_grad_async",
    "introduce",
    "is_compared",
    "lay_out_gradient",
    "refuse_different",
    "refuse_graphs",
    "require_no_handles",
    "submit_missing",
    "synchronize",
    "watch_computed",
]

# in the first steps, and then in each of so many, learners compare gradients that the script averages
_COMPARED_FIRST, _COMPARED_EVERY = 4, 64
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # between two looks at whether a GPU has averaged gradients


def allreduce_grad_async(self: Any, parameter: torch.Tensor) -> Any:
    return _submit(self, (parameter,), lambda h: h._allreduce_grad_async(self, parameter))


def grouped_allreduce_grad_async(self: Any, parameters: tuple[torch.Tensor, ...]) -> Any:
    return _submit(self, parameters, lambda h: h._grouped_allreduce_grad_async(self, parameters))


def _submit(self: Any, parameters: tuple[torch.Tensor, ...], submit: Callable[[Any], Any]) -> Any:
    """Submit gradients to Horovod; after the last one, let backward() wait for the averages at its end."""
    _before_gradient(self, parameters)
    for parameter in parameters:
        lay_out_gradient(parameter)
    with self._averaging.super_learner.reducing():
        handle = submit(self._horovod)
    is_last = self._gradients.submit(parameters, self._requires_update)
    # else submit_missing() has submitted the gradient of a frozen parameter
    in_backward = any(p.requires_grad for p in parameters)
    if is_last and in_backward and torch._C._current_graph_task_id() != -1:  # in backward()
        self._averaging.super_learner.mates.submitted()
        # autograd runs the callback in the thread of the last gradient, on a GPU not the caller's thread
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(_average_after_backward, self)
        )
    return handle


def _before_gradient(self: Any, parameters: tuple[torch.Tensor, ...]) -> None:
    """Call Averaging.before_gradient; if that raises at a step's first gradient, reset Horovod's counters."""
    try:
        _require_no_accumulation(self, parameters)
        self._averaging.before_gradient(len(parameters), len(self._requires_update))
    except AdpsgdError:
        if not self._handles:  # no all-reduce of another gradient is running
            for parameter in self._allreduce_delay:
                self._allreduce_delay[parameter] = self.backward_passes_per_step
            self._group_counts = dict.fromkeys(self._group_counts, 0)
        raise


def watch_computed(self: Any, nodes: Iterable[Any]) -> None:
    """Register hooks on autograd nodes that record each gradient which backward() has computed."""
    for node in nodes:
        node.register_hook(functools.partial(_note_computed, weakref.ref(self), node.variable))


def _note_computed(optimizer: weakref.ref[Any], parameter: torch.Tensor, *_: Any) -> None:
    if (self := optimizer()) is not None:
        self._gradients.computed(parameter)


def refuse_graphs(nodes: Iterable[Any]) -> None:
    """Register hooks that refuse backward(create_graph=True), as Horovod does without a text."""
    for node in nodes:
        node.register_prehook(_refuse_graph)


def _refuse_graph(gradients: Sequence[torch.Tensor | None]) -> None:
    if gradients[0] is not None and gradients[0].requires_grad:
        raise GradientOrderError(
            "backward(create_graph=True): a gradient that has a graph cannot be averaged in the super "
            "learner. Use torch.autograd.grad(loss, parameters, create_graph=True), add what is made of its "
            "result to the loss, and call backward() once."
        )


def introduce(self: Any, names: dict[torch.Tensor, str], is_averaged: bool) -> None:
    """Tell Horovod's wrapper of added parameters; with `is_averaged` it averages their gradients, too."""
    for parameter, name in names.items():
        self._parameter_names[parameter] = name
        self._allreduce_delay[parameter] = self.backward_passes_per_step
        if self._groups is not None:
            self._p_to_group[parameter] = (parameter,)
            self._group_counts[(parameter,)] = 0
    if is_averaged:
        _register_hooks(self, names)


def _register_hooks(self: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Register hooks that average gradients in the super learner as soon as backward() has computed them."""
    for parameter in parameters:
        if parameter.requires_grad:
            self._requires_update.add(parameter)
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            assert node is not None
            refuse_graphs([node])
            node.register_hook(self._make_hook(parameter))
            if hasattr(self, "_gradients"):  # not with one super learner
                watch_computed(self, [node])
            self._grad_accs.append(node)


def drop_hooks(wrapped: Any) -> None:
    """Drop the gradient hooks, by dropping the references to their autograd nodes.

    A loss that the script still holds keeps the nodes, with these hooks, and backward() of another graph uses
    them again: the hooks count down to their all-reduce, which never comes.
    """
    with contextlib.suppress(ReferenceError):  # the optimizer and its hooks are freed already
        wrapped._grad_accs.clear()
        wrapped._allreduce_delay = dict.fromkeys(wrapped._allreduce_delay, sys.maxsize)


def _average_after_backward(self: Any) -> None:
    """Average gradients at the end of backward(), unless a learner lacks some and waits for this one."""
    if not self._handles:  # no handles are left, as a hook has called step() or synchronize()
        return
    averaging = self._averaging
    others = [other.super_learner.mates for other in live() if other is not averaging]
    if averaging.super_learner.mates.all_submit(others, completion_of(self)):
        _average(self, by_backward=True)


def completion_of(self: Any) -> Callable[[], bool]:
    """Return a function that tells whether Horovod is done, also with an error, with submitted gradients."""
    handles = [h for handle, _ in self._handles.values() for h in _pollable(handle)]
    return lambda: all(map(horovod.poll, handles))


def _pollable(handle: Any) -> list[int]:
    """Return a gradient's Horovod handles; for a sparse one, those inside Horovod's returned function."""
    if isinstance(handle, int):
        return [handle]
    assert handle is not None, "every gradient is submitted"
    held = inspect.getclosurevars(handle).nonlocals
    return [value for name, value in held.items() if name.endswith("_handle")]


def synchronize(self: Any) -> None:
    """Wait until the gradients are averaged in the super learner; average them if backward() has not."""
    gradients = self._gradients
    if not self._averaging.spec.averages_gradients:
        self._averaging.require_running()
        self._synchronized = True
        return
    if gradients.averaged and gradients.by_backward and not self._handles:
        self._averaging.require_running()
        # as in Horovod, backward() may now add gradients to the averaged ones
        gradients.by_backward = False
        self._synchronized = True
        return
    _average(self)


def average_for_step(self: Any) -> None:
    """Average, in step(), gradients that are not averaged yet; inside skip_synchronize() raise instead."""
    gradients, averaging = self._gradients, self._averaging
    if not averaging.spec.averages_gradients:
        _meet_for_step(self)
        return
    if self._handles and not self._should_synchronize:
        raise GradientOrderError(
            f"step {averaging.step}: step() inside optimizer.skip_synchronize(), and gradients are not "
            "averaged: each learner would use its own. Call optimizer.synchronize() before it."
        )
    if self._should_synchronize and (self._handles or not gradients.averaged):
        _average(self, unscaled=bool(self._handles) and _is_called_by_scaler())
    if averaging.world.inner_size > 1:
        inner = averaging.super_learner
        inner.replacements.step(inner.mates.sets, gradients.replaced(_reduced(self)))
    gradients.release()
    self._synchronized = False


def _await_devices(self: Any, inner: SuperLearner) -> None:
    """Wait until GPUs have averaged the gradients: NCCL's operations end there, later than on the host.

    Raises:
        HorovodInternalError: if a learner of the super learner has failed meanwhile. Gradients may be those
            of an unfinished operation then.
    """
    parameters = (p for group in self.param_groups for p in group["params"])
    for device in {p.device for p in parameters if p.is_cuda}:
        averaged, pause = torch.cuda.current_stream(device).record_event(), _SHORTEST_S
        while not averaged.query():
            if inner.has_failed():  # the operation would not end, nor what waits for the GPU
                abort_group(inner.world)
                inner.require_alive()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_S)
    if has_aborted(inner.world):
        raise horovod.HorovodInternalError("a learner has ended, or an operation has failed")


def _meet_for_step(self: Any) -> None:
    """Wait for the mates of a step whose gradients the script has averaged; compare them in some steps.

    Raises:
        GradientOrderError: on all learners of the super learner, if their gradients differ.
        LearnerFailedError: if a learner of the super learner has ended.
    """
    averaging, inner = self._averaging, self._averaging.super_learner
    number = inner.mates.sets
    alike = averaging.world.inner_size > 1 and not averaging.spec.is_sharded
    compares = alike and is_compared(number)
    if averaging.owes_nonfinite:
        inner.mates.refuses()
    averaging.before_gradient(0, 0)  # publishes corrections
    if averaging.world.inner_size > 1:
        with inner.reducing():
            _await_devices(self, inner)
    if compares:
        inner.replacements.step(number, gradients_of(self))
    with averaging.reducing(len(self._allreduce_delay), are_averaged=inner.has_failed):
        inner.require_alive()
    self._synchronized = False
    averaging.require_finite_shards()
    if compares and inner.replacements.differ(number):
        refuse_different(self, averaging.step, averaging.world.super_rank)


def is_compared(number: int) -> bool:
    """Whether learners compare their gradients, which the script averages, in step `number`."""
    return number < _COMPARED_FIRST or number % _COMPARED_EVERY == 0


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that the optimizer's parameters have."""
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def refuse_different(optimizer: torch.optim.Optimizer, step: int, super_rank: int) -> NoReturn:
    """Raise GradientOrderError: the script averages gradients, and the learners have different ones."""
    where = f"step {step}: the gradients differ between the learners of super learner {super_rank}"
    if ddp_of({p for group in optimizer.param_groups for p in group["params"]}) is not None:
        raise GradientOrderError(
            f"{where}: DistributedDataParallel has not averaged all of them, as a parameter got none in this "
            "backward pass, or it ran in no_sync(). Use all parameters in each forward pass, pass "
            "find_unused_parameters=True, or leave no_sync() before the last backward pass. Nothing was "
            "applied."
        )
    raise GradientOrderError(
        f"{where}: the script does not average them (average_gradients=False). Average them before step(), "
        "put DistributedDataParallel over hvd.super_learner_group() around the model, or leave the argument "
        "out. Nothing was applied."
    )


def _is_called_by_scaler() -> bool:
    """Whether GradScaler calls step(): then it has unscaled gradients without incrementing their version."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == grad_scaler.__file__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


def _average(self: Any, by_backward: bool = False, unscaled: bool = False) -> None:
    """Submit missing gradients to Horovod, and wait until all are averaged.

    Args:
        self: the wrapped optimizer.
        by_backward: whether this is called at the end of backward().
        unscaled: whether GradScaler has changed the gradients since they were submitted.

    Raises:
        GradientOrderError: if the script has changed gradients between backward() and this call. All-reduces
            that are running end first.
    """
    gradients, averaging = self._gradients, self._averaging
    mates = averaging.super_learner.mates
    _require_no_accumulation(self, self._handles)
    changed = gradients.changed()
    if unscaled:
        changed = gradients.submitted() + gradients.accumulating()
    if changed and not gradients.submitted():  # no all-reduce is running
        accumulated = gradients.accumulating()
        drop_gradients(self)
        gradients.forget()
        _refuse_early(self, changed, accumulated)
    missing = gradients.missing(self._requires_update) if changed else []
    again = not self._handles and gradients.is_same(in_place=averaging.world.inner_size == 1)
    gradients.release()
    for parameter in changed:
        lay_out_gradient(parameter)  # the all-reduce needs a gradient tensor to overwrite
    if changed:
        mates.refuses()
    submit_missing(self)
    # backward() has waited for the other learners
    are_averaged = None if by_backward else completion_of(self)
    with averaging.reducing(len(self._requires_update), again, are_averaged):
        self._horovod.synchronize(self)
    refusing = mates.refusing()
    differ = averaging.super_learner.replacements.differ(mates.sets - 1)
    if refusing or differ:
        gradients.forget()
    if differ:
        _refuse_replaced(self)
    if changed:
        _refuse_changed(self, changed, missing, by_backward)
    if refusing:
        _refuse_with(self, refusing[0])
    gradients.average(_reduced(self), by_backward)


def submit_missing(self: Any) -> None:
    """Submit the gradients that Horovod lacks, as Horovod's synchronize() does before it waits."""
    sent: set[torch.Tensor] = set()
    for key, (handle, _) in self._handles.items():
        if handle is not None:
            sent.update(key if isinstance(key, tuple) else (key,))
    for parameter in self._requires_update - sent:
        self._handles[parameter] = self._allreduce_grad_async(parameter)


def _reduced(self: Any) -> Iterable[torch.Tensor]:
    """Return the parameters whose averaged gradients are checked later for changes; () if none are checked.

    The checks detect gradients that the script has replaced, in a super learner of several learners, and a
    repeated synchronize() with a strategy in step.
    """
    if self._averaging.world.inner_size == 1 and self._averaging.plan.in_step is None:
        return ()
    return self._requires_update or self._allreduce_delay


def _require_no_accumulation(self: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Raise GradientOrderError if backward() has added new gradients to averaged ones before step()."""
    added = self._gradients.accumulated(parameters)
    if added:
        raise GradientOrderError(
            f"step {self._averaging.step}: the gradient of {first_by_name(self, added)} was computed more "
            f"than backward_passes_per_step={self.backward_passes_per_step} times before step(), and added "
            "to one that is averaged. Increase backward_passes_per_step to accumulate gradients, or call "
            "optimizer.zero_grad() before backward() if a step is skipped."
        )


def require_no_handles(self: Any) -> None:
    if self._handles:
        raise GradientOrderError(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
            "optimizer.synchronize(), and the gradients are not averaged yet. Call optimizer.synchronize() "
            "before a step is skipped (GradScaler does for infinite gradients) and after an exception in "
            "backward(); or raise backward_passes_per_step, if more backward passes follow."
        )


def first_by_name(self: Any, parameters: list[torch.Tensor]) -> str:
    """Return the name of the first of `parameters`, and how many more there are, for messages."""
    others = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
    return f"{self._parameter_names.get(parameters[0])!r}{others}"


def _refuse_changed(
    self: Any, changed: list[torch.Tensor], missing: list[torch.Tensor], by_backward: bool
) -> None:
    why = "another learner of the super learner was in another operation"
    if missing:
        count = f"{len(missing)} of {len(self._requires_update)} parameters"
        why = f"{count} got no gradient ({first_by_name(self, missing)})"
    if by_backward:
        why = "a hook changed it inside backward()"
    raise GradientOrderError(
        f"step {self._averaging.step}: the gradient of {first_by_name(self, changed)} was changed while the "
        f"super learner averaged it: backward() had not waited for the average, because {why}. Call "
        "optimizer.synchronize() after backward(), before gradients are changed; or freeze parameters that "
        "the loss does not use (requires_grad_(False))."
    )


def _refuse_early(self: Any, changed: list[torch.Tensor], accumulated: list[torch.Tensor]) -> None:
    raise GradientOrderError(
        f"step {self._averaging.step}: the gradient of {first_by_name(self, changed)} was changed before the "
        f"super learner averaged it: {first_by_name(self, accumulated)} waited for more backward passes "
        f"(backward_passes_per_step={self.backward_passes_per_step}), or for other gradients of its group. "
        "Call optimizer.synchronize() before gradients are clipped or unscaled, where an epoch may end with "
        "fewer passes. Nothing was applied."
    )


def _refuse_replaced(self: Any) -> None:
    raise GradientOrderError(
        f"step {self._averaging.step}: in the step before, gradients that were averaged had been replaced "
        "(p.grad = ...), and the learners of this super learner stepped with different ones: their models "
        "differ now. Change gradients in place, alike on all learners; or call optimizer.zero_grad() before "
        "you set them, and step() averages them. Load a checkpoint, or call hvd.broadcast_parameters."
    )


def _refuse_with(self: Any, mate: int) -> None:
    world = self._averaging.world
    raise GradientOrderError(
        f"step {self._averaging.step}: learner {world.groups[world.super_rank][mate]}, of the same super "
        "learner, changed gradients while they were averaged, so no learner of it steps with them. See the "
        "error of that learner."
    )


def lay_out_gradient(parameter: torch.Tensor) -> None:
    """Make a parameter's gradient contiguous, as Horovod requires; torch gives it the parameter's strides."""
    grad = parameter.grad
    if grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif not grad.is_sparse and not grad.is_contiguous():
        parameter.grad = grad.contiguous()


class Reducible:
    """The user's compression, which reduces bfloat16 gradients as float32: Horovod cannot reduce bfloat16.

    Horovod gets an alias of the gradient with a separate version counter. Horovod mostly writes to the memory
    without torch, but without NCCL it copies its result to a GPU by an in-place operation, which would
    otherwise count as a change by the script.
    """

    def __init__(self, compression: Any):
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        compressed, context = self._compression.compress(tensor)
        widened = compressed.dtype == torch.bfloat16
        return compressed.float() if widened else compressed.data, (widened, context)

    def decompress(self, tensor: torch.Tensor, context: tuple[bool, Any] | None) -> torch.Tensor:
        if context is None:  # a sparse gradient, which Horovod never compresses
            return tensor
        widened, inner = context
        narrow = tensor.to(torch.bfloat16) if widened else tensor
        return self._compression.decompress(narrow, inner)


def drop_gradients(self: Any) -> None:
    """Forget gradients that wait for a step, as Horovod does; waits for running all-reduces first."""
    running = {key: handle for key, (handle, _) in self._handles.items() if handle is not None}
    if running:
        sent = sum(len(key) if isinstance(key, tuple) else 1 for key in running)
        averaging = getattr(self, "_averaging", None)
        total = len(self._requires_update) if sent == len(self._requires_update) else 0
        with averaging.reducing(total) if averaging else contextlib.nullcontext():
            for handle in running.values():
                handle() if callable(handle) else horovod.synchronize(handle)
    self._handles.clear()
    self._synchronized, self._should_synchronize = False, True
    for parameter in self._allreduce_delay:
        self._allreduce_delay[parameter] = self.backward_passes_per_step
    self._group_counts = dict.fromkeys(self._group_counts, 0)
