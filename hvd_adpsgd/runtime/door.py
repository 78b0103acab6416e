"""Where super learners that come later knock: a listener of a learner, and the conversation over it.

    newcomer's first learner                 learner with the door
    proves that it knows the secret   <->    proves the same (engine/handshake)
    Knock                              ->
                                       <-    what the caller answers
    ...                               <->    ...

Objects travel pickled, and only after both proofs. Strangers cost little: at most 16 connections are
unproven at once, the oldest makes room.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hvd_adpsgd.engine.handshake import (
    HELLO_NBYTES,
    PROOF_NBYTES,
    REPLY_NBYTES,
    SECRET_NBYTES,
    WELCOME,
    Hello,
    NotAMember,
)
from hvd_adpsgd.errors import LaunchError, PeerFailedError

__all__ = ["Conversation", "Door", "knock", "new_secret"]

log = logging.getLogger("hvd_adpsgd")

_HANDSHAKE_S = 5.0
_UNPROVEN = 16
_DRIP = 64  # reads of one message, at most


def new_secret() -> bytes:
    """What a job and those that join it know."""
    return secrets.token_bytes(SECRET_NBYTES)


@dataclass
class Conversation:
    """Objects to and from the other side, in order.

    Args:
        connection: proven.
    """

    connection: Connection

    def _take(self) -> Any:
        try:
            return self.connection.recv()
        except (OSError, EOFError) as error:
            raise PeerFailedError(f"the other side of the door is lost: {error}") from None
        except Exception as error:  # pickle's, of many kinds
            raise PeerFailedError(
                f"the two sides of the door do not understand each other ({error}). Run the same release on "
                "both."
            ) from error

    def tell(self, value: Any) -> None:
        """Send an object.

        Raises:
            PeerFailedError: if the other side has ended.
        """
        try:
            self.connection.send(value)
        except OSError as error:
            raise PeerFailedError(f"the other side of the door is lost: {error}") from None

    def hear(self, seconds: float | None) -> Any:
        """The next object.

        Args:
            seconds: longest wait; None: as long as the other side runs.

        Raises:
            PeerFailedError: if it does not come, or the other side has ended.
        """
        try:
            there = self.connection.poll(seconds)
        except OSError as error:
            raise PeerFailedError(f"the other side of the door is lost: {error}") from None
        if there:
            return self._take()
        raise PeerFailedError(f"the other side of the door said nothing for {seconds:g} s")

    def heard(self) -> list[Any]:
        """[the next object], or [] if it has not arrived; see `hear`."""
        try:
            there = self.connection.poll(0)
        except OSError as error:
            raise PeerFailedError(f"the other side of the door is lost: {error}") from None
        return [self._take()] if there else []

    def close(self) -> None:
        """End it."""
        self.connection.close()


class Door:
    """A listener for those that know the secret.

    Args:
        address: to listen on.
        secret: SECRET_NBYTES bytes.
        enter: receives each proven Conversation, on a thread of its own.

    Attributes:
        port: where it listens.
    """

    def __init__(self, address: str, secret: bytes, enter: Callable[[Conversation], object]):
        self._secret, self._enter = secret, enter
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []  # oldest first
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_UNPROVEN)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="hvd_adpsgd.door").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._unproven.append(connection)
                if len(self._unproven) > _UNPROVEN:
                    with contextlib.suppress(OSError):
                        self._unproven.pop(0).shutdown(socket.SHUT_RDWR)  # its thread ends
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_HANDSHAKE_S)
                hello = Hello.parse(_read(connection, HELLO_NBYTES))
                reply = hello.reply(self._secret)
                connection.sendall(reply)
                hello.check(self._secret, reply, _read(connection, PROOF_NBYTES))
                connection.sendall(WELCOME)
                proven = _proven(connection)
            except (NotAMember, OSError) as error:
                log.debug("at the door, a connection was refused: %s", error)
                return
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._unproven.remove(connection)
        with contextlib.suppress(PeerFailedError):
            self._enter(proven)

    def close(self) -> None:
        """Nobody enters any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()


def knock(doors: str, secret: bytes) -> Conversation:
    """Enter by the first of these doors that opens.

    Args:
        doors: host:port, separated by commas.
        secret: of the job.

    Raises:
        LaunchError: if none opens.
    """
    problems = []
    for door in filter(None, (part.strip() for part in doors.split(","))):
        host, _, port = door.rpartition(":")
        try:
            if not port.isdigit():
                raise OSError("this is not host:port")
            return _introduced(host.strip("[]"), int(port), secret)
        except (OSError, NotAMember) as error:
            problems.append(f"{door}: {error}")
    raise LaunchError(
        f"init(): HVD_ADPSGD_JOIN={doors}: the job cannot be joined ({'; '.join(problems) or 'no door'}). "
        "Give the doors that it prints at its start, host:port, and the same secret file."
    )


def _introduced(host: str, port: int, secret: bytes) -> Conversation:
    with socket.create_connection((host, port), timeout=_HANDSHAKE_S) as connection:
        hello = Hello.new(0, 0, 0, 0)
        connection.sendall(hello.pack())
        connection.sendall(hello.answer(secret, _read(connection, REPLY_NBYTES)))
        _read(connection, len(WELCOME))
        return _proven(connection)


def _proven(connection: socket.socket) -> Conversation:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Conversation(Connection(connection.detach()))


def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes."""
    data = b""
    for _ in range(_DRIP):
        more = connection.recv(nbytes - len(data))
        data += more
        if len(data) == nbytes:
            return data
        if not more:
            break
    raise ConnectionResetError("the other end closed the connection")
