"""Averages the gradients of one optimizer in its super learner: names, order and errors are Horovod's.

A hook on each parameter submits its gradient to the backend's all-reduce when backward() has computed it for
the last time before a step. `reduce` submits the rest, and waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from hvd_adpsgd.errors import GradientOrderError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.training.gradients import REQUIRES_GRAD, Gradients

Named = Iterable[tuple[str, torch.Tensor]]


class Group:
    """Parameters whose gradients are reduced together.

    Attributes:
        parameters: the parameters.
        awaited: number of gradients that backward() has yet to compute; None: it has computed none.
        running: their all-reduces, if the gradients are submitted.
    """

    __slots__ = ("awaited", "parameters", "running")

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self.parameters = tuple(parameters)
        self.awaited: int | None = None
        self.running: list[Running] = []


class Running(NamedTuple):
    """An all-reduce that runs.

    Attributes:
        parameters: those whose gradients it reduces; a sparse gradient is alone.
        handles: the backend's handles: one, or two gathers of values and indices of a sparse gradient.
        contexts: of the compression, by parameter; () for a sparse gradient.
    """

    parameters: Sequence[torch.Tensor]
    handles: tuple[int, ...]
    contexts: Sequence[Any]


class Reducer:
    """Averages the gradients of one optimizer. Made by all learners of the super learner together.

    `start` registers the hooks.

    Args:
        param_groups: the optimizer's.
        named_parameters: (name, parameter) of all parameters, or None.
        others: arguments of Horovod's DistributedOptimizer.

    Attributes:
        names: name of each parameter, in messages and for the backend.
        passes: backward passes whose gradients one step adds up.
        trained: the parameters whose gradients are averaged: none before `start`.
        hooks: of these parameters.
        gradients: what has become of the gradients since the last step.
        is_synchronized: whether the gradients are averaged, by a call of synchronize(), and not used yet.
        synchronizes: whether step() averages gradients: not inside skip_synchronize().

    Raises:
        ValueError: for arguments that Horovod refuses.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        named_parameters: Named | None,
        *,
        compression: Any,
        backward_passes_per_step: int,
        op: Any,
        gradient_predivide_factor: float,
        num_groups: int,
        groups: Any,
        sparse_as_dense: bool,
        process_set: Any,
    ):
        if gradient_predivide_factor != 1.0 and op != horovod.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        if num_groups:
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0. Use "
                "`groups`.",
                DeprecationWarning,
                stacklevel=4,
            )
            groups = num_groups if groups is None else groups
        _require_groups(groups)
        self.param_groups = param_groups
        self.names = _names(named_parameters, param_groups)
        self.passes = backward_passes_per_step
        self.trained: dict[torch.Tensor, None] = {}
        self.hooks: list[RemovableHandle] = []
        self.gradients = Gradients()
        self.is_synchronized, self.synchronizes = False, True
        self._compression = Reducible(compression)
        self._sparse_as_dense, self._wanted, self.process_set = sparse_as_dense, groups, process_set
        factor = gradient_predivide_factor
        self._how = {
            "op": op,
            "prescale_factor": 1 / factor,
            "postscale_factor": factor,
            "process_set": process_set,
        }
        self._averages = False
        self._groups: list[Group] = []
        self._group: dict[torch.Tensor, Group] = {}
        self._left: dict[torch.Tensor, int] = {}  # backward passes before a gradient is submitted
        self._submitted: list[Group] = []
        weakref.finalize(self, remove, self.hooks).atexit = False

    def start(self, averages: bool) -> None:
        """Register the hooks, if the library `averages` gradients and there are other learners."""
        several = horovod.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"
        self._averages = averages and several and self.process_set.included()
        if self._averages:
            trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
            self._register(self._formed(trained))

    def extend(self, names: dict[torch.Tensor, str]) -> None:
        """Average the gradients of further parameters, too, each by itself."""
        self.names.update(names)
        if self._averages:
            self._register((p,) for p in names if p.requires_grad)

    def _register(self, groups: Iterable[Iterable[torch.Tensor]]) -> None:
        hook = _Hook(self)
        for group in map(Group, groups):
            self._groups.append(group)
            for p in group.parameters:
                self.trained[p], self._left[p], self._group[p] = None, self.passes, group
                self.hooks.append(p.register_post_accumulate_grad_hook(hook))

    def _formed(self, trained: list[torch.Tensor]) -> Iterable[Iterable[torch.Tensor]]:
        """Return groups of these parameters, whose order is that of the first learner."""
        if self._wanted is None:
            return _buckets(trained, horovod.BUCKET_NBYTES)
        names = [self.names[p] for p in trained]
        names = horovod.broadcast_object(names, root_rank=0, process_set=self.process_set)
        places = {name: i for i, name in enumerate(names)}
        place_of = {p: places[self.names[p]] for p in trained}
        ordered = sorted(trained, key=lambda p: place_of[p])
        if isinstance(self._wanted, list):
            kept = [[p for p in group if p in place_of] for group in self._wanted]
            grouped = {p for group in kept for p in group}
            return [*filter(None, kept), *((p,) for p in ordered if p not in grouped)]
        each, more = divmod(len(ordered), self._wanted)
        ends = [i * each + min(i, more) for i in range(self._wanted + 1)]
        return filter(None, (ordered[a:b] for a, b in itertools.pairwise(ends)))

    def set_passes(self, passes: int) -> None:
        """Add up the gradients of this number of backward passes from now on."""
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def close(self) -> None:
        """Remove the hooks."""
        remove(self.hooks)

    # ---- backward() -----------------------------------------------------------------------------

    def computed(self, parameter: torch.Tensor) -> None:
        """Count a backward pass that has computed this gradient; submit its group after the last one."""
        assert parameter.grad is not None
        if parameter.grad.requires_grad:
            raise GradientOrderError(
                "backward(create_graph=True): a gradient that has a graph cannot be averaged in the super "
                "learner. Use torch.autograd.grad(loss, parameters, create_graph=True), add what is made of "
                "its result to the loss, and call backward() once."
            )
        left = self._left[parameter]
        if left <= 0:
            raise AssertionError(  # Horovod's words
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._left[parameter] = left - 1
        if left > 1:
            self.gradients.computed(parameter)
            return
        lay_out_gradients((parameter,))
        self.gradients.submit((parameter,), self.trained)
        group = self._group[parameter]
        if group.awaited is None:
            group.awaited = sum(map(REQUIRES_GRAD, group.parameters))
        group.awaited -= 1
        if group.awaited <= 0:
            self._submit(group)

    def _submit(self, group: Group) -> None:
        """Begin to reduce the gradients of a group; one that backward() has not computed is 0."""
        lay_out_gradients(group.parameters)
        group.running = self._begin(group.parameters)
        self._submitted.append(group)

    def _begin(self, parameters: tuple[torch.Tensor, ...]) -> list[Running]:
        dense, tensors, contexts, running = [], [], [], []
        for p in parameters:
            grad: Any = p.grad
            if grad.is_sparse and not self._sparse_as_dense:
                running.append(self._gather(p))
                continue
            given = grad.to_dense() if grad.is_sparse else grad
            tensor, context = self._compression.compress(given)
            dense.append(p)
            tensors.append(tensor)
            contexts.append(context)
        if len(parameters) == 1 and dense:
            handle = horovod.allreduce_async_(tensors[0], name=self.names[dense[0]], **self._how)
        elif dense:
            handle = horovod.grouped_allreduce_async_(
                tensors, name=self.names[dense[0]], **self._how
            )
        if dense:
            running.append(Running(dense, (handle,), contexts))
        return running

    def _gather(self, parameter: torch.Tensor) -> Running:
        """Begin to add up a sparse gradient: values and indices of all learners, one behind the other."""
        grad: Any = parameter.grad
        name = self.names[parameter]
        how = {"process_set": self.process_set}
        indices = grad._indices().t().contiguous()
        handles = (
            horovod.allgather_async(grad._values(), name=f"{name}.values", **how),
            horovod.allgather_async(indices, name=f"{name}.indices", **how),
        )
        return Running((parameter,), handles, ())

    # ---- the averages ---------------------------------------------------------------------------

    @property
    def is_submitted(self) -> bool:
        """Whether all gradients are submitted, and not averaged yet."""
        return bool(self._submitted) and len(self._submitted) == len(self._groups)

    def is_reduced(self) -> bool:
        """Whether the backend is done, also with an error, with all submitted gradients."""
        running = itertools.chain(*(group.running for group in self._submitted))
        return all(horovod.poll(handle) for each in running for handle in each.handles)

    def submit_missing(self) -> None:
        """Submit the gradients that are not submitted yet; one that backward() has not computed is 0."""
        for group in self._groups:
            if not group.running:
                self._submit(group)

    def reduce(self) -> None:
        """Submit what is not submitted, and wait until all gradients are averaged."""
        self.submit_missing()
        self.finish()

    synchronize = reduce

    def finish(self) -> None:
        """Wait for the submitted gradients, and give them their averages."""
        for group in self._submitted:
            for running in group.running:
                self._finish(running)
        self._reset()
        self.is_synchronized = True

    def _finish(self, running: Running) -> None:
        results = [horovod.synchronize(handle) for handle in running.handles]
        if not running.contexts:
            (values, indices), grad = results, running.parameters[0].grad
            assert grad is not None
            if self._how["op"] == horovod.Average:
                values = values / self.process_set.size()
            total = torch.sparse_coo_tensor(indices.t(), values, grad.size(), device=grad.device)
            _set(grad, total)
            return
        outputs = results[0] if isinstance(results[0], (list, tuple)) else results
        for p, output, context in zip(running.parameters, outputs, running.contexts, strict=True):
            grad = p.grad
            assert grad is not None
            if context is not None:
                output = self._compression.decompress(output, context)
            # most are reduced in place
            in_place = not grad.is_sparse and output.data_ptr() == grad.data_ptr()
            if not (in_place and output.stride() == grad.stride()):
                _set(grad, output)

    def _reset(self) -> None:
        """Wait for gradients of the next backward passes."""
        for group in self._groups:
            group.awaited, group.running = None, []
        self._submitted.clear()
        self.gradients.drop()
        self._left = dict.fromkeys(self._left, self.passes)

    # ---- what the script calls ------------------------------------------------------------------

    def before_step(self) -> None:
        """Average the gradients for step(), also after synchronize(), as Horovod does."""
        if self.synchronizes:
            if self.is_synchronized:
                warnings.warn(
                    # Horovod's words, which scripts filter by; then this library's
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider "
                    "using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your "
                    "code. "
                    "Put step() in `with optimizer.skip_synchronize():`, or it averages the gradients again.",
                    stacklevel=4,  # the line that calls step()
                )
            self.synchronize()
        self.is_synchronized = False

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which step() averages nothing, after synchronize()."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def before_zero_grad(self) -> None:
        """Raise GradientOrderError if gradients are not averaged yet."""
        if self.gradients.is_pending:
            raise GradientOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(), and the gradients are not averaged yet. Call "
                "optimizer.synchronize() before a step is skipped (GradScaler does for infinite gradients) "
                "and after an exception in backward(); or raise backward_passes_per_step, if more backward "
                "passes follow."
            )

    def drop(self) -> None:
        """Forget gradients that wait for a step, as Horovod does; wait for running all-reduces first."""
        for group in self._submitted:
            for running in group.running:
                for handle in running.handles:
                    horovod.synchronize(handle)
        self._reset()
        self.is_synchronized, self.synchronizes = False, True


class _Hook:
    """What torch calls when it has added to a gradient; it does not keep the optimizer alive."""

    def __init__(self, reducer: Reducer):
        self._reducer = weakref.ref(reducer)

    def __call__(self, parameter: torch.Tensor) -> None:
        if (reducer := self._reducer()) is not None:
            reducer.computed(parameter)


def remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


class Reducible:
    """The user's compression, which reduces bfloat16 gradients as float32: Horovod cannot reduce bfloat16.

    The backend gets an alias of the gradient with a separate version counter. Horovod mostly writes to the
    memory without torch, but without NCCL it copies its result to a GPU by an in-place operation, which would
    otherwise count as a change by the script.
    """

    def __init__(self, compression: Any):
        self._compression = compression
        self._is_none = compression is horovod.Compression.none

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is reduced, and the context for `decompress`: None where that has nothing to do."""
        if self._is_none and tensor.dtype is not torch.bfloat16:
            return tensor.data, None
        compressed, context = self._compression.compress(tensor)
        widened = compressed.dtype == torch.bfloat16
        return compressed.float() if widened else compressed.data, (widened, context)

    def decompress(self, tensor: torch.Tensor, context: tuple[bool, Any] | None) -> torch.Tensor:
        if context is None:
            return tensor
        widened, inner = context
        narrow = tensor.to(torch.bfloat16) if widened else tensor
        result: torch.Tensor = self._compression.decompress(narrow, inner)
        return result


def lay_out_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Make gradients contiguous, as Horovod requires, and missing ones 0; torch gives them p's strides."""
    for p in parameters:
        grad = p.grad
        if grad is None:
            p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
        elif not grad.is_sparse and not grad.is_contiguous():
            p.grad = grad.contiguous()


def _buckets(parameters: Iterable[torch.Tensor], nbytes: int) -> Iterable[list[torch.Tensor]]:
    """Cut parameters into buckets of about one size, of one device and dtype each; with 0 bytes each alone.

    The last ones come first, as backward() computes their gradients first.
    """
    buckets: list[list[torch.Tensor]] = []
    room: dict[Any, int] = {}
    last: dict[Any, list[torch.Tensor]] = {}
    for p in reversed(list(parameters)):
        kind, size = (p.device, p.dtype), p.numel() * p.element_size()
        if room.get(kind, 0) < size:
            last[kind], room[kind] = [], nbytes
            buckets.append(last[kind])
        last[kind].append(p)
        room[kind] -= size
    return buckets


def _set(grad: torch.Tensor, reduced: torch.Tensor) -> None:
    """Give a gradient tensor the reduced values, without a copy where torch allows it."""
    if grad.is_sparse:
        grad.zero_().add_(reduced if reduced.is_sparse else reduced.to_sparse())
    else:
        grad.set_(reduced)  # type: ignore[call-overload]


# ---- arguments, checked as Horovod does ---------------------------------------------------------


def _names(named: Named | None, groups: list[dict[str, Any]]) -> dict[torch.Tensor, str]:
    """Return the name of each parameter.

    Raises:
        ValueError: for names that are missing or not unique.
    """
    if named is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(groups)
            for j, p in enumerate(group["params"])
        }
    named = list(named)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    unnamed = {id(p) for g in groups for p in g["params"]} - {id(p) for _, p in named}
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object "
            f"ids: {', '.join(map(str, unnamed))}"
        )
    return {p: name for name, p in sorted(named, key=lambda pair: pair[0])}


def _require_groups(groups: Any) -> None:
    if groups is None:
        return
    if not (isinstance(groups, list) or groups > 0):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of torch.Tensor."
        )
    if isinstance(groups, list):
        each = [parameter for group in groups for parameter in group]
        if any(not isinstance(parameter, torch.Tensor) for parameter in each):
            raise ValueError("groups must consist of torch.Tensor.")
        if len({id(parameter) for parameter in each}) < len(each):
            raise ValueError("A parameter can only appear once in groups.")
