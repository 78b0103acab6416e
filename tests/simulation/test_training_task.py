"""Files and functions that a user gives to be trained in virtual time: what they must be, and the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvd_adpsgd.errors import ConfigError, NonFiniteModelError, UnsupportedOptimizerError
from hvd_adpsgd.simulation.learning import Task, train
from hvd_adpsgd.simulation.planner import Cluster

GOOD = """
import torch
def model(): return torch.nn.Linear(3, 1)
def loss(model, batch): return model(batch).square().mean()
def batches(super_learner, n, seed): return [torch.ones(2, 3)]
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
"""


def made(**changes: Any) -> Task:
    functions = {
        "model": lambda: nn.Linear(3, 1),
        "loss": lambda model, batch: model(batch).square().mean(),
        "batches": lambda super_learner, n, seed: [torch.ones(2, 3)],
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return Task(**{**functions, **changes})  # type: ignore[arg-type]


def two(**changes: Any) -> Cluster:
    fields = {
        "super_learners": 2,
        "parameters": 4.0,
        "step_s": 0.1,
        "bytes_per_s": 1e9,
        "latency_s": 1e-5,
    }
    return Cluster(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_file_of_six_functions(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(GOOD)
    task = Task.from_file(file)
    assert task.parameters() == 4
    assert task.schedule is task.evaluate is None
    assert train(task, two(), steps=3, points=1).ended == "steps"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("def loss", "def lost"), r"no loss\(model, batch\)"),
        (GOOD.replace("(model, batch)", "(model)"), r"cannot be called as loss\(model, batch\)"),
        (GOOD + "\nevaluate = 3\n", "evaluate is a int"),
        (GOOD + "\nraise ValueError('why')\n", r"does not run: ValueError: why .*own.py, line 8"),
        (GOOD + "\n)\n", "SyntaxError"),
    ],
)
def test_a_file_that_lacks_something(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Task.from_file(file)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.py", Path(__file__).with_suffix(".txt")):
        with pytest.raises(ConfigError, match="needed is a Python file"):
            Task.from_file(path)


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1).double())


def failing(*arguments: object) -> Any:
    raise RuntimeError("no data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: 3}, r"model\(\) returned a int"),
        ({"model": lambda: nn.ReLU()}, "0 parameters"),
        ({"model": mixed}, "1.weight of torch.float64 and 0.weight of torch.float32"),
        ({"model": lambda: nn.Linear(3, 1).bfloat16()}, "allowed is float32 or float64"),
        ({"model": lambda: nn.Linear(3, 1, device="meta")}, "dense tensors on the CPU"),
        ({"loss": lambda model, batch: model(batch)}, r"of shape \(2, 1\), needed is a scalar"),
        ({"loss": lambda model, batch: 1.0}, "returned a float"),
        ({"loss": lambda model, batch: torch.ones(())}, r"backward\(\) raised RuntimeError"),
        ({"loss": failing}, r"loss\(model, batch\) raised RuntimeError: no data .*task.py, line"),
        ({"batches": lambda i, n, seed: 3}, r"batches\(0, 2, 0\) returned a int"),
        ({"batches": lambda i, n, seed: []}, r"batches\(0, 2, 0\) has 0 batches"),
        ({"batches": failing}, r"batches\(super_learner, n, seed\) raised"),
        ({"optimizer": lambda p: None}, "returned None"),
        ({"optimizer": lambda p: torch.optim.SGD(p[:1], lr=1)}, "1 tensors, 0 of them not among"),
        ({"schedule": lambda o: 1}, r"no step\(\)"),
        ({"evaluate": lambda model: "good"}, "returned 'good'"),
        ({"evaluate": lambda model: torch.ones(2)}, "Return a number"),
    ],
)
def test_a_function_that_returns_something_else(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(made(**changes), two(), steps=2, points=1)


def test_an_optimizer_that_needs_a_closure() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="needs a closure"):
        train(made(optimizer=lambda p: torch.optim.LBFGS(p)), two(), steps=1)


def test_a_loss_that_is_not_finite_names_the_step() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return -(model(batch) * 1e3).square().mean()

    with pytest.raises(
        NonFiniteModelError, match=r"step \d+ of super learner [01], at .* the loss"
    ):
        train(made(loss=loss), two(), steps=100, points=1)


@pytest.mark.parametrize("strategy", ["random_pairs", "synchronous", "diloco:period=2"])
def test_batches_that_end_are_asked_for_again_with_the_next_seed(strategy: str) -> None:
    seeds: dict[int, list[int]] = {0: [], 1: []}

    def batches(i: int, n: int, seed: int) -> list[torch.Tensor]:
        seeds[i].append(seed)
        return [torch.ones(2, 3)] * 2

    train(made(batches=batches), two(spread=0.0, seed=5), strategy=strategy, steps=6, points=1)
    assert seeds[0][:4] == [5, 5, 6, 7]  # the first one for the probe
    assert seeds[1][:4] == [5, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"--steps\) is 0"),
        ({"points": 0}, r"--points\) is 0"),
        ({"threads": 0}, r"--threads\) is 0"),
        ({"strategy": "diloco:period=0"}, "diloco: period is 0"),
        ({"strategy": "diloco:periods=1"}, "takes period, rate, momentum"),
        ({"strategy": "synchronous:period=1"}, "takes nothing after its name"),
        ({"strategy": "randompairs"}, "unknown strategy"),
    ],
)
def test_a_bad_number_or_strategy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(made(), two(), **{"steps": 1, **options})
