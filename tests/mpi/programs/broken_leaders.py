"""Two super learners that cannot go on, one soon after the other; the second one has told of the first.

Four engines. The last one says that it cannot go on; when all know, and the first leader has warned of it,
that one cannot go on either. Each says the warnings that it logged.
"""

import logging

import numpy as np
from engines import say, started, until
from mpi4py import MPI


class Warnings(logging.Handler):
    """Keeps the lines of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    comm = MPI.COMM_WORLD
    warnings = Warnings()
    logging.getLogger("hvd_adpsgd").addHandler(warnings)
    model = np.zeros(100)
    engine = started(comm, model)
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
    say(comm, warned=warnings.lines)


if __name__ == "__main__":
    main()
