"""Horovod's DistributedOptimizer, whose all-reduces are those of this backend.

`hvd_adpsgd.torch` wraps its result, by the names of Horovod's attributes and methods.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hvd_adpsgd.inner.over_torch import world
from hvd_adpsgd.inner.over_torch.compression import Compression
from hvd_adpsgd.inner.over_torch.functions import broadcast_object
from hvd_adpsgd.inner.over_torch.names import Average, global_process_set
from hvd_adpsgd.inner.over_torch.operations import (
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

__all__ = ["OPTIMIZERS", "DistributedOptimizer"]


class _DistributedOptimizer(torch.optim.Optimizer):
    """Methods and attributes of a wrapped optimizer; its class derives from the user's, see below."""

    def __init__(
        self,
        params: Any,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: Any,
    ):
        super(self.__class__, self).__init__(params)  # type: ignore[call-arg]
        named = _checked(named_parameters, self.param_groups)
        _require_groups(groups)
        self._compression = compression
        self._parameter_names = {parameter: name for name, parameter in sorted(named, key=_first)}
        self.backward_passes_per_step = backward_passes_per_step
        self._allreduce_delay = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._handles: dict[Any, Any] = {}
        self._grad_accs: list[Any] = []
        self._requires_update: set[torch.Tensor] = set()
        self._synchronized = False
        self._should_synchronize = True
        self._groups = groups
        self._p_to_group: dict[torch.Tensor, Any] = {}
        self._group_counts: dict[Any, int] = {}
        if process_set.included() and world.size() > 1:
            self._register_hooks()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of this number of backward passes from now on."""
        self.backward_passes_per_step = passes
        self._allreduce_delay = dict.fromkeys(self._allreduce_delay, passes)

    def _register_hooks(self) -> None:
        trained = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        if self._groups is not None:
            self._form_groups(trained)
        for parameter in trained:
            self._requires_update.add(parameter)
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(self._make_hook(parameter))
            self._grad_accs.append(node)

    def _form_groups(self, trained: list[torch.Tensor]) -> None:
        """Group the parameters whose gradients are reduced together, in the order of the first learner."""
        names = broadcast_object([self._parameter_names[p] for p in trained], root_rank=0)
        place = {name: i for i, name in enumerate(names)}
        ordered = sorted(trained, key=lambda p: place[self._parameter_names[p]])
        if isinstance(self._groups, list):
            kept = [[p for p in group if p.requires_grad] for group in self._groups]
            grouped = {p for group in kept for p in group}
            groups = [*kept, *([p] for p in ordered if p not in grouped)]
        else:
            each, more = divmod(len(ordered), self._groups)
            ends = [i * each + min(i, more) for i in range(self._groups + 1)]
            groups = [ordered[a:b] for a, b in itertools.pairwise(ends)]
        for group in map(tuple, groups):
            self._p_to_group.update(dict.fromkeys(group, group))
            if group:
                self._group_counts[group] = 0

    def _make_hook(self, parameter: torch.Tensor) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._handles.get(parameter, (None,))[0] is not None:
                assert self._allreduce_delay[parameter] > 0, (
                    "Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
            assert not parameter.grad.requires_grad  # type: ignore[union-attr]
            assert self._allreduce_delay[parameter] > 0
            self._allreduce_delay[parameter] -= 1
            if self._allreduce_delay[parameter] > 0:
                self._handles[parameter] = (None, None)
            elif self._groups is None:
                self._handles[parameter] = self._allreduce_grad_async(parameter)
            else:
                self._note_of_group(parameter)

        return hook

    def _note_of_group(self, parameter: torch.Tensor) -> None:
        group = self._p_to_group[parameter]
        self._group_counts[group] += 1
        if self._group_counts[group] < len(group):
            self._handles[parameter] = (None, None)
            return
        self._handles[group] = self._grouped_allreduce_grad_async(group)
        for each in group:
            self._handles.pop(each, None)
        self._group_counts[group] = 0

    def _allreduce_grad_async(self, parameter: torch.Tensor) -> Any:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        name, tensor = self._parameter_names.get(parameter), parameter.grad
        if tensor.is_sparse:
            if not self.sparse_as_dense:
                return sparse_allreduce_async(tensor, name=str(name), op=self.op), None
            tensor = tensor.to_dense()
        compressed, context = self._compression.compress(tensor)
        factor = self.gradient_predivide_factor if self.op == Average else 1.0
        handle = allreduce_async_(
            compressed, name=name, op=self.op, prescale_factor=1 / factor, postscale_factor=factor
        )
        return handle, context

    def _grouped_allreduce_grad_async(self, parameters: tuple[torch.Tensor, ...]) -> Any:
        pairs = [self._compression.compress(p.grad) for p in parameters]
        tensors, contexts = zip(*pairs, strict=True)
        name = self._parameter_names.get(parameters[0])
        return grouped_allreduce_async_(tensors, name=name, op=self.op), contexts

    def synchronize(self) -> None:
        """Wait until the gradients are averaged; submit those that backward() has not computed."""
        submitted: set[torch.Tensor] = set()
        for key in self._handles:
            submitted.update(key if isinstance(key, tuple) else (key,))
        for parameter in self._requires_update - submitted:
            self._handles[parameter] = (None, None)
        for key, (handle, _) in self._handles.items():
            if handle is None:
                self._handles[key] = self._allreduce_grad_async(key)
        for key, (handle, context) in self._handles.items():
            parameters = key if isinstance(key, tuple) else (key,)
            output = handle() if callable(handle) else synchronize(handle)
            outputs = (
                zip(output, context, strict=True) if key is parameters else [(output, context)]
            )
            for parameter, (reduced, its) in zip(parameters, outputs, strict=True):
                self._allreduce_delay[parameter] = self.backward_passes_per_step
                _set(parameter.grad, self._compression.decompress(reduced, its))
        self._group_counts = dict.fromkeys(self._group_counts, 0)
        self._handles.clear()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which step() averages nothing, after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, and step."""
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Set the gradients to zero, or to None."""
        super(self.__class__, self).zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; gradients that wait for a step are dropped."""
        self._handles.clear()
        self._synchronized, self._should_synchronize = False, True
        self._allreduce_delay = dict.fromkeys(self._allreduce_delay, self.backward_passes_per_step)
        super(self.__class__, self).load_state_dict(*args, **kwargs)


# whose constructor sets all attributes, and whose methods are those of wrapped optimizers
OPTIMIZERS: tuple[type, ...] = (_DistributedOptimizer,)


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> torch.optim.Optimizer:
    """Return an optimizer of the class of `optimizer` that averages gradients in the super learner."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if groups is None and num_groups:
        groups = num_groups
    kind = type(
        optimizer.__class__.__name__, (optimizer.__class__,), _methods(_DistributedOptimizer)
    )
    return kind(
        optimizer.param_groups,
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )


def _methods(kind: type) -> dict[str, Any]:
    own = ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__")
    return {name: value for name, value in vars(kind).items() if name not in own}


def _first(pair: tuple[str, torch.Tensor]) -> str:
    return pair[0]


def _checked(named: Any, groups: list[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of all parameters in `groups`; raise ValueError as Horovod does."""
    if named is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(groups)
            for j, parameter in enumerate(group["params"])
        ]
    named = list(named)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    unnamed = {id(p) for g in groups for p in g["params"]} - {id(p) for _, p in named}
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object "
            f"ids: {', '.join(map(str, unnamed))}"
        )
    return named


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


def _set(grad: torch.Tensor, reduced: torch.Tensor) -> None:
    """Give a gradient tensor the reduced values, without a copy where torch allows it."""
    if grad.is_sparse:
        grad.zero_().add_(reduced if reduced.is_sparse else reduced.to_sparse())
    elif grad.data_ptr() != reduced.data_ptr() or grad.stride() != reduced.stride():
        grad.set_(reduced)  # type: ignore[call-overload]
