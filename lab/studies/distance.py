"""What averaging costs in loss: exchanges per step, in how many bits, by optimizer; in virtual time.

    python -m lab.studies.distance build/distance --n 8 --optimizers adamw muon --rates 0.016 0.032 \
        --schemes synchronous 1xfloat32 4xint4 --seeds 3

The byte transformer of examples/, 300 steps of 50 ms, 10 Gb/s. A scheme is `synchronous`, or exchanges per
step x the format of models; moments are shared in every fourth exchange, with :2 in every second, or :own.
Optimizers: adamw; muon; plain, which is Muon without Nesterov's term. Finished runs are not repeated.
"""

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from hvd_adpsgd_lab.learning.task import Task
from hvd_adpsgd_lab.learning.train import train
from hvd_adpsgd_lab.simulation.planner import PATIENT, Cluster

from examples import byte_transformer as example
from lab.studies.keeper import Job, perform_jobs

STEPS = example.STEPS


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of blocks; AdamW at 0.3 of its rate for embeddings, head and vectors."""

    def __init__(self, matrices: list[Any], others: list[Any], rate: float, nesterov: bool):
        adamw = torch.optim.AdamW(others, lr=0.3 * rate, betas=(0.9, 0.95), weight_decay=0.1)
        self._parts = [torch.optim.Muon(matrices, lr=rate, nesterov=nesterov), adamw]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for part in self._parts:
            part.step()

    def momentum_keys(self, group: dict[str, Any]) -> list[str]:
        return ["momentum_buffer" if "ns_steps" in group else "exp_avg"]

    def second_moment_key(self, group: dict[str, Any]) -> str | None:
        return "exp_avg_sq" if "betas" in group else None


def optimizer(name: str, rate: float) -> Any:
    """Return the function of a task that makes an optimizer."""

    def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)

    def muon(parameters: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        *blocks, _ = (m.weight for m in model.modules() if isinstance(m, torch.nn.Linear))
        tied = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        matrices = [p for p in blocks if id(p) not in tied]
        chosen = set(map(id, matrices))
        return MuonAdamW(
            matrices, [p for p in parameters if id(p) not in chosen], rate, name == "muon"
        )

    return adamw if name == "adamw" else muon


def outcome(n: int, name: str, scheme: str, rate: float, seed: int) -> dict[str, Any]:
    """Train; return the loss, megabytes sent and the distance of the models."""
    task = Task(
        example.model, example.loss, example.batches, optimizer(name, rate), example.schedule,
        example.evaluate, name="distance",
    )  # fmt: skip
    config, strategy = PATIENT, "synchronous"
    if scheme != "synchronous":
        times, _, wire = scheme.partition("x")
        wire, _, period = wire.partition(":")
        how = {"moments": "own"} if period == "own" else {"moments_period": int(period or 4)}
        config = PATIENT.replace(exchanges_per_step=float(times), wire_dtype=wire, **how)
        strategy = "random_pairs"
    cluster = Cluster(n, float(task.parameters()), 0.05, 1.25e9, 50e-6, config, seed=seed)
    run = train(task, cluster, strategy=strategy, steps=STEPS, points=1)
    last = run.points[-1]
    return {
        "loss": last.evaluation["held-out loss"],
        "mb": run.sent_bytes / 1e6,
        "distance": last.distance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--n", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--optimizers", nargs="+", default=["adamw", "muon"], choices=["adamw", "muon", "plain"]
    )
    parser.add_argument("--schemes", nargs="+", default=["synchronous", "1xfloat32", "4xint4"])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.016, 0.032])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    cells = [
        (n, name, scheme, rate)
        for n in args.n
        for name in args.optimizers
        for rate in args.rates
        for scheme in args.schemes
    ]
    for cell in cells:
        jobs = [
            Job("-".join(map(str, (*cell, seed))), {"cell": cell, "seed": seed}, act(cell, seed))
            for seed in range(args.seeds)
        ]
        records, failures = perform_jobs(jobs, args.out)
        losses = [record["loss"] for record in records if record]
        n, name, scheme, rate = cell
        mb = next((record["mb"] for record in records if record), 0.0)
        shown = " ".join(f"{loss:.3f}" for loss in losses)
        mean = statistics.mean(losses) if losses else float("nan")
        print(
            f"n {n:3} {name:6} {rate:6g} {scheme:16} {mean:.3f} ({shown}) {mb:.0f} MB",
            *failures,
            flush=True,
        )


def act(cell: tuple[int, str, str, float], seed: int) -> Any:
    return lambda _: outcome(*cell, seed)


if __name__ == "__main__":
    main()
