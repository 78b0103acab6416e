"""Files and functions that a user gives to be trained in virtual time: what they must be, and the errors."""

from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hvd_adpsgd_lab.learning import Task, train
from hvd_adpsgd_lab.simulation.planner import Cluster
from torch import nn

from hvd_adpsgd.errors import ConfigError, NonFiniteModelError, UnsupportedOptimizerError
from hvd_adpsgd.strategies import RandomPairs
from tests.lab.clusters import changed

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
    return changed(Cluster(**fields), **changes)  # type: ignore[arg-type]


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


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1).double())


def failing(*arguments: object) -> Any:
    raise RuntimeError("no data")


OTHER = nn.Linear(3, 1)


def holding_a_result() -> nn.Module:
    model = nn.Linear(3, 1)
    model.result = model(torch.ones(2, 3))
    return model


def schedule_of_another() -> Any:
    return torch.optim.lr_scheduler.LinearLR(torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: nn.ReLU()}, "0 parameters"),
        ({"model": mixed}, "1.weight of torch.float64 and 0.weight of torch.float32"),
        ({"model": lambda: nn.Linear(3, 1).bfloat16()}, "allowed is float32 or float64"),
        ({"model": lambda: nn.Linear(3, 1, device="meta")}, "dense tensors on the CPU"),
        ({"loss": lambda model, batch: model(batch)}, r"of shape \(2, 1\), needed is a scalar"),
        ({"loss": lambda model, batch: torch.ones(())}, r"backward\(\) raised RuntimeError"),
        ({"loss": failing}, r"loss\(model, batch\) raised RuntimeError: no data .*task.py, line"),
        ({"model": lambda: nn.LazyLinear(1)}, "without a shape yet"),
        ({"model": lambda: holding_a_result()}, "cannot be copied: RuntimeError"),
        (
            {"model": lambda: OTHER, "loss": lambda model, batch: OTHER(batch).mean()},
            "depends on none of the 2 parameters",
        ),
        ({"batches": lambda i, n, seed: [(x for x in ())]}, "be copied"),
        ({"batches": lambda i, n, seed: []}, r"batches\(0, 2, 0\) has 0 batches"),
        (
            {"optimizer": lambda p: torch.optim.SGD(p[:1], lr=1)},
            "1 tensors, 1 different .* 0 of them",
        ),
        (
            {"schedule": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            r"ReduceLROnPlateau, whose step\(\) needs a loss",
        ),
        ({"schedule": lambda o: schedule_of_another()}, "a LinearLR of another optimizer"),
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
        ({"strategy": "diloco:period=0"}, "diloco: period is 0"),
        ({"strategy": "diloco:periods=1"}, "takes period, rate, momentum"),
        ({"strategy": "synchronous:period=1"}, "takes nothing after its name"),
        ({"strategy": "randompairs"}, "unknown strategy"),
        ({"strategy": RandomPairs()}, "strategy is a RandomPairs, needed is its spec"),
    ],
)
def test_a_bad_number_or_strategy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(made(), two(), **{"steps": 1, **options})


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("random_pairs", "and SGD is none of Adam"), ("gasloc", "and gasloc.* more than gossip")],
)
def test_moments_that_cannot_be_shared(strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"is 'shared', {message}"):
        train(made(), two(moments="shared"), steps=1, strategy=strategy)


def test_an_adam_with_a_step_of_its_own_cannot_share_moments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    task = made(optimizer=Own)
    with pytest.raises(ConfigError, match=r"Own has a step\(\) of its own"):
        train(task, two(moments="shared"), steps=1)
    assert not caplog.records
    train(task, two(moments="own"), steps=1)
    assert not caplog.records
    train(task, two(), steps=1)
    assert "moments are not shared by super learners: Own has" in caplog.text


@pytest.mark.parametrize("strategy", ["random_pairs", "synchronous", "diloco:period=2"])
def test_batches_of_torchs_own_random_numbers_do_not_depend_on_the_points(strategy: str) -> None:
    drawn: list[tuple[int, float]] = []

    def batches(i: int, n: int, seed: int) -> Iterator[torch.Tensor]:
        for _ in range(3):
            drawn.append((i, torch.rand(()).item()))
            yield torch.rand(2, 3)

    digests = set()
    for points in (1, 7, 1000):
        drawn.clear()
        outcome = train(made(batches=batches), two(), strategy=strategy, steps=6, points=points)
        digests.add(outcome.digest)
        values = [value for _, value in drawn[2:]]  # the first two are of the probes
        assert len(set(values)) == len(values) >= 12
        assert dict(reversed(drawn[:2])) == dict(reversed(drawn[2:]))  # of the first batches
    assert len(digests) == 1


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda x: UserDict(x=x),
        lambda x: {"x": x.numpy()},
        lambda x: {"weight": torch.tensor(1.0), "x": (np.float64(1), x)},
    ],
)
def test_samples_of_a_batch_are_counted_wherever_they_are(wrapped: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"][1] if isinstance(batch["x"], tuple) else batch["x"]
        return model(torch.as_tensor(x)).square().mean()

    task = made(loss=loss, batches=lambda i, n, seed: [wrapped(torch.ones(5, 3))])
    assert train(task, two(), steps=2, points=1).points[-1].samples == 20


def test_evaluate_may_change_its_model() -> None:
    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            model.weight.zero_()
        return 1.0

    found = [train(made(evaluate=each), two(), steps=2, points=1) for each in (None, evaluate)]
    assert found[0].digest == found[1].digest


def test_a_loss_may_need_gradients_itself() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        inputs = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return slope.square().mean()

    assert train(made(loss=loss), two(), steps=2, points=1).ended == "steps"


@pytest.mark.parametrize("moments", ["shared", "own"])
def test_hooks_of_the_optimizer_may_change_gradients(moments: str) -> None:
    factor = 2.0**-10

    def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        def shrink(*_: Any) -> None:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(factor)

        optimizer = torch.optim.AdamW(parameters)
        optimizer.register_step_pre_hook(shrink)
        return optimizer

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def batches(i: int, n: int, seed: int) -> list[torch.Tensor]:
        return [torch.full((2, 3), 1.0 + i + k) for k in range(5)]

    tasks = (
        made(loss=loss, optimizer=hooked, batches=batches),
        made(
            loss=lambda model, batch: factor * loss(model, batch),
            optimizer=torch.optim.AdamW,
            batches=batches,
        ),
    )
    first, second = (train(task, two(moments=moments), steps=20, points=1) for task in tasks)
    assert first.digest == second.digest


def test_sparse_gradients_cannot_be_delayed() -> None:
    task = made(
        model=lambda: nn.Embedding(4, 2, sparse=True),
        batches=lambda i, n, seed: [torch.tensor([1, 2])],
    )
    assert train(task, two(), steps=2, points=1).ended == "steps"
    with pytest.raises(
        UnsupportedOptimizerError, match="sparse gradients, which delayed_gradients"
    ):
        train(task, two(), strategy="delayed_gradients", steps=2, points=1)


def test_a_parameter_that_the_loss_does_not_use_stays() -> None:
    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.unused = nn.Parameter(torch.ones(2))

    task = made(model=Unused, optimizer=lambda p: torch.optim.AdamW(p, weight_decay=0.5))
    outcome = train(task, two(), steps=4, points=1)
    assert outcome.model.get_parameter("unused").tolist() == [1, 1]
    assert outcome.points[-1].loss != outcome.points[0].loss
