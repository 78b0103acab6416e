"""Without a free file descriptor, making a wire raises OSError with the cure, and leaves nothing open."""

import errno
import os
import resource

import pytest

from hvd_adpsgd.engine.wire import SystemClock
from hvd_adpsgd.engine.wire_tcp import TcpWire


@pytest.mark.parametrize("left", [0, 1])
def test_a_wire_without_descriptors_says_so(left: int) -> None:
    """It needs two beside its pipes: one to sleep on, one by which the trainer wakes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    news, dials = os.pipe2(os.O_NONBLOCK)
    last = os.dup(news)
    os.close(last)  # the lowest free one
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + left, hard))
    try:
        with pytest.raises(OSError, match="ulimit -n") as found:
            TcpWire(SystemClock(), 0, 2, news, dials, 1e6)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.value.errno == errno.EMFILE
    again = os.dup(news)
    assert again == last, "what it had opened is closed"
    for end in (news, dials, again):
        os.close(end)
