"""Two super learners that cannot go on, one soon after the other; the second one has told of the first.

Four engines. The last one says that it cannot go on; when all know, and the first leader has warned of it,
that one cannot go on either. Each says the warnings that it logged.
"""

import logging

import numpy as np
from engines import ASKS_NOBODY, Driven, say, until
from mpi4py import MPI

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.lifecycle.membership import Membership


def knows(engine: Engine, membership: Membership, broken: int) -> bool:
    """Whether its failure is noticed here; the line is logged then."""
    membership.update(engine.report())
    return broken in membership.failed_ranks()


def main() -> None:
    comm = MPI.COMM_WORLD
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvd_adpsgd").addHandler(handler)
    driven = Driven(comm, ASKS_NOBODY, np.zeros(100))
    engine = driven.engine
    driven.offer()
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
    say(comm, warned=warned)


if __name__ == "__main__":
    main()
