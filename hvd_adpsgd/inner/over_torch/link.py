"""Connections between the first learner of a super learner and its other learners: JSON messages over TCP."""

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

_LONGEST = 2**28  # bytes; no learner sends a longer message
_INTRODUCTION_S = 5.0  # longest wait for a learner's first message
_INTRODUCTION_NBYTES = 1024  # and its length


class Link:
    """A connection to one learner, for one thread.

    Nothing waits until the other learner receives: it may be about to send to this one. What the connection
    does not take at once is sent by later calls of `push`.

    Attributes:
        longest: bytes of the longest message that is received; after a longer one the link has ended.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._received, self.longest = connection, bytearray(), _LONGEST
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message; an error of the connection is left to `receive`, which sees its end."""
        data = json.dumps(message).encode()
        self._unsent += len(data).to_bytes(4, "big") + data
        self.push()

    @property
    def is_sending(self) -> bool:
        """Whether `push` has more to send, as soon as the connection takes it."""
        return bool(self._unsent)

    def push(self) -> None:
        """Send as much as the connection takes at once."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
            self._shut()

    def receive(self) -> list[Any]:
        """Wait for bytes, and return the messages that are complete.

        Raises:
            EOFError: if the other learner has ended.
        """
        try:
            piece = self._socket.recv(2**16)
        except OSError:
            piece = b""
        if not piece:
            raise EOFError
        self._received += piece
        messages = []
        while len(self._received) >= 4:
            length = int.from_bytes(self._received[:4], "big")
            if length > self.longest:
                raise EOFError
            if len(self._received) < 4 + length:
                break
            messages.append(json.loads(self._received[4 : 4 + length]))
            del self._received[: 4 + length]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._shut()
        self._socket.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def connect(
    rank: int, size: int, address: str, gather: Callable[[Any], list[Any]], seconds: float
) -> dict[int, Link]:
    """Connect the learners 1, 2, ... of a super learner with learner 0; all of them call this together.

    Args:
        rank: this learner's rank in the super learner.
        size: number of learners of the super learner.
        address: address of this learner's host that the others reach.
        gather: returns the values that all learners give, by rank.
        seconds: longest wait for the others.

    Returns:
        The links by rank: of learner 0 to all others, of every other learner to 0.

    Raises:
        OSError: if the connections are not made in time.
    """
    if rank > 0:
        (host, port, token), *_ = gather(None)
        connection = socket.create_connection((host, port), timeout=seconds)
        link = Link(connection)
        link.send([token, rank])
        try:
            link.receive()  # that it is accepted
        except EOFError:
            raise OSError(
                f"learner 0 of the super learner, at {host}:{port}, ended the connection"
            ) from None
        connection.settimeout(None)
        return {0: link}
    with socket.create_server((address, 0), backlog=size) as server:
        ends = time.monotonic() + seconds
        token = secrets.token_hex(16)
        gather((address, server.getsockname()[1], token))
        links: dict[int, Link] = {}
        while len(links) < size - 1:
            server.settimeout(max(0.01, ends - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(_INTRODUCTION_S)
            if (other := _introduced(connection, token)) is not None:
                connection.settimeout(None)
                links[other[0]] = other[1]
    return links


def _introduced(connection: socket.socket, token: str) -> tuple[int, Link] | None:
    """Return the rank that another learner names, and its link; None for a stranger."""
    link = Link(connection)
    link.longest = _INTRODUCTION_NBYTES
    try:
        messages: list[Any] = []
        while not messages:
            messages = link.receive()
        shown, rank = messages[0]
        if hmac.compare_digest(str(shown), token):
            link.send("accepted")
            link.longest = _LONGEST
            return int(rank), link
    except Exception:  # of whatever a stranger sends
        pass
    link.close()
    return None
