"""Benchmark of adding corrections to a model, by one thread and by several, against a copy of the model.

Run by `python -m hvd_adpsgd bench absorb`, in one process: a pass adds corrections of all parameters to a
float32 model and copies the model to the engine's copy of it (mirror), as a leader does in each step beside
its optimizer.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from hvd_adpsgd.tools.bench import machine, spread_of
from hvd_adpsgd.tools.bench.calibrate import WARM_UP, Trial


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a copy, of a pass by one thread and by several, measured in turn in each round."""
    threads = args.threads or len(os.sched_getaffinity(0))
    trial = Trial(int(args.mib * 2**18), args.chunk_kib * 1024)
    copy = np.empty_like(trial.model)
    rounds = [_round(trial, copy, threads) for _ in range(args.rounds + WARM_UP)][WARM_UP:]
    return {
        "threads": threads,
        **spread_of("copy_ms", [1e3 * copy_s for copy_s, _, _ in rounds]),
        **spread_of("one_to_copy", [one / copy_s for copy_s, one, _ in rounds]),
        **spread_of("several_to_copy", [several / copy_s for copy_s, _, several in rounds]),
        **spread_of("several_to_one", [several / one for _, one, several in rounds]),
        "machine": machine(),
    }


def _round(trial: Trial, copy: np.ndarray, threads: int) -> tuple[float, float, float]:
    """Return the seconds of a copy, of a pass by one thread, and of a pass by several threads."""
    copy_s = trial.timed(lambda: np.copyto(copy, trial.model))
    trial.chunks()  # computes corrections of all chunks, which the next pass adds to the model
    one_s = trial.timed(trial.step)
    trial.chunks()
    return copy_s, one_s, trial.timed(lambda: trial.step(threads))
