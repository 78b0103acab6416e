"""Benchmark of how much averaging overlaps the computation of a step, with delay-by-one.

Run by `python -m hvd_adpsgd bench overlap`. Each learner, its own super learner, trains a model of
--mib with fixed gradients; the computation of a step is a sleep, which stands for a GPU's work and
leaves the CPU to the engine, or with --busy matrix products, which share the CPU with it. The length of
the computation is given in units of the time of a mean of all while nothing else runs. Measured in turn,
under the same load of the machine, are the plain optimizer, delay-by-one (the mean of all runs beside the
computation) and averaging after every step (the step waits for the mean).

With t_off the time of a plain step and t_mean that of a mean of all while nothing else runs, a step takes
max(t_off, t_mean) with full overlap and t_off + t_mean with none; in both cases it also adds corrections
and copies the model for the engine. hidden = (t_off + t_mean - step) / min(t_off, t_mean) is 1 for full
overlap at no other cost, 0 for no overlap.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.tools.bench import report, settings
from hvd_adpsgd.training.reports import metrics_of

KINDS = {"off": None, "delay": "delay_by_one", "periodic": "periodic_averaging:period=1"}
WARM_UP = 2  # steps before the clock starts


def main() -> None:
    args = settings()
    torch.set_num_threads(1)
    hvd.init()
    report(hvd.rank(), traced(args) if args.picture else measured(args))
    hvd.shutdown()


def traced(args: argparse.Namespace) -> dict[str, Any]:
    """Train a block with averaging args.only, for the figure; return the time of a mean of all models."""
    trial = Trial(args.mib, args.busy, (args.only,))
    trial.block(args.only, args.steps, 0.0)
    mean_s = trial.mean_s(args.only)
    trial.block(args.only, args.steps, 1e-3 * args.compute_ms or 1.5 * mean_s)
    return {"mean_ms": 1e3 * mean_s}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return medians of step times over blocks of steps, by the length of the computation."""
    trial = Trial(args.mib, args.busy, tuple(KINDS))
    for kind in KINDS:
        trial.block(kind, args.steps, 0.0)  # warm-up: touches memory
    result: dict[str, Any] = {"learners": hvd.size(), "model_mib": args.mib, "busy": args.busy}
    for times in args.compute:
        rows = [trial.row(args.steps, times) for _ in range(args.blocks)]
        result[f"compute {times:g}"] = summary(rows)
    return result


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    found = {f"{kind}_ms": 1e3 * statistics.median(row[kind] for row in rows) for kind in rows[0]}
    for kind in ("delay", "periodic"):
        alone = [(row[kind], sorted((row["off"], row["mean"]))) for row in rows]
        found |= {
            f"{kind}_to_max": statistics.median(step / long for step, (_, long) in alone),
            f"{kind}_to_sum": statistics.median(step / sum(both) for step, both in alone),
            f"{kind}_hidden": statistics.median((sum(b) - step) / b[0] for step, b in alone),
        }
    return found


class Trial:
    """One model, with an optimizer, per kind of averaging: none, delay-by-one, after every step."""

    def __init__(self, mib: float, busy: bool, kinds: tuple[str, ...]):
        self.comm = worlds.current().collectives.comm
        self.optimizers = {kind: self._optimizer(kind, int(mib * 2**18)) for kind in kinds}
        self._square = torch.randn(128, 128) / 128
        self._product_s = self._time_of_product() if busy else None

    def _optimizer(self, kind: str, count: int) -> Any:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Parameter(torch.randn(count))
        model.grad = torch.randn(count)
        plain = torch.optim.SGD([model], lr=1e-3)
        if KINDS[kind] is None:
            return plain
        return hvd.DistributedOptimizer(
            plain, named_parameters=[("model", model)], averaging=KINDS[kind]
        )

    def row(self, steps: int, times: float) -> dict[str, float]:
        """Return the seconds of a mean of all models alone, and of a step with each kind of averaging."""
        before = self.means("periodic")
        self.block("periodic", steps, 0.0)
        mean_s = self.mean_s("periodic", before)
        return {"mean": mean_s} | {k: self.block(k, steps, times * mean_s) for k in KINDS}

    def block(self, kind: str, steps: int, compute_s: float) -> float:
        """Train a block of steps, averaging as `kind`; return the seconds per step of the slowest learner."""
        optimizer = self.optimizers[kind]
        for _ in range(WARM_UP):
            optimizer.step()
        self.comm.Barrier()
        began = time.monotonic()
        for _ in range(steps):
            self._compute(compute_s)
            optimizer.step()
        return max(self.comm.allgather((time.monotonic() - began) / steps))

    def _compute(self, seconds: float) -> None:
        if self._product_s is None:
            time.sleep(seconds)  # stands for a GPU's work
            return
        for _ in range(round(seconds / self._product_s)):
            self._square @ self._square

    def _time_of_product(self) -> float:
        """Return the seconds of one matrix product while all learners compute."""
        self.comm.Barrier()
        began = time.monotonic()
        for _ in range(2000):
            self._square @ self._square
        return max(self.comm.allgather((time.monotonic() - began) / 2000))

    def means(self, kind: str) -> tuple[int, float]:
        """Return how many means of all models the engine of `kind` has computed, and in how many seconds."""
        numbers = metrics_of(self.optimizers[kind]._averaging)
        return numbers["means"], numbers["mean_s"]

    def mean_s(self, kind: str, before: tuple[int, float] = (0, 0.0)) -> float:
        """Return the seconds of one mean of all models since `before`, the maximum over learners."""
        count, seconds = self.means(kind)
        mine = (seconds - before[1]) / max(1, count - before[0])
        return max(self.comm.allgather(mine))


if __name__ == "__main__":
    main()
