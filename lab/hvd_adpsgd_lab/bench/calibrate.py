"""Measures the cost of averaging on this machine without the network, for `simulate --calibration FILE`.

Run by `python -m hvd_adpsgd bench calibrate`, in one process. Timed are a leader's step (it publishes and
applies corrections of all parameters, and copies the model to the engine's copy, the mirror), and the
engine's work on each chunk of an exchange (it takes a snapshot and merges a received chunk).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shard_memory import ShardMemory
from hvd_adpsgd_lab.bench import machine
from hvd_adpsgd_lab.simulation.calibration import Calibration
from hvd_adpsgd_lab.simulation.engine_calls import merge, snapshot

OWN_TYPE = -1  # type of chunks on the wire: that of the parameters
WARM_UP = 2  # rounds that are not counted: each first touches one of two buffers of corrections


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the costs, write them to the file args.out if it is given, and return them for the table."""
    found = calibrated(args.mib, args.chunk_kib, args.rounds)
    if args.out:
        found.write(args.out)
    return {
        "model_mib": found.model_nbytes / 2**20,
        "chunk_kib": found.chunk_nbytes / 2**10,
        "step_ms": 1e3 * found.step_s_per_byte * found.model_nbytes,
        "chunk_us": 1e6 * found.chunk_s_per_byte * found.chunk_nbytes,
        "machine": found.machine,
    }


def calibrated(mib: float, chunk_kib: int, rounds: int) -> Calibration:
    """Measure the costs for a model of `mib` MiB; return medians over `rounds` rounds."""
    trial = Trial(int(mib * 2**18), chunk_kib * 1024)
    found = [(trial.timed(trial.chunks), trial.timed(trial.step)) for _ in range(rounds + WARM_UP)]
    chunks_s, step_s = (statistics.median(column[WARM_UP:]) for column in zip(*found, strict=True))
    return Calibration(
        step_s_per_byte=step_s / trial.nbytes,
        chunk_s_per_byte=chunks_s / trial.nbytes,
        machine=machine(),
        model_nbytes=trial.nbytes,
        chunk_nbytes=trial.chunk_nbytes,
    )


class Trial:
    """A float32 model in the engine's memory, with the work of a trainer and of an engine on it."""

    def __init__(self, count: int, chunk_nbytes: int) -> None:
        self.model = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
        self.nbytes, self.chunk_nbytes = self.model.nbytes, chunk_nbytes
        self.memory = ShardMemory(chunk_nbytes, None, True)
        self.memory.extend([TensorSpec("model", self.model.shape, "float32")])
        self._addresses = np.array([self.model.ctypes.data], dtype=np.uintp)
        self._sent = np.empty(chunk_nbytes, np.uint8)
        self._received = np.zeros(chunk_nbytes, np.uint8)
        self._step = 0
        self.step()

    @staticmethod
    def timed(act: Callable[[], None]) -> float:
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    def step(self) -> None:
        """Do a leader's work in a step: add corrections to the model, copy the model to the engine."""
        self.memory.publish()
        self.memory.absorb(self._addresses, self._step)
        self._step += 1

    def chunks(self) -> None:
        """Do the engine's work of an exchange without messages: copy each chunk, merge a received one."""
        chunks = [chunk for part in self.memory.layout.parts for chunk in part.chunks]
        for i, chunk in enumerate(chunks):
            nbytes = 4 * chunk.count
            sent, received = self._sent[:nbytes], self._received[:nbytes]
            snapshot(self.memory.store, i, OWN_TYPE, sent)
            merge(self.memory.store, i, OWN_TYPE, 0.5, received, sent)
