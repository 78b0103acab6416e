"""The listening socket to which joining super learners connect, and the objects sent over a connection.

    first learner that joins                learner with the listener
                                       <-    its release, in a form that all releases read
    proves that it knows the secret   <->    proves the same (engine/handshake)
    JoinRequest                        ->
                                       <-    JoinOffer, sent by the caller of Listener
    ...                               <->    ...

Objects travel pickled, and only after both sides have proved that they know the secret. At most 16
connections whose proof has not arrived are open at once: one more closes the oldest of them.
"""

import contextlib
import logging
import math
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvd_adpsgd.engine.handshake import (
    HELLO_NBYTES,
    PROOF_NBYTES,
    RELEASE,
    REPLY_NBYTES,
    SECRET_NBYTES,
    WELCOME,
    Hello,
    NotAMember,
)
from hvd_adpsgd.errors import LaunchError, PeerFailedError

log = logging.getLogger("hvd_adpsgd")

# longest wait of a learner that trains for the rest of a message, or until a message is taken
MESSAGE_S = 10.0
_HANDSHAKE_S = 5.0
_LENGTH = struct.Struct("!I")  # in front of each object: the number of its bytes
_READ_NBYTES = 2**20
_FAILURE_S = 60.0  # the default of failure_timeout_s
_UNPROVEN = 16  # connections whose proof has not been received, at most
_NAME = "hvd_adpsgd "
_GREETING_NBYTES = 64
_FULL_S = 0.2  # pause before the next accept() if the process has no file descriptor or thread left
_DRIP = 64  # largest number of reads for one message


def new_secret() -> bytes:
    """Return a new random secret, which a job shares with the super learners that may join it."""
    return secrets.token_bytes(SECRET_NBYTES)


class Conversation:
    """A connection that carries objects between a joining super learner and a learner of the job, in order.

    Args:
        connection: a connection whose two ends have proved that they know the secret.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        connection.setblocking(False)
        # the beginning of the next object, and the number of its bytes before it
        self._arrived = bytearray()

    def send(self, value: Any, seconds: float | None = None) -> None:
        """Send an object.

        Args:
            value: the object.
            seconds: longest wait for the other side to take its bytes, after which the connection is closed;
                None: wait as long as the other side runs.

        Raises:
            PeerFailedError: if the other side has ended, or does not take the object within `seconds`.
        """
        data = pickle.dumps(value)
        rest, ends = memoryview(_LENGTH.pack(len(data)) + data), _deadline(seconds)
        while rest:
            if not self._is_ready(select.POLLOUT, ends):
                self.close()  # the other side could not tell the rest of this object from the next one
                raise PeerFailedError(
                    f"the other side of the listener received no complete message for {seconds:g} s"
                )
            with _losses(), contextlib.suppress(BlockingIOError):
                rest = rest[self.connection.send(rest) :]

    def receive(self, seconds: float | None) -> Any:
        """Receive and return the next object.

        Args:
            seconds: longest wait; None: wait as long as the other side runs.

        Raises:
            PeerFailedError: if no object comes within `seconds`, or the other side has ended.
        """
        ends = _deadline(seconds)
        while (missing := self._missing) > 0:
            if not self._is_ready(select.POLLIN, ends):
                raise PeerFailedError(
                    f"the other side of the listener sent no complete message for {seconds:g} s"
                )
            with _losses(), contextlib.suppress(BlockingIOError):
                more = self.connection.recv(min(missing, _READ_NBYTES))
                if not more:
                    raise _lost("it has ended")
                self._arrived += more
        data, self._arrived = bytes(self._arrived[_LENGTH.size :]), bytearray()
        try:
            return pickle.loads(data)
        except Exception as error:  # pickle raises exceptions of many classes
            raise PeerFailedError(
                f"an object from the other side of the listener cannot be read ({error}). Run the same "
                "release on both sides."
            ) from error

    @property
    def _missing(self) -> int:
        """The number of bytes that the next object, or its length, still lacks."""
        if len(self._arrived) < _LENGTH.size:
            return _LENGTH.size - len(self._arrived)
        return _LENGTH.size + int(_LENGTH.unpack_from(self._arrived)[0]) - len(self._arrived)

    def received(self) -> list[Any]:
        """Return a list with the next object, or an empty list if no object has begun to arrive.

        Raises:
            PeerFailedError: if an object that has begun to arrive is incomplete after MESSAGE_S; see receive.
        """
        begun = self._arrived or self._is_ready(select.POLLIN, -math.inf)
        return [self.receive(MESSAGE_S)] if begun else []

    def _is_ready(self, events: int, ends: float) -> bool:
        """Wait until bytes can move or the connection has ended; return False after `ends`."""
        if self.connection.fileno() < 0:
            raise _lost("the connection is closed")
        poll = select.poll()
        poll.register(self.connection, events)
        seconds = ends - time.monotonic()
        return bool(poll.poll(None if seconds == math.inf else max(0.0, 1e3 * seconds)))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _lost(why: object) -> PeerFailedError:
    return PeerFailedError(f"the other side of the listener is lost: {why}")


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """Context manager that turns the error of a connection into a PeerFailedError."""
    try:
        yield
    except OSError as error:
        raise _lost(error) from None


class Listener:
    """Accepts connections of joining super learners, which must prove that they know the job's secret.

    Args:
        address: address to listen on.
        secret: the job's secret, SECRET_NBYTES bytes.
        enter: called, on a new thread, with the Conversation of each process that knows the secret.
        failure_s: a Conversation is lost if the other host has not answered for this time, in seconds.

    Attributes:
        port: port of the listening socket.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        enter: Callable[[Conversation], object],
        failure_s: float = _FAILURE_S,
    ):
        self._secret, self._enter, self._failure_s = secret, enter, failure_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []  # connections without a proof yet, oldest first
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_UNPROVEN)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="hvd_adpsgd.listener").start()

    def _accept(self) -> None:
        is_full = False
        while not self._closed.is_set():
            try:
                self._accept_one()
                is_full = False
            except (OSError, RuntimeError) as error:  # no file descriptor, memory or thread is left
                if not is_full and not self._closed.is_set():
                    log.warning("no super learner can join here for the moment: %s.", error)
                is_full = True
                self._closed.wait(_FULL_S)

    def _accept_one(self) -> None:
        connection, _ = self._listener.accept()
        with self._lock:
            self._unproven.append(connection)
            if len(self._unproven) > _UNPROVEN:
                with contextlib.suppress(OSError):
                    self._unproven.pop(0).shutdown(socket.SHUT_RDWR)  # ends the oldest one's thread
        try:
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            connection.close()
            raise

    def _forget(self, connection: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unproven.remove(connection)

    def _welcome(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_HANDSHAKE_S)
                connection.sendall(greeting(RELEASE))
                hello = Hello.parse(_read(connection, HELLO_NBYTES))
                reply = hello.reply(self._secret)
                connection.sendall(reply)
                hello.check(self._secret, reply, _read(connection, PROOF_NBYTES))
                connection.sendall(WELCOME)
                proven = _proven(connection, self._failure_s)
            except (NotAMember, OSError) as error:
                log.debug("at the listener, a connection was refused: %s", error)
                return
            finally:
                self._forget(connection)
        with contextlib.suppress(PeerFailedError):
            self._enter(proven)

    def close(self) -> None:
        """Stop accepting connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # makes a waiting `accept` return
        self._listener.close()


def connect(listeners: str, secret: bytes, failure_s: float = _FAILURE_S) -> Conversation:
    """Connect to the first of the job's listeners that accepts this process, and return the Conversation.

    Args:
        listeners: addresses of listeners as host:port, separated by commas.
        secret: the job's secret.
        failure_s: see Listener.

    Raises:
        LaunchError: if none of the listeners accepts.
    """
    problems = []
    for listener in filter(None, (part.strip() for part in listeners.split(","))):
        host, _, port = listener.rpartition(":")
        try:
            if not port.isdigit():
                raise OSError("this is not host:port")
            return _introduced(host.strip("[]"), int(port), secret, failure_s)
        except (OSError, NotAMember) as error:
            problems.append(f"{listener}: {error}")
    raise LaunchError(
        f"init(): HVD_ADPSGD_JOIN={listeners}: the job cannot be joined "
        f"({'; '.join(problems) or 'no listener'}). Give the listeners that it prints at its start, "
        f"host:port, and the same secret file, and install the same release: this is {RELEASE}."
    )


def greeting(release: str) -> bytes:
    """Return a listener's first message, the name of its release, in a form that all releases can read."""
    return f"{_NAME}{release}".encode().ljust(_GREETING_NBYTES)[:_GREETING_NBYTES]


def _require_same_release(said: bytes) -> None:
    """Raise NotAMember if a listener's first message names another release, whose messages may differ."""
    if said == greeting(RELEASE):
        return
    text = said.decode(errors="replace")
    if not text.startswith(_NAME):
        raise NotAMember("this is no listener of hvd_adpsgd")
    raise NotAMember(f"the job runs {text.rstrip()}, this learner {_NAME}{RELEASE}")


def _introduced(host: str, port: int, secret: bytes, failure_s: float) -> Conversation:
    with socket.create_connection((host, port), timeout=_HANDSHAKE_S) as connection:
        _require_same_release(_read(connection, _GREETING_NBYTES))
        hello = Hello.new(0, 0, 0, 0)
        connection.sendall(hello.pack())
        connection.sendall(hello.answer(secret, _read(connection, REPLY_NBYTES)))
        _read(connection, len(WELCOME))
        return _proven(connection, failure_s)


def _proven(connection: socket.socket, failure_s: float) -> Conversation:
    """Return a Conversation over a connection of known processes; its waits end if the other host is silent.

    TCP keepalive probes the other host, also while nothing is sent.
    """
    connection.settimeout(None)
    every = max(1, round(failure_s / 4))
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, round(1e3 * max(4 * every, failure_s))),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Conversation(socket.socket(fileno=connection.detach()))


def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Read and return exactly `nbytes` bytes."""
    data = b""
    for _ in range(_DRIP):
        more = connection.recv(nbytes - len(data))
        data += more
        if len(data) == nbytes:
            return data
        if not more:
            break
    raise ConnectionResetError("the other end closed the connection")
