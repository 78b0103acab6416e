"""A hub in a process that runs out of file descriptors: after each failure no more is open than before."""

import itertools
import os
import resource

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import TopologyError, TransportError
from hvd_adpsgd.messaging.sockets import Hub
from tests.holdings import holdings


def start() -> None:
    Hub(0, 1, Config(), lambda value: [value]).close()


start()  # libraries keep what they open first
before, errors = holdings(), 0
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.dup(0)  # the lowest free one
os.close(free)
for left in itertools.count():
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
    try:
        start()
        break
    except (TransportError, TopologyError) as error:
        assert "Too many open files" in str(error), error
        errors += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not holdings() - before, f"with {left} descriptors: {holdings() - before}"
print(errors)
