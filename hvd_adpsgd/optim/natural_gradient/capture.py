"""Hooks by which autograd computes the preconditioned gradient of an affine map (linear, convolution).

A forward hook gives the module's output a custom backward, which computes the derivative by the input
as usual and, in place of dY^T X, the product of preconditioned rows of dY (derivatives) and X (inputs). The
parameter's own hook delivers that product just before autograd adds it to `.grad`: everything that reads
gradients afterwards (Horovod's all-reduce, clipping, GradScaler) sees the natural gradient, and the plain
gradient is never computed. In one backward pass:

    backward of the output, once per use of the module:  collect(rows, derivatives)
    hook of the weight, hook of the bias, once each:     deliver()  ->  .grad
    step():                                              finish(): update the Fisher estimates
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hvd_adpsgd.optim.natural_gradient.fisher import Gathered, OnlineFisher
from hvd_adpsgd.optim.natural_gradient.rows import (
    Patches,
    Rows,
    as_rows,
    convolution_backward,
    square_sum,
)

Sides = tuple[Gathered, Gathered]

_of_weight: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()


class Tap:
    """One affine map y = W x + b, whose gradients are preconditioned by the Fisher estimates of x and of dy.

    With X = [x, 1] and dY, rows of a backward pass, the gradient is
        [W b].grad = gamma_out gamma_in  P_out(dY)^T P_in(X),
    P as in `OnlineFisher`, with the Fisher estimates before this step. The gammas are computed over all rows
    since the last step: when a second backward pass adds to `.grad`, the gradient already in `.grad` is
    scaled to the new gammas, so that all passes before a step are one minibatch.

    Args:
        name: name of the map in messages and saved states.
        weight: trained weight, shape (Dout, ...).
        bias: bias, shape (Dout,), or None.
        rank_in, rank_out: largest ranks of the two estimates; at most (D + 1) // 2 for D inputs (outputs).
        options: options of both Fisher estimates, `OnlineFisher`.
        unit: returns 1 / loss scale, the factor on derivatives before they enter the Fisher estimate.

    Attributes:
        active: whether gradients are preconditioned; False after `release`.
    """

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_in: int,
        rank_out: int,
        options: dict[str, Any],
        unit: Callable[[], float],
    ) -> None:
        self.name, self.weight, self.bias = name, weight, bias
        self._unit = unit
        inputs, outputs = weight[0].numel(), weight.shape[0]
        self.fisher_in = OnlineFisher(
            inputs + (bias is not None), min(rank_in, (inputs + 1) // 2), **options
        )
        self.fisher_out = OnlineFisher(outputs, min(rank_out, (outputs + 1) // 2), **options)
        self.active = True
        self._zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
        self._handles: list[RemovableHandle] = []
        # sums over the rows of all backward passes whose gradients are in .grad
        self._step: Sides = (Gathered(), Gathered())
        self._task: int | None = None  # autograd's id of the present backward pass
        self._forget_pass()
        take_over(self)
        for parameter in self.parameters():
            self._handles.append(parameter.register_hook(_Delivery(self, parameter)))

    def parameters(self) -> list[nn.Parameter]:
        """Return the weight, and the bias if it is trained."""
        bias = [self.bias] if self.bias is not None and self.bias.requires_grad else []
        return [self.weight, *bias]

    def hold(self, handle: RemovableHandle) -> None:
        """Register the handle of another hook, which `release` removes."""
        self._handles.append(handle)

    def release(self) -> None:
        """Remove all hooks: gradients are not preconditioned from now on, also in a running backward pass."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if _of_weight.get(id(self.weight)) is self:
            del _of_weight[id(self.weight)]

    # ---- during the backward pass

    def collect(
        self, x: Rows | Patches, dy: Rows, gradients: tuple[Tensor, Tensor | None] | None
    ) -> None:
        """Add the rows of one use of the map in a backward pass to its gradient and to its Fisher estimates.

        Args:
            x: rows of the map's input; with a one if there is a bias.
            dy: rows of the derivative by the map's output.
            gradients: dY^T X, for weight and bias, if the caller has computed it; may be overwritten.
        """
        self._open_pass()
        ready = self.fisher_in.start(x), self.fisher_out.start(dy, self._unit)
        basis = tuple(
            fisher.basis(rows.like) if started else rows.like.new_zeros(1, rows.dim)
            for fisher, rows, started in zip(self._fishers(), (x, dy), ready, strict=True)
        )
        projected = x.project(basis[0]), dy.project(basis[1])
        if isinstance(x, Rows) and gradients is None and _rows_are_cheaper(x, dy, basis):
            hat, one = x.without(projected[0], basis[0])
            dhat, _ = dy.without(projected[1], basis[1])
            known = (square_sum(hat) + (0 if one is None else square_sum(one)), square_sum(dhat))
            self._gather(x, dy, projected, known, ready)
            dhat *= self._folded.to(dhat.dtype)
            self._add(dhat.T, hat, None if one is None else dhat.T @ one)
            return
        self._gather(x, dy, projected, (None, None), ready)
        if gradients is None:
            assert isinstance(x, Rows)
            gradients = dy.like.T @ x.like, dy.like.sum(0) if x.one else None
        w, b = _both_sides(*gradients, *basis)
        self._add_whole(w, b)

    def _open_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._forget_pass()
            self._task = task
        if self.weight.grad is None:  # no earlier backward pass to whose gradient this pass adds
            self._step = (Gathered(), Gathered())

    def _forget_pass(self) -> None:
        self._pass: Sides = (Gathered(), Gathered())
        self._uses = 0
        self._sums: list[Tensor | None] = [None, None]
        self._settled = False
        self._correction: Tensor | None = None
        self._rescale: Tensor | None = None

    def _fishers(self) -> tuple[OnlineFisher, OnlineFisher]:
        return self.fisher_in, self.fisher_out

    def _gather(self, x: Rows | Patches, dy: Rows, projected: Any, known: Any, ready: Any) -> None:
        gathered = []
        for fisher, rows, h, remaining, started in zip(
            self._fishers(), (x, dy), projected, known, ready, strict=True
        ):
            if started:
                gathered.append(fisher.gather(rows, h, remaining))
            else:  # without a Fisher estimate no direction is suppressed
                trace = rows.trace()
                gathered.append(Gathered(rows.count, trace, trace))
        self._pass = (self._pass[0] + gathered[0], self._pass[1] + gathered[1])
        self._uses += 1
        if self._uses == 1:
            self._folded = self._scale()

    def _scale(self) -> Tensor:
        """Return gamma_in gamma_out, the factor that restores norms, over all rows since the last step."""
        sides = [before + now for before, now in zip(self._step, self._pass, strict=True)]
        return sides[0].scale() * sides[1].scale()

    def _add(self, dhat_t: Tensor, hat: Tensor, bias: Tensor | None) -> None:
        weight = self._sums[0]
        self._sums[0] = dhat_t @ hat if weight is None else weight.addmm_(dhat_t, hat)
        self._sums[1] = bias if self._sums[1] is None or bias is None else self._sums[1] + bias

    def _add_whole(self, weight: Tensor, bias: Tensor | None) -> None:
        weight *= self._folded.to(weight.dtype)
        bias = None if bias is None else bias * self._folded.to(bias.dtype)
        if self._sums[0] is not None:
            weight += self._sums[0]
        self._sums[0] = weight
        self._sums[1] = bias if self._sums[1] is None or bias is None else self._sums[1] + bias

    def placeholder(self, parameter: Tensor | None) -> Tensor | None:
        """Return the gradient that autograd passes to the parameter's hook: zeros that take no memory."""
        if parameter is None or not parameter.requires_grad:
            return None
        if self._zero.device != parameter.device or self._zero.dtype != parameter.dtype:
            self._zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        return self._zero.expand(parameter.shape)

    def deliver(self, parameter: nn.Parameter, carried: Tensor) -> Tensor:
        """Return this pass's preconditioned gradient, for `.grad`, plus `carried` of other loss terms."""
        index = 0 if parameter is self.weight else 1
        found = self._sums[index]
        if self._task != torch._C._current_graph_task_id() or found is None:
            return carried
        self._settle()
        self._sums[index] = None
        if parameter.grad is not None and self._rescale is not None:
            with torch.no_grad():
                parameter.grad *= self._rescale.to(parameter.grad.dtype)
        if self._correction is not None:
            found *= self._correction.to(found.dtype)
        found = found.view_as(parameter).to(parameter.dtype)
        return found if carried.data_ptr() == self._zero.data_ptr() else found + carried

    def _settle(self) -> None:
        """Compute, once per pass, the factors that scale earlier and new gradients to common gammas."""
        if self._settled:
            return
        self._settled = True
        scale = self._scale()
        if self._uses > 1:
            self._correction = scale / self._folded
        if self._step[0].count > 0:
            self._rescale = scale / (self._step[0].scale() * self._step[1].scale())
        self._step = (self._step[0] + self._pass[0], self._step[1] + self._pass[1])

    # ---- between backward passes

    def finish(self) -> None:
        """Update both Fisher estimates after a step, if an update is due."""
        self.fisher_in.finish(self._step[0])
        self.fisher_out.finish(self._step[1], self._unit)
        self.forget()

    def forget(self) -> None:
        """Discard the rows collected since the last step."""
        self._step = (Gathered(), Gathered())
        self._task = None
        self._forget_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both Fisher estimates."""
        return {"in": self.fisher_in.state_dict(), "out": self.fisher_out.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states of both Fisher estimates.

        Raises:
            ConfigError: if the saved estimates have other dimensions or ranks.
        """
        self.fisher_in.load_state_dict(state["in"])
        self.fisher_out.load_state_dict(state["out"])
        self.forget()


def take_over(tap: Tap) -> None:
    """Let a Tap precondition the gradient of its weight, in place of an older Tap of the same weight."""
    older = _of_weight.get(id(tap.weight))
    if older is not None and older.weight is tap.weight:
        older.release()
    _of_weight[id(tap.weight)] = tap


def _rows_are_cheaper(x: Rows, dy: Rows, basis: tuple[Tensor, ...]) -> bool:
    """Whether preconditioning X and dY takes fewer multiplications than preconditioning dY^T X."""
    ranks = [len(b) for b in basis]
    return x.count * (ranks[0] * x.dim + ranks[1] * dy.dim) <= 2 * x.dim * dy.dim * sum(ranks)


def _both_sides(w: Tensor, b: Tensor | None, basis_in: Tensor, basis_out: Tensor) -> Any:
    """Return (I - Wo^T Wo) [w b] (I - Wi^T Wi) as weight and bias part; overwrites `w`."""
    shape, w = w.shape, w.flatten(1)
    under = basis_in if b is None else basis_in[:, :-1]
    seen = w @ under.T
    if b is not None:
        seen = torch.addr(seen, b, basis_in[:, -1])
        b = b - seen @ basis_in[:, -1]
    w.addmm_(seen, under, alpha=-1)
    w.addmm_(basis_out.T, basis_out @ w, alpha=-1)
    if b is not None:
        b = b - basis_out.T @ (basis_out @ b)
    return w.view(shape), b


class _NotCopied:
    """A hook that a copy of the module (by deepcopy or pickle) does not have."""

    def __init__(self, tap: Tap) -> None:
        self._tap = weakref.ref(tap)

    def __deepcopy__(self, memo: Any) -> Any:
        return _no_hook

    def __reduce__(self) -> Any:
        return _get_no_hook, ()

    def tap(self) -> Tap | None:
        tap = self._tap()
        return tap if tap is not None and tap.active else None


def _no_hook(*_: Any) -> None:
    """The hook that a copy of a module gets in place of its own hook: does nothing."""


def _get_no_hook() -> Any:
    return _no_hook


class _Delivery(_NotCopied):
    """The hook of a parameter, which replaces its gradient by the preconditioned gradient."""

    def __init__(self, tap: Tap, parameter: nn.Parameter) -> None:
        super().__init__(tap)
        self._is_weight = parameter is tap.weight

    def __call__(self, carried: Tensor) -> Tensor | None:
        tap = self.tap()
        if tap is None:
            return None
        parameter = tap.weight if self._is_weight else tap.bias
        assert parameter is not None
        return tap.deliver(parameter, carried)


def tap_module(name: str, module: nn.Module, make: Callable[..., Tap]) -> Iterator[Tap]:
    """Precondition a module that is a plain linear map or convolution: yield its Tap; else nothing.

    Args:
        name: name of the module.
        module: any module; its submodules are not tapped.
        make: makes a Tap of its first three arguments: name, weight and bias.
    """
    if not can_tap(module):
        return
    weight: Any = module.weight
    bias: Any = module.bias
    tap = make(name, weight, bias)
    tap.hold(module.register_forward_hook(_Output(tap)))
    yield tap


def can_tap(module: nn.Module) -> bool:
    """Whether a module is a plain Linear, Conv1d or Conv2d with a trained weight that is not parametrized."""
    if type(module) in (nn.Conv1d, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or padding_of(module) is None:
            return False
    elif type(module) is not nn.Linear:
        return False
    weight = module._parameters.get("weight")  # has no entry for a parametrized weight
    return weight is not None and weight.requires_grad and weight.is_floating_point()


def padding_of(module: Any) -> tuple[int, ...] | None:
    """Return a convolution's zero padding per dimension; None if the two sides of a dimension differ."""
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    both = module._reversed_padding_repeated_twice
    if both[::2] != both[1::2]:
        return None
    return tuple(reversed(both[::2]))


class _Output(_NotCopied):
    """The forward hook of a module: gives the output a backward that collects inputs and derivatives."""

    def __call__(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        tap = self.tap()
        if tap is None or not torch.is_grad_enabled() or module.weight is not tap.weight:
            return None
        kind = _Linear if isinstance(module, nn.Linear) else _Convolution
        x = inputs[0]
        # the input has no batch dimension
        if kind is _Convolution and x.ndim == module.weight.ndim - 1:
            x, y = x.unsqueeze(0), output.detach().unsqueeze(0)
            return kind.apply(x, module.weight, module.bias, tap, module, [y]).squeeze(0)
        return kind.apply(x, module.weight, module.bias, tap, module, [output.detach()])


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tap | None) -> Tensor:
    """Return W x + b for each row x of a matrix; with a Tap, the backward collects the rows for it."""
    y = nn.functional.linear(x, weight, bias)
    if tap is None or not tap.active or not torch.is_grad_enabled():
        return y
    return _Linear.apply(x, weight, bias, tap, None, [y.detach()])


class _Computed(torch.autograd.Function):
    """Autograd function of an affine map whose output is given; `rest` is the Tap, the module, [output]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
        ctx.tap, ctx.module, output = rest
        ctx.save_for_backward(x, weight)
        ctx.bias = bias
        return output[0]


class _Linear(_Computed):
    """Linear map y = x W^T + b, whose backward gives inputs and output derivatives to a Tap."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            dx = None
            if ctx.needs_input_grad[0]:
                dx = (dy @ weight.to(dy.dtype)).to(x.dtype)
            kind = data_dtype(weight.dtype)
            x, dy = x.reshape(-1, x.shape[-1]).to(kind), dy.reshape(-1, dy.shape[-1]).to(kind)
            w, b = hand_over(ctx.tap, x, dy, weight, ctx.bias)
        return dx, w, b, None, None, None


def hand_over(tap: Tap | None, x: Tensor, dy: Tensor, weight: Tensor, bias: Any) -> Any:
    """Give a linear map's rows to its Tap; return gradients of weight and bias, or placeholders."""
    if tap is None or not tap.active:
        db = dy.sum(0).to(bias.dtype) if bias is not None and bias.requires_grad else None
        return ((dy.T @ x).to(weight.dtype) if weight.requires_grad else None), db
    tap.collect(Rows(x, one=bias is not None), Rows(dy), None)
    return tap.placeholder(weight), tap.placeholder(bias)


def data_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows are preconditioned: float32 for 16-bit types, else `dtype`."""
    return torch.promote_types(dtype, torch.float32)


class _Convolution(_Computed):
    """Convolution whose backward gives inputs and output derivatives to a Tap."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        module, bias = ctx.module, ctx.bias
        padding = padding_of(module)
        assert padding is not None
        geometry = module.stride, padding, module.dilation
        kind = data_dtype(weight.dtype)
        with torch.autocast(dy.device.type, enabled=False):
            wanted = (ctx.needs_input_grad[0], True, bias is not None)
            dx, dw, db = convolution_backward(
                dy.to(kind), x.to(kind), weight.to(kind), geometry, wanted
            )
            dx = None if dx is None else dx.to(x.dtype)
            if not ctx.tap.active:
                return dx, dw.to(weight.dtype), db, None, None, None
            patches = Patches(x.to(kind), tuple(weight.shape[1:]), *geometry, one=bias is not None)
            ctx.tap.collect(patches, Rows(as_rows(dy.to(kind))), (dw, db))
        return dx, ctx.tap.placeholder(weight), ctx.tap.placeholder(bias), None, None, None
