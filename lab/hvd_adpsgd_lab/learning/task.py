"""What a user gives to be trained in virtual time: functions, checked when they are called."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hvd_adpsgd.errors import (
    AdpsgdError,
    ConfigError,
    NonFiniteModelError,
    UnsupportedOptimizerError,
)
from hvd_adpsgd_lab.simulation.chance import Chance

_ARGUMENTS = {
    "model": (),
    "loss": ("model", "batch"),
    "batches": ("super_learner", "n", "seed"),
    "optimizer": ("parameters",),
    "schedule": ("optimizer",),
    "evaluate": ("model",),
}
_OPTIONAL = ("schedule", "evaluate")
_PRIME = 1_000_003
_PAGE = "docs/training_in_virtual_time.md shows such a file."


@dataclass(frozen=True)
class Task:
    """A model to train: six functions, the last two of which are optional.

    Attributes:
        model: model() returns the torch.nn.Module, on the CPU, the parameters of one dtype.
        loss: loss(model, batch) returns the loss to minimise, a scalar.
        batches: batches(super_learner, n, seed) returns an iterable of the batches of super learner number
            `super_learner` of `n`; when it ends, it is called again with seed + 1, and so on.
        optimizer: optimizer(parameters) returns a torch.optim.Optimizer of these parameters;
            optimizer(parameters, model) is called with their module, too, for hvd.NaturalGradientSGD.
        schedule: schedule(optimizer) returns a learning rate scheduler, which steps after every step.
        evaluate: evaluate(model) returns a number, or a dict of numbers by name, of the mean model.
        name: name of the task in messages.

    Raises:
        ConfigError: if a function is missing, cannot be called, or takes other arguments.
    """

    model: Callable[[], torch.nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    batches: Callable[[int, int, int], Iterable[Any]]
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    evaluate: Callable[[torch.nn.Module], Any] | None = None
    name: str = "task"

    def __post_init__(self) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self, name)
            if function is None and name in _OPTIONAL:
                continue
            if name == "optimizer" and _takes_model(function):
                arguments = ("parameters", "model")
            _require_function(self.name, name, function, arguments)

    @classmethod
    def from_file(cls, path: str | Path) -> Task:
        """Return the task whose functions a Python file defines.

        Raises:
            ConfigError: if there is no such file, it does not run, or a function is missing or takes other
                arguments.
        """
        file = Path(path)
        if not file.is_file() or file.suffix != ".py":
            raise ConfigError(
                f"--train {path}: needed is a Python file, NAME.py, that exists. Name one. {_PAGE}"
            )
        spec = importlib.util.spec_from_file_location(f"_trained_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look there
        sys.path.insert(0, str(file.resolve().parent))
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--train {path}: the file does not run: {_described(error)}. Correct it; "
                f"`python {path}` shows the error."
            ) from error
        names = [f.name for f in fields(cls) if f.name in _ARGUMENTS]
        found: dict[str, Any] = {name: getattr(module, name, None) for name in names}
        for name, function in found.items():
            if function is None and name not in _OPTIONAL:
                raise _missing(str(path), name)
        return cls(**found, name=str(path))

    def new_model(self) -> torch.nn.Module:
        """Return model(), checked.

        Raises:
            ConfigError: if it is no module on the CPU with parameters of one dtype to train, or none that can
                be copied.
        """
        model = self.call("model")
        if not isinstance(model, torch.nn.Module):
            raise self.bad("model()", f"returned {_kind(model)}", "Return a torch.nn.Module")
        every = [*model.parameters(), *model.buffers()]
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in every):
            raise self.bad(
                "model()", "has parameters without a shape yet", "Call it once with a batch before"
            )
        try:
            model = copy.deepcopy(model)
        except Exception as error:
            raise self.bad(
                "model()",
                f"returned a module that cannot be copied: {_described(error)}",
                "Let it hold tensors without a gradient function only (torch.nn.utils.parametrizations, not "
                "the older weight_norm)",
            ) from error
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not sum(p.numel() for _, p in trained):
            raise self.bad(
                "model()", "returned a module with 0 parameters to train", "Give it 1 or more"
            )
        dtype = trained[0][1].dtype
        for name, p in trained:
            if p.dtype not in (torch.float32, torch.float64) or p.dtype != dtype:
                raise self.bad(
                    "model()",
                    f"has {name} of {p.dtype} and {trained[0][0]} of {dtype}, allowed is float32 or float64, "
                    "the same for all",
                    "Return model.float()",
                )
            if p.device.type != "cpu" or p.layout != torch.strided:
                raise self.bad(
                    "model()",
                    f"has {name} on {p.device} ({p.layout}), allowed are dense tensors on the CPU",
                    "Return the model before it is moved",
                )
        return model

    def parameters(self) -> int:
        """Return the number of parameters that are trained."""
        return sum(p.numel() for p in self.new_model().parameters() if p.requires_grad)

    def new_optimizer(
        self, parameters: list[torch.nn.Parameter], model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        """Return optimizer(parameters), or optimizer(parameters, model), checked.

        Raises:
            ConfigError: if it is no optimizer, or trains other parameters.
            UnsupportedOptimizerError: if its step() needs a closure.
        """
        more = (model,) if _takes_model(self.optimizer) else ()
        optimizer = self.call("optimizer", parameters, *more)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self.bad(
                "optimizer(parameters)",
                f"returned {_kind(optimizer)}",
                "Return a torch.optim.Optimizer",
            )
        mine = {id(p) for p in parameters}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        others = sum(id(p) not in mine for p in held)
        different = len({id(p) for p in held})
        if others or len(held) != len(mine) or different != len(held):
            raise self.bad(
                "optimizer(parameters)",
                f"returned an optimizer of {len(held)} tensors, {different} different ones, {others} of them "
                f"not among the {len(mine)} parameters",
                "Pass all of `parameters` to it, and no others",
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedOptimizerError(
                f"{self.name}: optimizer(parameters) returned {_kind(optimizer)}, whose step() needs a "
                "closure; super learners call step() without one. Use an optimizer that needs none."
            )
        return optimizer

    def new_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return schedule(optimizer), or None without the function.

        Raises:
            ConfigError: if it has no step() that works without arguments.
        """
        if self.schedule is None:
            return None
        schedule = self.call("schedule", optimizer)
        for name in ("step", "state_dict", "load_state_dict"):
            if not callable(getattr(schedule, name, None)):
                raise self.bad(
                    "schedule(optimizer)",
                    f"returned {_kind(schedule)}, which has no {name}()",
                    "Return a torch.optim.lr_scheduler",
                )
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise self.bad(
                "schedule(optimizer)",
                "returned ReduceLROnPlateau, whose step() needs a loss",
                "Return a schedule of steps, as CosineAnnealingLR",
            )
        if getattr(schedule, "optimizer", optimizer) is not optimizer:
            raise self.bad(
                "schedule(optimizer)",
                f"returned {_kind(schedule)} of another optimizer",
                "Make it of the given one",
            )
        return schedule

    def stream(self, super_learner: int, n: int, seed: int) -> Iterator[Any]:
        """Yield the batches of a super learner without end; torch is seeded before each.

        Raises:
            ConfigError: if batches() returns nothing to iterate over, or no batch.
        """
        while True:
            seed_torch(seed, super_learner, -1)
            batches, count = self.call("batches", super_learner, n, seed), 0
            if not isinstance(batches, Iterable):
                raise self.bad(
                    f"batches({super_learner}, {n}, {seed})",
                    f"returned {_kind(batches)}",
                    "Return an iterable of batches",
                )
            iterator = iter(batches)
            while True:
                seed_torch(seed, super_learner, -2 - count)
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    raise self._failed("batches", error) from error
                count += 1
                yield batch
            if count == 0:
                raise self.bad(
                    f"batches({super_learner}, {n}, {seed})",
                    "has 0 batches",
                    "Give every super learner 1 or more",
                )
            seed += 1

    def copied(self, batch: Any) -> Any:
        """Return a copy of a batch.

        Raises:
            ConfigError: if it cannot be copied.
        """
        try:
            return copy.deepcopy(batch)
        except Exception as error:
            raise self.bad(
                "batches(super_learner, n, seed)",
                f"has a batch that cannot be copied: {_described(error)}",
                "Let it hold tensors, arrays and numbers",
            ) from error

    def loss_of(self, model: Any, batch: Any) -> torch.Tensor:
        """Return loss(model, batch), checked.

        Raises:
            ConfigError: if it is no scalar tensor.
        """
        loss = self.call("loss", model, batch)
        if (
            not isinstance(loss, torch.Tensor)
            or loss.numel() != 1
            or loss.dim() > 1
            or loss.is_complex()
        ):
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
            if isinstance(loss, torch.Tensor) and loss.is_complex():
                shape = f" of {loss.dtype}"
            raise self.bad(
                "loss(model, batch)",
                f"returned {_kind(loss)}{shape}, needed is a scalar tensor, real",
                "Return the mean over the batch",
            )
        return loss.reshape(())

    def require_gradient(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Check by the gradients that the loss depends on the parameters of its model.

        Raises:
            ConfigError: if none of them has a gradient.
        """
        if all(gradient is None for gradient in gradients):
            raise self.bad(
                "loss(model, batch)",
                f"depends on none of the {len(gradients)} parameters of its model",
                "Compute it with `model`, a copy of what model() returned",
            )

    def evaluation(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the numbers of evaluate(model) by name; {} without the function.

        Raises:
            ConfigError: if it returns anything else than numbers.
        """
        if self.evaluate is None:
            return {}
        found = self.call("evaluate", copy.deepcopy(model))  # which it may change
        named = found if isinstance(found, Mapping) else {"evaluation": found}
        try:
            return {str(name): float(value) for name, value in named.items()}
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise self.bad(
                "evaluate(model)",
                f"returned {found!r:.60}",
                "Return a number, or a dict of numbers",
            ) from None

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the task.

        Raises:
            ConfigError: if it raises; the message names the line.
        """
        try:
            return getattr(self, name)(*arguments)
        except AdpsgdError:
            raise
        except Exception as error:
            raise self._failed(name, error) from error

    def run(self, what: str, function: Callable[[], Any]) -> None:
        """Call something that the task has made.

        Raises:
            ConfigError: if it raises; the message says `what`.
        """
        try:
            function()
        except AdpsgdError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name}: {what} raised {_described(error)}. Correct the function."
            ) from error

    def bad(self, where: str, what: str, cure: str) -> ConfigError:
        """Return the error of a function that returned something else than it should."""
        return ConfigError(f"{self.name}: {where} {what}. {cure}. {_PAGE}")

    def _failed(self, name: str, error: BaseException) -> ConfigError:
        shown = f"{name}({', '.join(_ARGUMENTS[name])})"
        return ConfigError(
            f"{self.name}: {shown} raised {_described(error)}. Correct the function."
        )


def seed_torch(seed: int, number: int, step: int) -> None:
    """Seed torch for one step of one super learner; for a batch steps are negative."""
    mixed = Chance((seed * _PRIME + number) * _PRIME + step).draw()
    torch.default_generator.manual_seed(mixed >> 1)


def require_finite(task: Task, loss: float, step: int, super_learner: int, time_s: float) -> None:
    """Raise NonFiniteModelError unless a loss is a finite number."""
    if not math.isfinite(loss):
        raise NonFiniteModelError(
            f"{task.name}: step {step} of super learner {super_learner}, at {time_s:.6g} s of virtual time: "
            f"the loss is {loss}, needed is a finite number. Lower the learning rate, warm it up, or "
            "clip gradients."
        )


def _require_function(task: str, name: str, function: Any, arguments: tuple[str, ...]) -> None:
    if not callable(function):
        raise ConfigError(
            f"{task}: {name} is {_kind(function)}, needed is a function {name}({', '.join(arguments)}). "
            f"Define it. {_PAGE}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{task}: {name}{signature} cannot be called as {name}({', '.join(arguments)}): {error}. "
            f"Define it with these arguments. {_PAGE}"
        ) from None


def _takes_model(function: Any) -> bool:
    """Whether an optimizer function has a second argument, named model."""
    try:
        return list(inspect.signature(function).parameters)[1:2] == ["model"]
    except (TypeError, ValueError):
        return False


def _missing(task: str, name: str) -> ConfigError:
    needed = ", ".join(f"{n}({', '.join(a)})" for n, a in _ARGUMENTS.items() if n not in _OPTIONAL)
    return ConfigError(
        f"{task}: the file has no {name}({', '.join(_ARGUMENTS[name])}). Define it; "
        f"needed are {needed}. {_PAGE}"
    )


def _described(error: BaseException) -> str:
    """Return type, text and place of an exception of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "hvd_adpsgd" not in f.filename and "importlib" not in f.filename]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    text = " ".join(str(error).split())  # messages have one line
    return f"{type(error).__name__}: {text}{place}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
