"""Training in virtual time: what the super learners compute, and when."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hvd_adpsgd_lab import simulate
from hvd_adpsgd_lab.learning import Task, train
from hvd_adpsgd_lab.learning.run import Budget, EngineRun, Training
from hvd_adpsgd_lab.learning.super_learner import SuperLearner
from hvd_adpsgd_lab.simulate import trained
from hvd_adpsgd_lab.simulation.planner import Cluster
from hvd_adpsgd_lab.simulation.scenario import Fault
from torch import nn

from hvd_adpsgd.errors import ConfigError, NonFiniteModelError
from hvd_adpsgd.optim.natural_gradient import NaturalGradientSGD
from tests.lab.clusters import changed

INPUTS, WIDTH = 5, 7


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def batches(i: int, n: int, seed: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * seed + i)
    while True:
        yield torch.randn(4, INPUTS, generator=random, dtype=torch.float64)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def task(**changes: Any) -> Task:
    functions = {"model": network, "loss": loss, "batches": batches, "optimizer": sgd}
    return Task(**{**functions, **changes})  # type: ignore[arg-type]


def cluster(n: int, **changes: Any) -> Cluster:
    fields = {
        "parameters": 50.0,
        "step_s": 0.1,
        "bytes_per_s": 1e9,
        "latency_s": 1e-5,
        "super_learners": n,
        "minutes": 1e6,
    }
    return changed(Cluster(**fields), **changes)  # type: ignore[arg-type]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("strategy", ["random_pairs", "synchronous", "delayed_gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_super_learner_is_plain_torch_bit_for_bit(strategy: str, dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return network().to(dtype)

    def of_dtype(i: int, n: int, seed: int) -> Iterator[torch.Tensor]:
        return (batch.to(dtype) for batch in batches(i, n, seed))

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    expected, stream = model(), of_dtype(0, 1, 3)
    optimizer = sgd(list(expected.parameters()))
    scheduler = schedule(optimizer)
    for _ in range(20):
        optimizer.zero_grad()
        loss(expected, next(stream)).backward()
        optimizer.step()
        scheduler.step()
    outcome = train(
        task(model=model, batches=of_dtype, schedule=schedule),
        cluster(1, seed=3),
        strategy=strategy,
        steps=20,
    )
    assert torch.equal(weights(outcome.model), weights(expected))
    assert outcome.points[-1].samples == 80


def test_synchronous_is_plain_torch_with_the_mean_gradient() -> None:
    n = 4
    expected, streams = network(), [batches(i, n, 0) for i in range(n)]
    optimizer = sgd(list(expected.parameters()))
    for _ in range(15):
        optimizer.zero_grad()
        for stream in streams:
            (loss(expected, next(stream)) / n).backward()
        optimizer.step()
    outcome = train(task(), cluster(n), strategy="synchronous", steps=15)
    assert torch.equal(weights(outcome.model), weights(expected))


Models = list[torch.Tensor]
Gradient = Callable[[int, torch.Tensor], torch.Tensor]


def gradients(n: int) -> Gradient:
    """The gradient of super learner i at some weights, on its next batch."""
    streams, model = [batches(i, n, 0) for i in range(n)], network()

    def gradient(i: int, at: torch.Tensor) -> torch.Tensor:
        nn.utils.vector_to_parameters(at, model.parameters())
        model.zero_grad()
        loss(model, next(streams[i])).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return gradient


def local_steps(w: Models, gradient: Gradient) -> Models:
    return [w[i] - 0.05 * gradient(i, w[i]) for i in range(len(w))]


def mean(w: Models) -> torch.Tensor:
    return torch.stack(w).mean(0)


def delay_by_one(w: Models, gradient: Gradient, steps: int) -> Models:
    for step in range(steps):
        middle = mean(w)
        w = [(middle if step else w[i]) - 0.05 * gradient(i, w[i]) for i in range(len(w))]
    return w


def delayed_gradients(w: Models, gradient: Gradient, steps: int) -> Models:
    late = None
    for _ in range(steps):
        found = mean([gradient(i, w[i]) for i in range(len(w))])
        w = w if late is None else [each - 0.05 * late for each in w]
        late = found
    return w


def block_momentum(w: Models, gradient: Gradient, steps: int) -> Models:
    """With nesterov, eta 0.6, zeta 0.8, blocks of 3 steps; the steps after the last block are local."""
    start, delta, center = w[0], torch.zeros_like(w[0]), w[0]
    for step in range(steps):
        w = local_steps(w, gradient)
        if (step + 1) % 3 == 0:
            delta = 0.6 * delta + 0.8 * (mean(w) - start)
            center = center + delta
            start = center + 0.6 * delta
            w = [start] * len(w)
    return w


@pytest.mark.parametrize(
    ("strategy", "law"),
    [
        ("delay_by_one", delay_by_one),
        ("delayed_gradients", delayed_gradients),
        (
            "periodic_averaging:period=3,block_momentum=0.6,block_rate=0.8,nesterov=1",
            block_momentum,
        ),
        # the same law, written otherwise
        ("diloco:period=3,rate=0.8,momentum=0.6", block_momentum),
    ],
)
def test_strategies_in_step_follow_their_laws(
    strategy: str, law: Callable[[Models, Gradient, int], Models]
) -> None:
    n, steps = 3, 10
    outcome = train(task(optimizer=plain_sgd), cluster(n), strategy=strategy, steps=steps)
    expected = mean(law([weights(network())] * n, gradients(n), steps))
    # of delay_by_one and others the mean of the models is that of the models with the pending mean
    torch.testing.assert_close(weights(outcome.model), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        "random_pairs",
        "fixed_ring",
        "gossip_pga:period=7+random_ring",
        "gasloc:period=4,momentum=0.6+random_ring",
        "synchronous_gossip:order=atc",
    ],
)
def test_the_sum_of_models_moves_by_local_updates_only(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = torch.zeros_like(weights(network()))
    update = SuperLearner.update

    def recorded(self: SuperLearner, *arguments: Any) -> float:
        before = torch.cat([p.detach().flatten() for p in self.parameters])
        value = update(self, *arguments)
        moved.add_(torch.cat([p.detach().flatten() for p in self.parameters]) - before)
        return value

    monkeypatch.setattr(SuperLearner, "update", recorded)
    n, tried = 5, task()
    run = EngineRun(Training(
        tried, network(), cluster(n, averaging=strategy, spread=0.5), [],
        Budget(60 * n, 1e6, 3), lambda share: None,
    ))  # fmt: skip
    run.run()
    job = run._job
    for i in range(n):
        job.strike(0.0, "leave", i)
    job.halted = False
    job.run_for(60)
    assert job.living == 0
    assert sum(job.exchanges_of()) > 100 or "pga" in strategy
    layout = run._curve.layout
    models = [network() for _ in range(n)]
    for i, model in enumerate(models):
        layout.write(list(model.parameters()), job.model(i).reshape(-1))
    total = sum(weights(model) for model in models)
    expected = n * weights(network()) + moved
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-10)


def test_dropout_differs_by_super_learner_and_is_the_same_again() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), network())

    one, again = (train(task(model=model), cluster(2), steps=10) for _ in range(2))
    assert one.digest == again.digest
    assert one.points[-1].distance > 0


def test_buffers_are_averaged() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(INPUTS, dtype=torch.float64), network())

    outcome = train(task(model=model), cluster(3), steps=10)
    norm = outcome.model[0]  # type: ignore[index]
    assert torch.isfinite(norm.running_mean).all()
    assert 8 <= norm.num_batches_tracked <= 12


class Counted(nn.Linear):
    """A module that can be told from all others."""


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.AdamW])
def test_a_run_leaves_nothing_to_the_garbage_collector(optimizer: Any) -> None:
    """Or n models of each run of a study are kept until it runs."""

    def model() -> nn.Module:
        return nn.Sequential(Counted(INPUTS, 1, dtype=torch.float64))

    gc.collect()
    gc.disable()
    try:
        train(task(model=model, optimizer=optimizer), cluster(4), steps=5, points=1)
        assert not [found for found in gc.get_objects() if type(found) is Counted]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "strategy",
    [
        "random_pairs",
        "diloco:period=3",
        *(
            pytest.param(more, marks=pytest.mark.extended)
            for more in ("a2cid2", "noloco:period=3", "gasloc:period=3")
        ),
    ],
)
def test_a_seed_gives_the_same_bits(strategy: str) -> None:
    faults = () if strategy.startswith("diloco") else (Fault(0.7, "crash", 2),)
    one, again, other = (
        train(task(), cluster(5, seed=seed), strategy=strategy, steps=15, faults=faults)
        for seed in (1, 1, 2)
    )
    assert one.to_json() == again.to_json()
    assert one.digest != other.digest


def test_a_straggler_slows_synchronous_training_and_not_random_pairs() -> None:
    n, steps = 4, 20
    slow = cluster(n, slow=1, slow_factor=10.0, spread=0.0)
    gossip = train(task(), slow, strategy="random_pairs", steps=steps)
    alone = n * steps / (n - 1 + 0.1) * 0.1  # seconds without any wait
    assert gossip.points[-1].time_s == pytest.approx(alone, rel=0.05)
    for strategy in ("synchronous", "diloco:period=5", "periodic_averaging:period=5"):
        waits = train(task(), slow, strategy=strategy, steps=steps)
        assert waits.points[-1].time_s == pytest.approx(10 * 0.1 * steps, rel=0.08)
        assert waits.steps == [steps] * n


@pytest.mark.parametrize("strategy", ["delayed_gradients", "delay_by_one"])
def test_a_mean_during_the_step_takes_no_time_of_its_own(strategy: str) -> None:
    outcome = train(task(), cluster(4, spread=0.0), strategy=strategy, steps=20)
    assert outcome.points[-1].time_s == pytest.approx(2.0, rel=0.03)


def test_with_equal_data_all_wait_for_the_slowest() -> None:
    slow = cluster(4, slow=1, slow_factor=5.0, spread=0.0)
    dynamic, equal = (train(task(), slow, steps=20, data=data) for data in ("dynamic", "equal"))
    assert sum(dynamic.steps) == 80 and equal.steps == 4 * [20]
    ratio = equal.points[-1].time_s / dynamic.points[-1].time_s
    assert 0.95 * 5 * 3.2 / 4 < ratio < 1.05 * 5 * 3.2 / 4  # summed speeds: 3.2 of 4
    for wrong in ({"data": "even", "steps": 2}, {"data": "equal"}, {"data": "equal", "steps": 1}):
        with pytest.raises(ConfigError, match="--data"):
            train(task(), slow, **wrong)  # type: ignore[arg-type]


def test_a_slow_link_slows_synchronous_training_by_the_all_reduce() -> None:
    n = 4
    thin = cluster(n, bytes_per_s=1e3, latency_s=0.0, spread=0.0)
    outcome = train(task(), thin, strategy="synchronous", steps=10)
    assert outcome.points[-1].time_s == pytest.approx(10 * (0.1 + 2 * 3 / 4 * 200 / 1e3))
    assert outcome.sent_bytes == pytest.approx(10 * 2 * 3 / 4 * 200)
    assert train(task(), thin, steps=10).points[-1].time_s < 1.3


def test_a_bound_on_staleness_makes_steps_wait() -> None:
    """On a link that carries an exchange in four steps."""
    thin = {"bytes_per_s": 500.0, "latency_s": 0.0, "spread": 0.0}
    free, bound = (train(task(), cluster(4, max_staleness=k, **thin), steps=60) for k in (None, 2))
    assert free.staleness_99 > 2 >= bound.staleness_99
    assert bound.points[-1].time_s > 1.2 * free.points[-1].time_s


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1 / 2), (torch.float64, 1 / 4)])
def test_16_bits_on_the_wire_are_fewer_bytes_and_round(dtype: torch.dtype, share: float) -> None:
    def of_dtype(i: int, n: int, seed: int) -> Iterator[torch.Tensor]:
        return (batch.to(dtype) for batch in batches(i, n, seed))

    tried = task(model=lambda: network().to(dtype), batches=of_dtype)
    fast = {"parameters": 1e6, "bytes_per_s": 1e12}
    whole, half = (
        train(tried, cluster(3, wire_dtype=wire, **fast), steps=40) for wire in (None, "bfloat16")
    )
    assert half.sent_bytes == pytest.approx(whole.sent_bytes * share, rel=0.1)
    assert half.digest != whole.digest
    assert half.points[-1].loss == pytest.approx(whole.points[-1].loss, rel=0.2)


def test_minutes_end_a_run_too() -> None:
    outcome = train(task(), cluster(3, minutes=0.05), points=4)
    assert [point.time_s for point in outcome.points] == pytest.approx([0, 0.75, 1.5, 2.25, 3])
    assert outcome.ended == "time"
    assert sum(outcome.steps) == pytest.approx(90, abs=6)
    lock_step = train(task(), cluster(3, minutes=0.05), strategy="synchronous", points=4)
    assert lock_step.ended == "time"
    assert sum(lock_step.steps) == pytest.approx(90, abs=6)


def test_a_failure_stops_one_super_learner_and_restarts_synchronous_training() -> None:
    crash = [Fault(0.55, "crash", 1)]
    gossip = train(task(), cluster(4, detect_s=0.2), steps=20, faults=crash)
    assert gossip.failed == 1
    assert gossip.steps[1] == 5 and min(gossip.steps[:1] + gossip.steps[2:]) > 20
    assert gossip.points[-1].training == 3
    assert gossip.points[-1].time_s < 3.5
    synchronous = train(task(), cluster(4), strategy="synchronous", steps=20, faults=crash)
    assert synchronous.failed == 1
    assert synchronous.points[-1].time_s == pytest.approx(300 + 0.55 + 2, abs=0.3)
    assert synchronous.digest == train(task(), cluster(4), strategy="synchronous", steps=20).digest


@pytest.mark.parametrize("who", [1, 4])
@pytest.mark.parametrize(
    "strategy", ["random_pairs", "periodic_averaging:period=3,block_momentum=0.5"]
)
def test_a_super_learner_joins(strategy: str, who: int) -> None:
    faults = [Fault(0.3, "crash", 1)] if who == 1 else []
    outcome = train(
        task(),
        cluster(4, detect_s=0.1),
        strategy=strategy,
        steps=40,
        faults=[*faults, Fault(1.0, "join", who)],
    )
    assert outcome.joined == 1
    assert outcome.failed == len(faults)
    assert outcome.points[-1].training == 5 - len(faults)
    assert 10 < outcome.steps[-1] < 45
    assert outcome.points[-1].loss < outcome.points[0].loss


def test_nobody_is_refused() -> None:
    """Members that cannot make their engine are for the simulation of faults: here that loses a run."""
    for seed in range(8):
        late = [Fault(1.0, "join", 4)]
        assert train(task(), cluster(4, seed=seed), steps=20, faults=late, points=1).joined == 1


def test_who_joins_slow_links_would_have_fast_ones() -> None:
    slow = cluster(4, racks=2, racks_factor=10.0)
    for more in ({"replace_s": 1.0}, {"faults": [Fault(1.0, "join", 4)]}):
        with pytest.raises(ConfigError, match="--slow-links, --racks.*theirs would be fast"):
            train(task(), slow, points=3, **more)  # type: ignore[arg-type]


def test_a_super_learner_that_joins_has_the_mean_of_shared_moments() -> None:
    run = EngineRun(Training(
        task(optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01)), network(), cluster(4, seed=1),
        [Fault(1.0, "join", 4)], Budget(160, 1e6, 1), lambda share: None,
    ))  # fmt: skip
    moments = []

    def joins(process: int, joins: Callable[[int], None] = run.joins) -> None:
        before = run._learners[process].rule.averaged()[-1][1].clone()
        joins(process)
        for learner in run._learners:
            state = learner.optimizer.state[learner.parameters[-1]]
            moments.append(state["exp_avg"] is learner.rule.averaged()[-1][1])
        moments.append(torch.equal(before, run._learners[process].rule.averaged()[-1][1]))

    run.joins = joins  # type: ignore[method-assign]
    assert run.run().joined == 1
    assert moments == 6 * [True]
    assert run._learners[4].steps > 5


def test_moments_are_shared_unless_they_are_to_be_own() -> None:
    adamw = task(optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01))
    shared, again, own = (
        train(adamw, cluster(4, moments=moments), steps=30) for moments in (None, "shared", "own")
    )
    assert shared.digest == again.digest != own.digest
    assert 1.2 * own.sent_bytes < shared.sent_bytes < 1.4 * own.sent_bytes
    always = train(adamw, cluster(4, moments_period=1), steps=30)
    assert 1.7 * own.sent_bytes < always.sent_bytes < 2.1 * own.sent_bytes


def test_where_gradients_are_averaged_a_joining_super_learner_has_the_same_model() -> None:
    run = EngineRun(Training(
        task(), network(), cluster(3, averaging="delayed_gradients"), [Fault(1.0, "join", 3)],
        Budget(90, 1e6, 1), lambda share: None,
    ))  # fmt: skip
    assert run.run().joined == 1
    assert run._learners[3].steps > 5
    models = {weights(learner.model).numpy().tobytes() for learner in run._learners}
    assert len(models) <= 2  # of this step, and of the one before


@pytest.mark.parametrize(
    ("fault", "strategy", "message"),
    [
        (Fault(1.0, "unfit", 0), "random_pairs", "has no such fault"),
        (Fault(1.0, "cut", 0, (1,), 1.0), "synchronous", "allowed are crash, stop, slow"),
        (Fault(1.0, "crash", 2), "random_pairs", "its super learner is 2"),
        (Fault(1.0, "sever", 0, (), 1.0), "random_pairs", "number of its peers is 0"),
    ],
)
def test_a_bad_fault(fault: Fault, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(task(), cluster(2), strategy=strategy, steps=1, faults=[fault])


EXAMPLE = str(Path(__file__).parents[2] / "examples" / "virtual_time.py")


def command(tmp_path: Path, *arguments: str) -> list[str]:
    return [
        "--train",
        EXAMPLE,
        "--super-learners",
        "3",
        "--steps",
        "4",
        "--points",
        "2",
        *arguments,
    ]


def test_costs_of_averaging_lengthen_steps(tmp_path: Path) -> None:
    """With --calibration; 0.1 s here, as long as a step."""
    parameters = sum(p.numel() for p in Task.from_file(EXAMPLE).new_model().parameters())
    costs = {"step_s_per_byte": 0.1 / (4 * parameters), "chunk_s_per_byte": 0.0}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    found = []
    for more in ((), ("--calibration", str(tmp_path / "costs.json"))):
        told = tmp_path / "told.json"
        assert simulate.main(command(tmp_path, "--step", "100ms", *more, "--json", str(told))) == 0
        found.append(json.loads(told.read_text())["runs"][0])
    free, costly = found
    assert costly["steps_per_s"] == pytest.approx(free["steps_per_s"] / 2, rel=0.2)


def test_the_command_writes_the_same_json_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    for name in ("a.json", "b.json"):
        more = (
            "--compare",
            "synchronous",
            "--fault",
            "slow,0,0s,3",
            "--json",
            str(tmp_path / name),
        )
        figure = ("--figure", str(tmp_path / "a.png")) if name == "a.json" else ()
        assert simulate.main(command(tmp_path, *more, *figure)) == 0
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1]
    runs = json.loads(written[0])["runs"]
    assert [run["strategy"] for run in runs] == [
        "random_pairs:seed=0,prefer_fast=0.0",
        "synchronous",
    ]
    assert "accuracy" in runs[0]["points"][-1]["evaluation"]
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert "mean model  loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", EXAMPLE], "Add --super-learners N"),
        (
            ["--train", EXAMPLE, "--super-learners", "2", "--steps", "1", "--minutes", "1"],
            "both --steps 1",
        ),
        (["--train", EXAMPLE, "--super-learners", "2", "--fault", "crash,1"], "bad --fault"),
        (["--train", "none.py", "--super-learners", "2"], "needed is a Python file"),
        (
            ["--train", EXAMPLE, "--super-learners", "2", "--json", "x.png", "--figure", "./x.png"],
            "--json and --figure are both x.png",
        ),
        (
            ["--train", EXAMPLE, "--super-learners", "2", "--steps", "1", "--json", "/dev/full"],
            "--json /dev/full: the file cannot be written (No space left",
        ),
    ],
)
def test_a_bad_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compared", "fault"), [("synchronous", "join,3,1s"), ("diloco:period=0", "stop,0,1s,1s")]
)
def test_a_run_that_cannot_be_compared_is_refused_before_the_first(
    tmp_path: Path, compared: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--strategy", "fixed_ring", "--compare", compared, "--fault", fault)
    assert simulate.main(command(tmp_path, *arguments)) == 2
    assert capsys.readouterr().out == ""


def test_the_runs_before_one_that_fails_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(*arguments: Any, strategy: str, **options: Any) -> Any:
        if strategy == "fixed_ring":
            raise NonFiniteModelError("the loss is nan")
        return train(*arguments, strategy=strategy, **options)

    monkeypatch.setattr(trained, "train", training)
    file = tmp_path / "out.json"
    arguments = ("--compare", "synchronous", "fixed_ring", "--json", str(file))
    assert simulate.main(command(tmp_path, *arguments)) == 2
    runs = json.loads(file.read_text())["runs"]
    assert [run["strategy"] for run in runs] == [
        "random_pairs:seed=0,prefer_fast=0.0",
        "synchronous",
    ]


def test_the_other_modes_import_no_torch() -> None:
    script = (
        "import sys; from hvd_adpsgd_lab import simulate; simulate.main(['--seed', '1']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("strategy", ["random_pairs", "delay_by_one"])
def test_failed_super_learners_are_replaced(strategy: str) -> None:
    """By ones that fail and are replaced, too: the job does not shrink to nothing, and learns."""
    storm = cluster(8, minutes=0.25, failures_per_hour=300.0, detect_s=0.1, seed=2)
    shrinks, outcome = (
        train(task(), storm, strategy=strategy, points=3, replace_s=replace_s)
        for replace_s in (None, 0.5)
    )
    assert outcome.failed > 5 and outcome.joined > 3
    assert outcome.points[-1].training > shrinks.points[-1].training
    assert sum(outcome.steps) > 1.2 * sum(shrinks.steps)
    assert outcome.points[-1].loss < outcome.points[0].loss


def test_a_crash_given_by_hand_is_replaced_after_its_time() -> None:
    crash = [Fault(1.0, "crash", 2)]
    outcome = train(task(), cluster(4, minutes=0.2), faults=crash, points=12, replace_s=3.0)
    training = {round(point.time_s): point.training for point in outcome.points}
    assert training[1] in (3, 4) and training[3] == 3 and training[6] == 4
    assert outcome.failed == outcome.joined == 1


@pytest.mark.parametrize("stops_s", [2.0, 3.05])
def test_nobody_waits_for_a_stopped_one_to_let_a_replacement_in(stops_s: float) -> None:
    """Which asks 2.5 s after the crash: while the other one is stopped, or right before."""
    faults = [Fault(0.5, "crash", 3), Fault(stops_s, "stop", 1, value=7.0)]
    calm, outcome = (
        train(task(), cluster(4, minutes=0.2, detect_s=0.1), faults=its, replace_s=2.5)
        for its in ([], faults)
    )
    assert outcome.joined == 1
    assert outcome.steps[0] > 0.9 * calm.steps[0]


def test_a_replacement_trains_on_other_batches_than_the_one_before() -> None:
    seeds = []

    def counted(i: int, n: int, seed: int) -> Iterator[torch.Tensor]:
        seeds.append((i, seed))
        return batches(i, n, seed)

    crash = [Fault(0.5, "crash", 1), Fault(4.0, "join", 1)]
    faults = [*crash, Fault(1.0, "join", 4)]
    assert train(task(batches=counted), cluster(4, minutes=0.2), faults=faults).joined == 2
    assert len(set(seeds)) > 5 and len({seed for i, seed in seeds if i == 1}) == 2


def test_many_admissions_need_no_memory_for_engines_that_have_left() -> None:
    crashes = [Fault(1.0 + 3 * i, "crash", i) for i in range(6)]
    run = EngineRun(Training(
        task(), network(), cluster(8, detect_s=0.1), crashes, Budget(None, 24.0, 4), lambda share: None,
        replace_s=0.5,
    ))  # fmt: skip
    outcome = run.run()
    assert outcome.joined == 6
    # now, failed ones, and of the last three admissions: messages of engines that have left may still travel
    assert len(run._job.made()) < 8 + 6 + 8 + 8 + 8
    assert sum(outcome.staleness) > 3.3 * sum(outcome.steps)  # the counts of freed engines are kept


@pytest.mark.parametrize("n", [1, 2, 4])
def test_replacements_are_replaced_until_nobody_is_left_of_the_first(n: int) -> None:
    crashes = (
        [Fault(2.0 + 4 * i, "crash", i) for i in range(n)] if n > 1 else [Fault(4.0, "crash", 0)]
    )
    joins = [Fault(1.0, "join", 1), Fault(6.0, "join", 0)] if n == 1 else []
    outcome = train(
        task(), cluster(n, minutes=0.5, detect_s=0.1), faults=[*crashes, *joins],
        replace_s=None if joins else 1.0,
    )  # fmt: skip
    assert (outcome.failed, outcome.joined) == ((n, n) if n > 1 else (1, 2))
    assert outcome.points[-1].training == max(n, 2)


def test_one_that_has_left_may_be_replaced_and_the_slow_one_s_place_stays_slow() -> None:
    faults = [Fault(0.5, "fail", 3), Fault(2.0, "join", 3)]
    slow = cluster(4, minutes=0.5, slow=1, slow_factor=5.0)
    outcome = train(task(), slow, faults=faults)  # which waits for the slow one to let it in
    assert outcome.joined == 1
    assert outcome.steps[4] > 2 * outcome.steps[0]


def test_too_many_engines_are_refused() -> None:
    huge = cluster(128, minutes=600.0, failures_per_hour=1000.0)
    with pytest.raises(ConfigError, match="engines, at most 1000000 are possible. Pass fewer"):
        train(task(), huge, replace_s=10.0)
    breaks = [Fault(1.0, "break", 0, (1,), 1.0)]
    with pytest.raises(ConfigError, match="with the fault break. Pass fewer minutes"):
        train(
            task(), cluster(64, minutes=20.0, failures_per_hour=10.0), faults=breaks, replace_s=60.0
        )


def test_a_second_crash_of_the_same_super_learner_changes_nothing() -> None:
    twice = [Fault(1.0, "crash", 2), Fault(2.0, "crash", 2)]
    for strategy in ("random_pairs", "diloco:period=5,quorum=0.5"):
        quick = cluster(4, minutes=0.2, detect_s=0.1)
        outcome = train(task(), quick, strategy=strategy, faults=twice, replace_s=3.0)
        assert outcome.failed == outcome.joined == 1


def test_diloco_with_a_quorum_trains_on_without_the_failed() -> None:
    crash = [Fault(0.55, "crash", 1)]
    kwargs = {"strategy": "diloco:period=5,quorum=0.5", "faults": crash, "points": 4}
    alone = train(task(), cluster(4, minutes=0.1, detect_s=0.1), **kwargs)  # type: ignore[arg-type]
    assert alone.failed == 1 and alone.points[-1].training == 3
    assert alone.steps[1] == 5 and alone.steps[0] > 40
    kwargs["replace_s"] = 1.0
    replaced = train(task(), cluster(4, minutes=0.1, detect_s=0.1), **kwargs)  # type: ignore[arg-type]
    assert replaced.joined == 1 and replaced.points[-1].training == 4
    assert 25 < replaced.steps[1] < replaced.steps[0]
    assert replaced.points[-1].loss < replaced.points[0].loss


def test_diloco_waits_for_its_quorum() -> None:
    crashes = [Fault(0.55, "crash", i) for i in range(3)]
    outcome = train(
        task(), cluster(4, minutes=0.1, detect_s=0.1), strategy="diloco:period=5,quorum=0.5", faults=crashes,
        replace_s=2.0, points=4,
    )  # fmt: skip
    assert outcome.failed == outcome.joined == 3
    assert 30 < outcome.steps[3] < 45  # of 60: it has waited for 2 s
    never = train(
        task(),
        cluster(4, minutes=0.1, detect_s=0.1),
        strategy="diloco:period=5,quorum=0.5",
        faults=crashes,
    )
    assert never.steps[3] == 10 and never.ended == "time"


def test_after_all_have_failed_their_replacements_begin_with_the_last_mean() -> None:
    outcome = train(
        task(batches=lambda i, n, seed: [torch.ones(4, INPUTS, dtype=torch.float64)]),
        cluster(2, spread=0.0),
        strategy="diloco:period=10,quorum=0.5",
        steps=40,
        points=1000,
        faults=(Fault(1.25, "crash", 0), Fault(1.45, "crash", 1)),
        replace_s=0.1,
    )
    assert (outcome.failed, outcome.joined) == (2, 2)
    # all batches are equal: models differ only if one began with another model than the mean
    assert outcome.points[-1].training == 2 and outcome.points[-1].distance == 0


def test_samples_of_a_learner_that_fails_before_the_mean_are_lost() -> None:
    crash = [Fault(0.85, "crash", 1)]
    outcome = train(
        task(), cluster(4, minutes=0.05, spread=0.0), strategy="diloco:period=5,quorum=0.5",
        faults=crash,
    )  # fmt: skip
    used = sum(outcome.steps)
    assert outcome.steps[1] == 8
    each = outcome.points[1].samples / outcome.points[1].steps
    assert outcome.points[-1].samples == (used - 3) * each


def test_natural_gradients_need_the_module() -> None:
    def natural(parameters: list[nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
        return NaturalGradientSGD(model, 0.05)

    outcomes = [
        train(task(optimizer=natural), cluster(2), strategy=strategy, steps=20)
        for strategy in ("random_pairs", "synchronous")
    ]
    assert all(outcome.points[-1].loss < outcome.points[0].loss for outcome in outcomes)


class Point(nn.Module):
    """A place where a quadratic is 0.05 from its minimum in all directions."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((2000,), 0.05))


def noises(i: int, n: int, seed: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(i)
    while True:
        yield torch.randn(2000, generator=random)


def drift(strategy: str, moments: str | None, **how: Any) -> float:
    """How far AdamW moves, steps 150 to 300, where noise of variance 1 is in each gradient of x^2 / 2."""
    quadratic = task(
        model=Point,
        loss=lambda model, noise: (model.x.square() / 2 + model.x * noise).sum(),
        batches=noises,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-5, betas=(0.9, 0.99), weight_decay=0.0),
        evaluate=lambda model: {"x": float(model.x.detach().mean())},
    )
    job = cluster(8, chunks=64, moments=moments, **how)
    done = train(quadratic, job, strategy=strategy, steps=300, points=2)
    _, middle, last = (point.evaluation["x"] for point in done.points)
    return middle - last


def test_steps_on_a_noisy_quadratic_are_those_of_synchronous_training() -> None:
    """Where noise dominates, steps of super learners with own moments are sqrt(n) times too small."""
    synchronous = drift("synchronous", None)
    assert drift("random_pairs", "shared") == pytest.approx(synchronous, rel=0.1)
    # few products: of every 8th exchange, and of every 10th step
    assert drift("random_pairs", "shared", exchange_share=1 / 8) == pytest.approx(
        synchronous, rel=0.1
    )
    assert drift("random_pairs", "shared", exchanges_per_step=1 / 10) == pytest.approx(
        synchronous, rel=0.1
    )
    assert drift("random_pairs", "own") == pytest.approx(synchronous / 8**0.5, rel=0.1)
