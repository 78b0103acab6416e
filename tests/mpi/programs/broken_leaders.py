"""Two super learners that cannot go on, one soon after the other; the second one has told of the first.

Four engines. The last one says that it cannot go on; when all know, and the first leader has warned of it,
that one cannot go on either. Each says the warnings that it logged.
"""

import logging

import numpy as np
from engines import say, started, until
from mpi4py import MPI

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.lifecycle.membership import Membership


class Warnings(logging.Handler):
    """Keeps the lines of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def knows(engine: Engine, membership: Membership, broken: int) -> bool:
    """Whether its failure is noticed here; the line is logged then."""
    membership.update(engine.report())
    return broken in membership.failed_ranks()


def main() -> None:
    comm = MPI.COMM_WORLD
    warnings = Warnings()
    logging.getLogger("hvd_adpsgd").addHandler(warnings)
    model = np.zeros(100)
    engine = started(comm, model)
    groups = [(rank,) for rank in range(comm.size)]
    membership = Membership(groups, [str(rank) for rank in range(comm.size)], comm.rank)
    victims = (comm.size - 1, 0)
    for step, broken in enumerate(victims):
        comm.Barrier()
        if comm.rank == broken:
            engine.stop(broken=True)
        elif comm.rank not in victims[:step]:
            until(lambda broken=broken: knows(engine, membership, broken))
    comm.Barrier()
    engine.stop()
    say(comm, warned=warnings.lines)


if __name__ == "__main__":
    main()
