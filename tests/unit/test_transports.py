"""Messages that arrive broken, and messages over MPI that two threads send, without MPI."""

import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_adpsgd.errors import TransportError
from hvd_adpsgd.messaging.messages import Messages
from hvd_adpsgd.messaging.mpi_transport import MpiTransport
from tests.silent_network import ABANDON, BETWEEN, LEAVES, WAITS, SilentNetwork


@pytest.mark.parametrize(
    ("channel", "data"),
    [
        (LEAVES, b""),
        (LEAVES, b"\0\0\0"),
        (LEAVES, struct.pack("=2i", 1, 3)),  # of three learners
        (LEAVES, struct.pack("=2i", 1, -1)),
        (LEAVES, struct.pack("=2i", 3, 1)),
        (WAITS, b"garbage"),
        (BETWEEN, b""),
        (ABANDON, b"\x80"),
        (ABANDON, pickle.dumps("reason")),
    ],
)
def test_a_message_that_cannot_be_read_is_a_typed_error(channel: int, data: bytes) -> None:
    network = SilentNetwork()
    messages = Messages(network)
    network.arrives(1, channel, data)
    with pytest.raises(TransportError, match="of another learner cannot be read"):
        messages.poll()
    assert not messages.left and not messages.failed
    network.arrives(1, LEAVES, struct.pack("=2i", 1, 2))
    messages.poll()
    assert messages.left == messages.failing == {2}


class Request:
    """A send that MPI has not finished."""

    def Test(self) -> bool:
        return False


class Comm:
    def Isend(self, data: Any, place: int, tag: int) -> Request:
        return Request()


class Watched(list[Any]):
    """A list that calls `look` when all of its elements have been looked at."""

    look: Callable[[], object]

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        self.look()


def test_what_another_thread_sends_meanwhile_is_kept_for_mpi() -> None:
    """A departure is announced on the thread of SIGTERM, while the trainer's polls; MPI still reads it."""
    transport = MpiTransport.__new__(MpiTransport)
    transport.failed, transport._comm, transport._byte = set(), Comm(), None
    transport._sending, transport._lock = sending, _ = Watched(), threading.Lock()
    transport._mpi_exception = RuntimeError
    transport.send(1, 0, b"first")
    sender = threading.Thread(target=transport.send, args=(1, 0, b"second"))

    def look() -> None:
        sender.start()
        sender.join(0.2)  # without a lock it is done by then

    sending.look = look
    transport._reap()
    sender.join(60)
    assert [data for _, data in transport._sending] == [b"first", b"second"]
