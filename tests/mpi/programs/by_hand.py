"""Free-running gossip whose exchanges come when the program says so, through the optimizer's own engine."""

import dataclasses
from typing import Any

import numpy as np

from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.launch import world as worlds

DEADLINE_S = 60.0


class ByHand:
    """A wrapped optimizer whose engine asks nobody of itself; all else is as it was.

    Args:
        optimizer: of a learner that leads; made by all super learners, before the first step.
    """

    def __init__(self, optimizer: Any):
        averaging, world = optimizer._averaging, worlds.current()
        plan = dataclasses.replace(averaging.plan, schedule=np.empty((1, 0)))
        config = averaging.engine.config
        self.engine = Engine(inner=world.inner, outer=world.outer, plan=plan, config=config)
        for specs in averaging.tensors.specs:
            self.engine.memory.extend(specs)
        self.engine.start()
        averaging.engines.replace(self.engine, 0.5)
        averaging.engine = self.engine
        self._comm, self._finished = world.outer, 0

    def exchange(self, asker: int, asked: int) -> None:
        """One exchange, from the models as both are now; both call it. Super learners by number."""
        ready = np.zeros(1)
        if self._comm.rank == asked:  # its steps so far are offered, and nobody else asks it
            wait(self._comm.Isend(ready, asker, tag=0))
        else:
            wait(self._comm.Irecv(ready, asked, tag=0))
            self.engine.loop.ask(asked)
        self._finished += 1
        assert self.engine.loop.wait_finished(self._finished, DEADLINE_S), (
            f"{asker} asks {asked}: hangs"
        )
