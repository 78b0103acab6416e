"""`NaturalGradientSGD`: SGD on gradients that are preconditioned during the backward pass."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.optim.natural_gradient.capture import Tap, can_tap, tap_module
from hvd_adpsgd.optim.natural_gradient.fisher import require_options
from hvd_adpsgd.optim.natural_gradient.lstm import LSTM, tap_lstm

log = logging.getLogger("hvd_adpsgd")

_SAVED = "natural"  # key of the Fisher estimates in state_dict


class NaturalGradientSGD(torch.optim.Optimizer):
    """SGD whose steps are multiplied by the inverse of an online, low-rank Fisher estimate.

    For every affine map y = W x + b, with rows X = [x, 1] and dY of the minibatch,
        [W b].grad = gamma_out gamma_in P_out(dY)^T P_in(X),
    where each factor is multiplied by the inverse of its own Fisher estimate and scaled back to its
    former norm (`natural.OnlineFisher` has the equations). So the Fisher matrix is assumed to be block
    diagonal over maps and a Kronecker product in each. The step is that of torch.optim.SGD,
        v <- momentum v + grad + weight_decay p,   p <- p - s lr v,
    where s <= 1 limits the 2-norm of the change of one step to `max_change_per_component` for each
    component (a map, or a module without maps) and then to `max_change` for all parameters.

    What is preconditioned: torch.nn.Linear, Conv1d and Conv2d (as linear maps of unfolded inputs;
    groups=1, padding with zeros), and `natural.LSTM`. Every other parameter, and one that two modules
    share, is trained by SGD within the same max_change; a log line names the kinds of these modules.

    When: in the backward pass, before `.grad` is written. So everything after it (GradScaler, clipping,
    Horovod's mean over the learners of a super learner, delayed gradients) handles natural gradients, each
    learner's made with its own estimates, as in Kaldi. Estimates are never averaged between
    learners. Several backward passes before a step are one minibatch. If the loss contains a weight
    itself, such as a penalty on it, that term's gradient is added unpreconditioned, as is `weight_decay`.

    The rate: lr means what it means in torch.optim.SGD, for a loss that is a mean over rows. Kaldi's
    objective is a sum over the n rows of a minibatch, and its momentum scales the step by
    1 - momentum: lr = n (1 - momentum) lr_kaldi. Only lr depends on the scale of the loss; directions
    do not.

    The optimizer works inside hvd.DistributedOptimizer under every strategy. hvd.broadcast_optimizer_state
    gives all learners the root's estimates; in a job of one super learner that function is Horovod's, and
    each learner keeps its own estimates. A minibatch whose step is left out (GradScaler, the first of
    delayed gradients) does not enter the estimates. Second derivatives (create_graph) through a
    preconditioned map are not supported. A new NaturalGradientSGD over the same weights removes the hooks
    of an older one.

    Args:
        model: the modules whose parameters are trained; on its device already.
        lr: learning rate, >= 0.
        momentum: factor on the momentum buffer per step, in [0, 1).
        weight_decay: factor on the parameters that is added to gradients, >= 0.
        alpha: weight of the identity that smooths each estimate, >= 0.
        history: number of rows over which estimates average, > 0: older rows decay exponentially.
        update_period: minibatches per update of the estimates after the first ten, >= 1; math.inf:
            no further updates.
        rank_in: rank of the estimates of inputs, >= 1; at most (D + 1) // 2 is used for D inputs.
        rank_out: rank of the estimates of output derivatives, >= 1; at most (D + 1) // 2 for D outputs.
        max_change: largest 2-norm of the change of all parameters in a step; math.inf: no limit.
        max_change_per_component: largest 2-norm of the change of one component in a step. 0.75 is the
            default of Kaldi's layers.
        params: parameters or groups to train, in place of all that require a gradient. A group may
            have its own lr, momentum and weight_decay.
        scaler: the GradScaler of mixed precision in float16, so that derivatives enter the estimates
            unscaled. Without it, the estimates adapt to a new loss scale only within `history` rows.

    Raises:
        ConfigError: for a value out of its range, or parameters without a model.

    Source: Povey, Zhang and Khudanpur, arXiv:1410.7455; max_change as in Kaldi's nnet3.
    """

    def __init__(
        self,
        model: nn.Module | list[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        alpha: float = 4.0,
        history: float = 2000.0,
        update_period: float = 4,
        rank_in: int = 20,
        rank_out: int = 80,
        max_change: float = 2.0,
        max_change_per_component: float = 0.75,
        params: Iterable[Any] | None = None,
        scaler: Any = None,
    ) -> None:
        self._curvature: _Curvature
        if not isinstance(model, nn.Module):  # Horovod makes a second instance, of param_groups
            self._curvature = _found(model)
            super().__init__(model, dict(self._curvature.defaults))
            return
        _require_ranges(lr, momentum, weight_decay, max_change, max_change_per_component)
        require_options(alpha=alpha, history=history, update_period=update_period)
        for name, rank in (("rank_in", rank_in), ("rank_out", rank_out)):
            _require(rank >= 1, name, rank, ">= 1")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        options = {"alpha": alpha, "history": history, "update_period": update_period}
        make = functools.partial(
            Tap, rank_in=rank_in, rank_out=rank_out, options=options,
            unit=functools.partial(_unit, scaler),
        )  # fmt: skip
        limits = max_change_per_component, max_change
        self._curvature = _Curvature(model, defaults, make, limits)
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        super().__init__(chosen, dict(defaults))
        self._curvature.say_what_falls_back(self._parameters())

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train one more param_group; gradients of layers with weights in the group are preconditioned."""
        super().add_param_group(param_group)
        self._curvature.attach(self.param_groups[-1]["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does; rows collected since the last step enter no Fisher estimate."""
        super().zero_grad(set_to_none)
        for tap in self._curvature.taps.values():
            tap.forget()

    def remove_hooks(self) -> None:
        """Remove all hooks from the model: from now on its gradients are not preconditioned."""
        self._curvature.release()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters by one step, then update the Fisher estimates with the minibatch.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            The value that the closure returned; None without closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moves = list(self._moves())
        for (parameter, direction, lr), factor in zip(
            moves, self._curvature.limit_factors(moves), strict=True
        ):
            parameter.add_(direction, alpha=-lr * factor)
        self._curvature.finish()
        return loss

    def _moves(self) -> Iterator[tuple[nn.Parameter, Tensor, float]]:
        """Yield (p, v, lr) for every parameter p with a gradient: the step changes p by -s lr v."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, self._direction(parameter, group), float(group["lr"])

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        direction = parameter.grad
        assert direction is not None
        if direction.is_sparse:
            direction = direction.to_dense()
        if group["weight_decay"]:
            direction = direction.add(parameter, alpha=group["weight_decay"])
        if not group["momentum"]:
            return direction
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = direction.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
        return state["momentum_buffer"]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict plus, under "natural", the Fisher estimates by the map's name."""
        return {**super().state_dict(), _SAVED: self._curvature.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict, with tensors of any device, to continue as the saved optimizer would.

        Raises:
            ConfigError: if the Fisher estimates are of other maps, sizes or ranks.
        """
        self._curvature.load_state_dict(state_dict.get(_SAVED))
        super().load_state_dict({k: v for k, v in state_dict.items() if k != _SAVED})


class _Curvature:
    """The affine maps that an optimizer preconditions; shared with the optimizer instance that Horovod makes.

    Attributes:
        taps: by name of the map, its Tap.
        defaults: default lr, momentum and weight_decay of the optimizer.
        limits: largest 2-norm of a step, per component and for all parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        defaults: dict[str, Any],
        make: Callable[..., Tap],
        limits: tuple[float, float],
    ) -> None:
        self.defaults, self.limits = defaults, limits
        self.taps: dict[str, Tap] = {}
        self._make = make
        self._modules = dict(model.named_modules())
        self._owners = Counter(id(p) for m in self._modules.values() for p in _direct_parameters(m))
        self._component: dict[int, str] = {}
        for name, module in self._modules.items():
            for parameter in _direct_parameters(module):
                self._component.setdefault(id(parameter), name)
        weakref.finalize(self, _release_all, self.taps)

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Precondition the modules of the model whose weights are among `parameters`: make a Tap for each."""
        wanted = {id(p) for p in parameters}
        _natural.update(dict.fromkeys(wanted, self))
        for name, module in self._modules.items():
            mine = {id(p) for p in _direct_parameters(module)}
            if not mine & wanted or any(self._owners[key] > 1 for key in mine):
                continue
            for tap in self._tap(name, module, wanted):
                self.taps[tap.name] = tap
                for parameter in tap.parameters():
                    self._component[id(parameter)] = tap.name

    def _tap(self, name: str, module: nn.Module, wanted: set[int]) -> Iterable[Tap]:
        if isinstance(module, LSTM):
            return tap_lstm(name, module, wanted, self._make)
        if can_tap(module) and id(module.weight) in wanted:
            return tap_module(name, module, self._make)
        return ()

    def say_what_falls_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Log in one line which kinds of modules have parameters that plain SGD trains."""
        tapped = {id(p) for tap in self.taps.values() for p in tap.parameters()}
        plain = {id(p) for p in parameters} - tapped
        kinds = Counter(
            type(module).__name__
            for module in self._modules.values()
            if plain & {id(p) for p in _direct_parameters(module)}
        )
        if not kinds:
            return
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        fused = any(type(module) is nn.LSTM for module in self._modules.values())
        cure = (
            " hvd_adpsgd.optim.natural_gradient.LSTM in place of torch.nn.LSTM is preconditioned."
        )
        log.warning(
            "NaturalGradientSGD: plain SGD, within the same max_change, for the parameters of %s.%s",
            what,
            cure if fused else "",
        )

    # ---- the step

    def limit_factors(self, moves: list[tuple[nn.Parameter, Tensor, float]]) -> list[float]:
        """Return for each move (p, v, lr) the factor s <= 1 that keeps the step's norm within `limits`."""
        if not moves or min(self.limits) == math.inf:
            return [1.0] * len(moves)
        norms = _norms([direction for _, direction, _ in moves])
        squares: dict[str, float] = {}
        keys = [self._component.get(id(p), f"parameter {id(p)}") for p, _, _ in moves]
        for key, norm, (_, _, lr) in zip(keys, norms, moves, strict=True):
            squares[key] = squares.get(key, 0.0) + (lr * norm) ** 2
        factors = {key: _factor(math.sqrt(s), self.limits[0]) for key, s in squares.items()}
        total = math.sqrt(sum(factors[key] ** 2 * s for key, s in squares.items()))
        overall = _factor(total, self.limits[1])
        return [factors[key] * overall for key in keys]

    def finish(self) -> None:
        """Update the Fisher estimates of all maps, after the parameters have stepped."""
        for tap in self.taps.values():
            tap.finish()

    def release(self) -> None:
        """Remove all hooks from the model."""
        _release_all(self.taps)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {name: tap.state_dict() for name, tap in self.taps.items()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None or set(state) != set(self.taps):
            raise ConfigError(
                f"NaturalGradientSGD.load_state_dict: estimates of {sorted(state or {})} in the state, "
                f"of {sorted(self.taps)} here. Load what a NaturalGradientSGD over the same model saved."
            )
        for name, tap in self.taps.items():
            tap.load_state_dict(state[name])


_natural: weakref.WeakValueDictionary[int, _Curvature] = weakref.WeakValueDictionary()


def _found(groups: Any) -> _Curvature:
    """Return the Taps of the user's optimizer over these param_groups, for Horovod's second instance."""
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        for parameter in (p for group in groups for p in group["params"]):
            curvature = _natural.get(id(parameter))
            if curvature is not None:
                return curvature
    raise ConfigError(
        f"NaturalGradientSGD: model={type(groups).__name__} must be a torch.nn.Module: the inputs and "
        "derivatives of its modules are needed, not parameters alone. Pass the model, and params= to "
        "train a part of it."
    )


def _unit(scaler: Any) -> float:
    """Return 1 / loss scale of a GradScaler; 1 without one."""
    return 1.0 if scaler is None else 1 / scaler.get_scale()


def _direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _release_all(taps: dict[str, Tap]) -> None:
    for tap in taps.values():
        tap.release()


def _norms(tensors: list[Tensor]) -> list[float]:
    """Return the 2-norm of each tensor, with one transfer from the device for all tensors."""
    norms = torch._foreach_norm(tensors)
    return torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist()


def _factor(norm: float, limit: float) -> float:
    """Return the factor <= 1 that reduces `norm` to at most `limit`; 1 for a NaN."""
    return limit / norm if norm > limit else 1.0


def _require_ranges(
    lr: float, momentum: float, weight_decay: float, max_change: float, per_component: float
) -> None:
    _require(0 <= float(lr) < math.inf, "lr", lr, ">= 0")
    _require(0 <= momentum < 1, "momentum", momentum, ">= 0 and < 1")
    _require(0 <= weight_decay < math.inf, "weight_decay", weight_decay, ">= 0")
    _require(max_change > 0, "max_change", max_change, "> 0")
    _require(per_component > 0, "max_change_per_component", per_component, "> 0")


def _require(holds: bool, name: str, value: Any, bound: str) -> None:
    if not holds:
        raise ConfigError(f"NaturalGradientSGD: {name}={value} must be {bound}. Correct it.")
