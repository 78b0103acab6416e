"""Two super learners that cannot go on, one soon after the other; the second one has told of the first.

Four engines. The last one says that it cannot go on; when all know, and the first leader has warned of it,
that one cannot go on either. Each says the warnings that it logged.
"""

import json
import logging
import os
import time

import numpy as np
from mpi4py import MPI

from hvd_adpsgd.engine import Engine, EngineOptions
from hvd_adpsgd.layout import TensorSpec
from hvd_adpsgd.strategies import RandomPairs


class Warnings(logging.Handler):
    """Keeps the lines of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    comm = MPI.COMM_WORLD
    outer = comm.Dup()
    outer.Set_errhandler(MPI.ERRORS_RETURN)
    warnings = Warnings()
    logging.getLogger("hvd_adpsgd").addHandler(warnings)
    plan = RandomPairs().plan(comm.rank, comm.size)
    engine = Engine(inner=None, outer=outer, plan=plan, options=EngineOptions(autonomous=False))
    model = np.zeros(100)
    engine.extend([TensorSpec("model", model.shape, "float64")])
    engine.start()
    engine.absorb(np.array([model.ctypes.data], dtype=np.uintp), -1, 0)
    victims = (comm.size - 1, 0)
    for step, broken in enumerate(victims):
        comm.Barrier()
        if comm.rank == broken:
            engine.stop(broken=True)
        elif comm.rank not in victims[:step]:
            until(lambda broken=broken: broken in engine.lost())
            engine.offer(step)
    comm.Barrier()
    engine.stop()
    os.write(
        1,
        ("\n@learner " + json.dumps({"rank": comm.rank, "warned": warnings.lines}) + "\n").encode(),
    )


def until(fact, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < ends, "not in time"
        time.sleep(1e-3)


if __name__ == "__main__":
    main()
