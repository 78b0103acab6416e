"""An engine without a trainer: one model, averaged on command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies.plan import Plan


class Driven:
    """The engine of a model, driven round by round.

    Args:
        comm: all super learners.
        model: an array; corrections are added to it.
        plan: of the strategy.
        options: of Config, other than the deadline.
    """

    def __init__(self, comm: Any, model: np.ndarray, plan: Plan, **options: Any) -> None:
        from mpi4py import MPI

        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        config = Config(deadline_s=60.0, **options)
        self.engine = Engine(inner=None, outer=outer, plan=plan, config=config)
        self.engine.memory.extend([TensorSpec("model", model.shape, str(model.dtype))])
        self.engine.start()
        self._model = model  # corrections go to its address
        self._addresses = np.array([model.ctypes.data], dtype=np.uintp)

    def round(self, number: int, average: Callable[[], Any]) -> Any:
        """Offer the model, let it be averaged, and add the corrections."""
        engine = self.engine
        engine.memory.absorb(self._addresses, number)
        engine.offer(number)
        found = average()
        engine.publish(number)
        engine.memory.absorb(self._addresses, number)
        return found

    def average(self, number: int) -> None:
        """The exchange, or the mean, of that round."""
        self.engine.rounds.begin(number)
        self.engine.rounds.finish()
