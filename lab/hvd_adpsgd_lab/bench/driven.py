"""An engine that averages an array without training, for benchmarks: each call runs one round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies.plan import Plan


class Driven:
    """An engine that averages the array `model`, one round per call of round().

    Args:
        comm: communicator of all super learners.
        model: the array to average; corrections are added to it.
        plan: plan of the averaging strategy.
        options: options of Config other than deadline_s.
    """

    def __init__(self, comm: Any, model: np.ndarray, plan: Plan, **options: Any) -> None:
        from mpi4py import MPI

        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        config = Config(deadline_s=60.0, **options)
        self.engine = Engine(inner=None, outer=outer, plan=plan, config=config)
        self.engine.memory.extend([TensorSpec("model", model.shape, str(model.dtype))])
        self.engine.start()
        self._model = model  # kept alive: corrections are added at its address
        self._addresses = np.array([model.ctypes.data], dtype=np.uintp)

    def round(self, number: int, average: Callable[[], Any]) -> Any:
        """Offer the model to the engine, run average(), add its corrections; return average()'s result."""
        engine = self.engine
        engine.memory.absorb(self._addresses, number)
        engine.offer(number)
        found = average()
        engine.publish(number)
        engine.memory.absorb(self._addresses, number)
        return found

    def average(self, number: int) -> None:
        """Run round `number` of the plan, an exchange or a mean of all models, and wait for its end."""
        self.engine.rounds.begin(number)
        self.engine.rounds.finish()
