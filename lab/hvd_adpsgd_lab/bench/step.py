"""Benchmark of training steps with averaging on, against the same training with averaging off.

Run by `python -m hvd_adpsgd bench step`. By default the work is an MLP of 9.5 M parameters
(512-2048-2048-2048-10), batch 32, SGD with momentum, one thread per learner. Every learner trains
blocks of steps in turn: one with averaging off (the plain optimizer, the engine idle), one with averaging on,
so that each ratio compares two blocks under the same load of the machine. Between these blocks all learners
copy their model: the time of a copy is the unit of the time in step() beside the optimizer and the
all-reduce.

With --gpu the model and the work are on GPUs; the bytes that are copied from them and to them are counted.

With --straggler S there are blocks in which the last learner sleeps S seconds in every step; the result is
the speed of the other learners with averaging on, against their speed when no learner sleeps.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.presence import live
from hvd_adpsgd_lab.bench import report, settings, spread_of

INPUTS, CLASSES = 512, 10
_COUNTED = ("exchanges", "collect_s", "offer_s")


def main() -> None:
    args = settings()
    torch.set_num_threads(args.threads)
    hvd.init()
    work = Work(args.width, args.layers, args.batch, args.gpu)
    trial = Trial(args.averaging, args.device_ms / 1e3, work)
    trial.block(True, args.steps, 0.0)  # warm-up: touches memory, connects to peers
    trial.block(False, args.steps, 0.0)
    rows = [trial.row(args.steps, args.straggler) for _ in range(args.blocks)]
    result = {"learners": hvd.size(), "super_learners": hvd.super_size(), "rows": rows}
    result["idle"] = trial.idle(2.0)
    result["parameters"] = trial.nbytes // 4
    report(hvd.rank(), _summary(result))
    hvd.shutdown()


@dataclass(frozen=True)
class Work:
    """What a learner trains: an MLP with `layers` hidden layers of `width`; on a GPU, if `gpu`."""

    width: int = 2048
    layers: int = 3
    batch: int = 32
    gpu: bool = False


class Trial:
    """One model with two optimizers: torch's SGD alone, and one that averages models with peers.

    Args:
        averaging: spec of the averaging strategy.
        device_s: seconds that each step sleeps, as if a device computed; if not 0, the batch is one sample.
        work: the model and its batches.
    """

    def __init__(self, averaging: str, device_s: float = 0.0, work: Work | None = None):
        work = work or Work()
        self._device_s, self._gpu = device_s, work.gpu
        if self._gpu:
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        torch.manual_seed(hvd.rank())
        with torch.device("cuda" if self._gpu else "cpu"):
            self.model = _mlp(INPUTS, *[work.width] * work.layers, CLASSES)
            batch = 1 if self._device_s else work.batch
            self.x = torch.randn(batch, INPUTS)
            self.y = torch.randint(0, CLASSES, (batch,))
        self.plain = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.averaged = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            averaging=averaging,
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.spare = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        self.nbytes = sum(spare.nbytes for spare in self.spare)
        self.comm = worlds.current().collectives.comm

    def row(self, steps: int, sleep_s: float) -> dict[str, Any]:
        row = {
            "off": self.block(False, steps, 0.0),
            "copies": self.copies(steps),
            "on": self.block(True, steps, 0.0),
        }
        if sleep_s:
            row["straggler_on"] = self.block(True, steps, sleep_s)
        return row

    def block(self, averaging: bool, steps: int, sleep_s: float) -> list[dict[str, float]]:
        """Train `steps` steps (a sleeping learner: until all others are done); return counts, by rank."""
        optimizer = self.averaged if averaging else self.plain
        before, copied = hvd.metrics(), self._copied()
        self._sync()
        self.comm.Barrier()
        began, cpu = time.monotonic(), time.process_time()
        done, straggles = 0, sleep_s > 0 and hvd.rank() == hvd.size() - 1
        stop = self.comm.Ibarrier() if straggles else None
        while done < steps if stop is None else not stop.Test():
            self.step(optimizer)
            done += 1
            if straggles:
                time.sleep(sleep_s)  # stands for the work of a slow learner
        self._sync()
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        if stop is None and sleep_s:
            wait(self.comm.Ibarrier())
        spent = {
            key: value - before[key] for key, value in hvd.metrics().items() if key in _COUNTED
        }
        mine = {
            "steps_per_s": done / seconds,
            "cpu_ms_per_step": 1e3 * cpu / done,
            "exchanges_per_step": spent["exchanges"] / done,
            "share": hvd.metrics()["exchange_share"],
            "beside_ms": 1e3 * (spent["collect_s"] + spent["offer_s"]) / done,
        }
        if self._gpu:
            down, up = (b - a for a, b in zip(copied, self._copied(), strict=True))
            mine["down"] = down / done / self.nbytes if hvd.is_leader() else math.nan
            mine["up"] = up / done / self.nbytes
        self.comm.Barrier()
        return list(self.comm.allgather(mine))

    def copies(self, count: int) -> list[dict[str, float]]:
        """Copy the parameters `count` times on all learners at once; return the time of a copy, by rank."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        self.comm.Barrier()
        began = time.monotonic()
        for _ in range(count):
            torch._foreach_copy_(self.spare, parameters)
        self._sync()
        mine = {"copy_ms": 1e3 * (time.monotonic() - began) / count}
        return list(self.comm.allgather(mine))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        if self._device_s:
            time.sleep(self._device_s)  # stands for a device's work
        with torch.autocast(self.x.device.type, torch.bfloat16, self._gpu):
            loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        optimizer.step()

    def _sync(self) -> None:
        """Wait until the GPU has done all that it was told."""
        if self._gpu:
            torch.cuda.synchronize()

    def _copied(self) -> tuple[int, int]:
        """Return how many bytes have been copied from the GPU and to it for the averaging."""
        counts = [averaging.tensors.copied() for averaging in live()]
        return sum(down for down, _ in counts), sum(up for _, up in counts)

    def idle(self, seconds: float) -> float:
        """Return the share of a core that an idle engine uses, the largest of all learners."""
        self.comm.Barrier()
        engines = [averaging.engine for averaging in live()]
        before = sum(engine.metrics()["engine_cpu_s"] for engine in engines)
        time.sleep(seconds)  # the engine is idle meanwhile
        used = sum(engine.metrics()["engine_cpu_s"] for engine in engines) - before
        return max(self.comm.allgather(used / seconds))


def _mlp(*sizes: int) -> torch.nn.Sequential:
    """Return fully connected layers between layers of these sizes, with ReLU between them."""
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return medians of the speeds of blocks, and of ratios between blocks that were measured in turn."""
    rows = result.pop("rows")
    copy_ms = [_mean(row.pop("copies"), "copy_ms") for row in rows]
    beside_ms = [_mean(row["on"], "beside_ms") for row in rows]
    for kind in rows[0]:
        blocks = [row[kind][:-1] if kind.startswith("straggler") else row[kind] for row in rows]
        result[kind] = {
            "steps_per_s": statistics.median(_rate(block) for block in blocks),
            "cpu_ms_per_step": _median(blocks, "cpu_ms_per_step"),
            "exchanges_per_step": _median(blocks, "exchanges_per_step"),
            "share": _median(blocks, "share"),
        }
        for direction in ("down", "up"):
            if direction in blocks[0][0]:
                result[kind][direction] = _median(blocks, direction)
    result |= spread_of("speed_kept", [_rate(row["on"]) / _rate(row["off"]) for row in rows])
    result["copy_ms"] = statistics.median(copy_ms)
    result |= spread_of("step_in_copies", [a / b for a, b in zip(beside_ms, copy_ms, strict=True)])
    if "straggler_on" in rows[0]:
        kept = [_rate(row["straggler_on"][:-1]) / _rate(row["on"][:-1]) for row in rows]
        result |= spread_of("straggler_speed_kept", kept)
    return result


def _rate(block: list[dict[str, float]]) -> float:
    """Return the steps per second of all learners of a block together."""
    return sum(learner["steps_per_s"] for learner in block)


def _median(blocks: list[list[dict[str, float]]], key: str) -> float:
    return statistics.median(_mean(block, key) for block in blocks)


def _mean(block: list[dict[str, float]], key: str) -> float:
    """Return the mean over the learners that have such a number (some only leaders have); NaN without one."""
    found = [learner[key] for learner in block if not math.isnan(learner[key])]
    return statistics.mean(found) if found else math.nan


if __name__ == "__main__":
    main()
