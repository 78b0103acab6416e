"""Benchmark of training steps while the run is watched and recorded, against steps while it is not.

Run by `python -m hvd_adpsgd bench watching`. The work is that of `bench step`, with hvd.log() in every step.
Every learner trains blocks of steps in turn: in one block the thread hvd_adpsgd.watching reports, records and
warns, in the next one it is idle. In both, the engine sends a report per second. The CPU seconds of the
thread are counted too.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.tools.bench import report, settings, spread_of
from hvd_adpsgd.tools.bench.step import Trial
from hvd_adpsgd.training import watching


def main() -> None:
    args = settings()
    torch.set_num_threads(1)
    hvd.init()
    trial = Trial(args.averaging)
    _block(trial, True, args.steps)  # warm-up
    began, cpu = time.monotonic(), _cpu_s()
    rows = [
        (_block(trial, False, args.steps), _block(trial, True, args.steps))
        for _ in range(args.blocks)
    ]
    used = 2 * (_cpu_s() - cpu) / (time.monotonic() - began)  # the thread is idle half of the time
    result: dict[str, Any] = {"learners": hvd.size()}
    result["steps_per_s"] = statistics.median(off for off, _ in rows)
    result |= spread_of("watched_speed_kept", [on / off for off, on in rows])
    result["watching_cpu"] = max(trial.comm.allgather(used))
    report(hvd.rank(), result)
    hvd.shutdown()


def _block(trial: Trial, watched: bool, steps: int) -> float:
    """Train a block of steps with or without watching; return the steps/s of all learners together."""
    for watcher in watching.running():
        watcher.rests = not watched
    trial.comm.Barrier()
    began = time.monotonic()
    for _ in range(steps):
        trial.step(trial.averaged)
        hvd.log(loss=1.0, lr=0.05)
    return float(sum(trial.comm.allgather(steps / (time.monotonic() - began))))


def _cpu_s() -> float:
    return sum(watcher.cpu_s for watcher in watching.running())


if __name__ == "__main__":
    main()
