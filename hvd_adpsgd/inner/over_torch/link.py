"""Connections between the first learner of a super learner and its other learners: JSON messages over TCP."""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

_LONGEST = 2**28  # bytes; no learner sends a longer message
_INTRODUCTION_S = 5.0  # longest wait for a learner's introduction: a token, and its rank
_TOKEN_NBYTES, _RANK_NBYTES = 16, 4


class Link:
    """A connection to one learner, in an event loop.

    Nothing waits until the other learner receives: it may be about to send to this one. What the connection
    does not take at once the event loop sends later.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    def send(self, message: Any) -> None:
        """Send a message; an error of the connection is left to `receive`, which sees its end."""
        data = json.dumps(message).encode()
        self._writer.write(len(data).to_bytes(4, "big") + data)

    async def receive(self) -> Any:
        """Wait for a message, and return it.

        Raises:
            EOFError: if the other learner has ended, or sends what no learner sends.
        """
        try:
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            return json.loads(await self._reader.readexactly(min(length, _LONGEST)))
        except (OSError, ValueError) as error:
            raise EOFError from error

    async def close(self) -> None:
        """Close the connection, once all messages are sent."""
        with contextlib.suppress(OSError):  # the other learner has ended
            self._writer.write_eof()  # ends it also for a forked child's copy of the socket
            self._writer.close()
            await self._writer.wait_closed()


def connect(
    rank: int, size: int, address: str, gather: Callable[[Any], list[Any]], seconds: float
) -> dict[int, socket.socket]:
    """Connect the learners 1, 2, ... of a super learner with learner 0; all of them call this together.

    Args:
        rank: this learner's rank in the super learner.
        size: number of learners of the super learner.
        address: address of this learner's host that the others reach.
        gather: returns the values that all learners give, by rank.
        seconds: longest wait for the others.

    Returns:
        The connections by rank: of learner 0 to all others, of every other learner to 0.

    Raises:
        OSError: if the connections are not made in time.
    """
    if rank > 0:
        (host, port, token), *_ = gather(None)
        connection = socket.create_connection((host, port), timeout=seconds)
        connection.sendall(token + rank.to_bytes(_RANK_NBYTES, "big"))
        if not connection.recv(1):  # learner 0 confirms the connection
            raise OSError(f"learner 0 of the super learner, at {host}:{port}, ended the connection")
        return {0: connection}
    with socket.create_server((address, 0), backlog=size) as server:
        ends = time.monotonic() + seconds
        token = secrets.token_bytes(_TOKEN_NBYTES)
        gather((address, server.getsockname()[1], token))
        connections: dict[int, socket.socket] = {}
        while len(connections) < size - 1:
            server.settimeout(max(0.01, ends - time.monotonic()))
            connection, _ = server.accept()
            if (other := _introduced(connection, token)) is not None:
                connections[other] = connection
    return connections


def _introduced(connection: socket.socket, token: bytes) -> int | None:
    """Read the token and rank that a learner sends; return the rank, None for a wrong token or length."""
    connection.settimeout(_INTRODUCTION_S)
    with contextlib.suppress(OSError), connection.makefile("rb") as file:
        shown, rank = file.read(_TOKEN_NBYTES), file.read(_RANK_NBYTES)
        if hmac.compare_digest(shown, token) and len(rank) == _RANK_NBYTES:
            connection.sendall(b"!")
            return int.from_bytes(rank, "big")
    connection.close()
    return None
