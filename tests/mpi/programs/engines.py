"""Engines without trainers, one per process, whose tensors the program changes by hand."""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import Plan, parse

DEADLINE_S = 60.0
ASKS_NOBODY = Plan.nobody(weight=1 / 2)


class Driven:
    """An engine that has started, and what a trainer does with it.

    Args:
        comm: of the leaders; None: this learner does not lead.
        plan: of a strategy, or its name; without, the engine asks when it is told to.
        models: tensors; `add` takes more.
        inner: of the super learner's learners.
        options: of Config.
    """

    def __init__(
        self,
        comm: MPI.Comm | None,
        plan: Plan | str = ASKS_NOBODY,
        *models: np.ndarray,
        inner: MPI.Comm | None = None,
        **options: Any,
    ):
        outer = None
        if comm is not None:
            outer = comm.Dup()
            outer.Set_errhandler(MPI.ERRORS_RETURN)
        if isinstance(plan, str):
            plan = parse(plan).plan(comm.rank, comm.size)
        config = Config(**{"deadline_s": DEADLINE_S, **options})
        self.engine = Engine(inner=inner, outer=outer, plan=plan, config=config)
        self.models: list[np.ndarray] = []
        self.step = 0
        self.add(*models)
        self.engine.start()

    def add(self, *models: np.ndarray) -> None:
        self.models += models
        first = len(self.models) - len(models)
        specs = [TensorSpec(f"x{first + i}", x.shape, str(x.dtype)) for i, x in enumerate(models)]
        self.engine.memory.extend(specs)

    def absorb(self) -> None:
        addresses = np.array([x.ctypes.data for x in self.models], dtype=np.uintp)
        self.engine.memory.absorb(addresses, self.step)

    def offer(self) -> None:
        self.absorb()
        self.engine.offer(self.step)

    def turn(self) -> None:
        """A step without a gradient: take in what is published, offer the models."""
        self.engine.publish(self.step)
        self.offer()
        self.step += 1


def until(fact: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
    """Wait for it, with a bound."""
    ends = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < ends, "not in time"
        time.sleep(1e-3)


def say(comm: MPI.Comm, **facts: Any) -> None:
    """A line for the test."""
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(("\n@learner " + json.dumps({"rank": comm.rank, **facts}) + "\n").encode())
