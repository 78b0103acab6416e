"""Engines without trainers, one per process, each with one tensor that the program drives by hand."""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import Plan


def started(comm: MPI.Comm, model: np.ndarray, **options: Any) -> Engine:
    """An engine that asks when it is told to; the model is offered."""
    outer = comm.Dup()
    outer.Set_errhandler(MPI.ERRORS_RETURN)
    asks_nobody = Plan.nobody(weight=1 / 2)
    engine = Engine(inner=None, outer=outer, plan=asks_nobody, config=Config(**options))
    engine.memory.extend([TensorSpec("model", model.shape, "float64")])
    engine.start()
    engine.memory.absorb(address(model), 0)
    engine.offer(0)
    return engine


def address(model: np.ndarray) -> np.ndarray:
    """What `absorb` wants of it."""
    return np.array([model.ctypes.data], dtype=np.uintp)


def until(fact: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for it, with a bound."""
    ends = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < ends, "not in time"
        time.sleep(1e-3)


def say(comm: MPI.Comm, **facts: Any) -> None:
    """A line for the test."""
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(("\n@learner " + json.dumps({"rank": comm.rank, **facts}) + "\n").encode())
