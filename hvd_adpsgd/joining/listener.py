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
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from hvd_adpsgd.engine.connections import prepare
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

    The other side may stop in the middle of an object: then the connection is closed after MESSAGE_S.

    Args:
        connection: a connection whose two ends have proved that they know the secret.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(True)
        longest = struct.pack("ll", int(MESSAGE_S), round(1e6 * (MESSAGE_S % 1)))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, longest)
        self._connection = Connection(connection.detach())

    def send(self, value: Any) -> None:
        """Send an object.

        Raises:
            PeerFailedError: if the other side has ended, or does not take the object.
        """
        with self._bounded("received"):
            self._connection.send_bytes(pickle.dumps(value))

    def receive(self, seconds: float | None) -> Any:
        """Receive and return the next object.

        Args:
            seconds: longest wait until it begins; None: wait as long as the other side runs.

        Raises:
            PeerFailedError: if no object comes within `seconds`, or the other side has ended.
        """
        with self._bounded("sent"):
            data = self._connection.recv_bytes() if self._connection.poll(seconds) else None
        if data is None:
            raise PeerFailedError(
                f"the other side of the listener sent no complete message for {seconds:g} s"
            )
        try:
            return pickle.loads(data)
        except Exception as error:  # pickle raises exceptions of many classes
            raise PeerFailedError(
                f"an object from the other side of the listener cannot be read ({error}). Run the same "
                "release on both sides."
            ) from error

    def received(self) -> list[Any]:
        """Return a list with the next object, an empty one if none has begun to arrive; see receive."""
        with self._bounded("sent"):
            has_begun = self._connection.poll(0)
        return [self.receive(0)] if has_begun else []

    @contextlib.contextmanager
    def _bounded(self, doing: str) -> Iterator[None]:
        """Context manager that closes the connection after an error, and raises a PeerFailedError instead."""
        try:
            yield
        except BlockingIOError:  # the time limit is over
            self.close()  # the rest of this object cannot be told from the next one
            raise PeerFailedError(
                f"the other side of the listener {doing} no complete message for {MESSAGE_S:g} s"
            ) from None
        except (OSError, EOFError) as error:
            self.close()
            raise PeerFailedError(
                f"the other side of the listener is lost: {error or 'it has ended'}"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


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
    prepare(connection, failure_s)
    longest_s = max(4 * max(1, round(failure_s / 4)), failure_s)  # that of keepalive, or longer
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * longest_s))
    return Conversation(connection)


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
