"""An engine without a trainer: one model, averaged on command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_adpsgd.engine.engine import Engine, EngineOptions
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies.plan import Plan


class Driven:
    """The engine of a model, driven round by round.

    Args:
        comm: all super learners.
        model: an array; corrections are added to it.
        plan: of the strategy.
        options: others than the engine's.
    """

    def __init__(self, comm: Any, model: np.ndarray, plan: Plan, **options: Any) -> None:
        from mpi4py import MPI

        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        chosen = EngineOptions(deadline_s=60.0, **options)
        self.engine = Engine(inner=None, outer=outer, plan=plan, options=chosen)
        self.engine.extend([TensorSpec("model", model.shape, str(model.dtype))])
        self.engine.start()
        self._model = model  # corrections go to its address
        self._addresses = np.array([model.ctypes.data], dtype=np.uintp)

    def round(self, number: int, average: Callable[[], Any]) -> Any:
        """Offer the model, let it be averaged, and add the corrections."""
        engine = self.engine
        engine.absorb(self._addresses, -1, number)
        engine.offer(number)
        found = average()
        engine.publish(number)
        engine.absorb(self._addresses, engine.published(), number)
        return found

    def average(self, number: int) -> None:
        """The exchange, or the mean, of that round."""
        self.engine.begin_round(number)
        self.engine.finish_round()
