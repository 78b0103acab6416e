"""Opens and accepts the TCP connections of an engine's TcpWire, in a thread beside the engine's thread.

The engine's thread runs without the GIL, and this thread must not slow it down: the two talk through two
pipes. When the engine needs a connection to a peer, or a connection has ended, the engine asks this thread
for a new one, and asks again once per second. This thread hands a connection to the engine after both ends
have proven that they belong to the job (handshake.py), and keeps no byte that was received before. The engine
decides which peers have failed; this thread notifies it which hosts refuse a connection, and which answer.

Connections from strangers cost little: at most 64 are unproven at once, and one more closes the oldest; each
has 5 seconds for its proof, and at most 130 bytes of it are read.

A child that the script forks (a worker that loads data) gets copies of all sockets, and a copy keeps the
connection of a parent that was killed: its peers would believe that it lives. So the child closes them. A
socket is made, and handed to the engine, under a lock that fork waits for, so that the child knows it.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.handshake import (
    HELLO_NBYTES,
    PROOF_NBYTES,
    REPLY_NBYTES,
    SECRET_NBYTES,
    WELCOME,
    Hello,
    NotAMember,
    Refused,
)
from hvd_adpsgd.engine.interfaces import addresses, choose_address, network_name
from hvd_adpsgd.engine.wire import SystemClock
from hvd_adpsgd.engine.wire_tcp import TcpWire
from hvd_adpsgd.errors import TopologyError, TransportError
from hvd_adpsgd.polling import polls

log = logging.getLogger("hvd_adpsgd")

# longest time for the proof that the other end of a connection belongs to the job
_HANDSHAKE_S = 5.0
_FILES = (
    8  # descriptors for each other end: two connections, of a few engines and of the learners' Hub
)
# most accepted connections whose other end has not proven that it belongs to the job
_UNPROVEN = 64
# seconds between two attempts to connect to a peer: first, longest
_AGAIN_FIRST_S, _AGAIN_LAST_S = 0.05, 2.0
_TEND_S = 1.0
# seconds before the next write to a pipe that is full because the engine has not read it
_PIPE_S = 0.01
_NO_DESCRIPTOR_S = 0.2  # seconds before the next accept when no file descriptor is left
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_FLUSH_S = 0.5  # longest time that close() spends on messages not sent yet
_NEWS = struct.Struct("=iii")
_RANK = struct.Struct("=i")


class _Member(NamedTuple):
    """What each engine sends to all others in the first gather, before they choose their addresses."""

    network: str
    addresses: list[tuple[str, str]]
    secret: str  # hexadecimal, because `gather` may send values as JSON
    incarnation: int


class _Address(NamedTuple):
    """Host and port where an engine listens, or the error for which it cannot listen."""

    host: str
    port: int
    incarnation: int
    error: str = ""


class Connections:
    """The TCP connections of one engine (or learner) to all others, which make theirs at the same time.

    Args:
        rank, size: of this engine or learner, and how many there are.
        config: the options nics and failure_timeout_s are used.
        kind: what the ends are in error messages: "super learner" or "learner".
        tend: called once per second on this object's thread, for a wire that no engine's thread drives.

    Attributes:
        wire: the TcpWire for the engine.
    """

    GATHERS = 2

    def __init__(
        self,
        rank: int,
        size: int,
        config: Config,
        kind: str = "super learner",
        tend: Callable[[], object] | None = None,
    ):
        self._rank, self._kind, self._tend = rank, kind, tend
        self._config = config
        self._secret = b""
        self._incarnation = secrets.randbits(64)
        self._addresses: list[_Address | None] = []
        self._listener: socket.socket | None = None
        # those in a handshake; descriptors that were handed to the engine, with the inodes of their sockets
        self._shaking: set[socket.socket] = set()
        self._handed: dict[int, int] = {}
        self._is_short = False  # whether it was logged that file descriptors are missing
        # handshakes on accepted connections, oldest first
        self._unproven: dict[asyncio.Task[Any], None] = {}
        # by rank of the peer: the running attempt to connect, and when this end last opened a connection
        self._dialing: dict[int, asyncio.Task[None]] = {}
        self._dialed: dict[int, float] = {}
        self._ready = threading.Event()
        self._closing = threading.Event()
        # the error for which this object's thread has not started
        self._broken: Exception | None = None
        self._stop: Callable[[], object] = bool
        self._thread: threading.Thread | None = None
        self._pipes: list[int] = []
        try:
            self._news_out, self._news_in = self._pipe()
            self._dials_out, self._dials_in = self._pipe()
            pipes = self._news_out, self._dials_in
            self.wire = TcpWire(SystemClock(), rank, size, *pipes, config.failure_timeout_s)
            _allow_files(_FILES * size)
        except OSError as error:
            self._close_pipes()
            raise self._cannot_open(error) from error
        _open.add(self)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pipes += ends
        return ends

    def _close_pipes(self) -> None:
        while self._pipes:
            os.close(self._pipes.pop())

    def _cannot_open(self, error: Exception) -> TransportError:
        code = error.errno if isinstance(error, OSError) else None
        why = os.strerror(code) if code else error
        return TransportError(
            f"{self._kind} {self._rank} cannot open connections: {why}. Raise its limits of open files "
            "(ulimit -n) and of processes (ulimit -u)."
        )

    def meet(self, gather: Callable[[Any], list[Any]]) -> None:
        """Listen on an address of this host, and learn the addresses of all other ends; close on any error.

        Args:
            gather: see Engine.start.

        Raises:
            TopologyError: on all ends, if one of them finds no address to listen on.
            TransportError: if the thread cannot start, as without a free file descriptor.
        """
        try:
            self._meet(gather)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self._cannot_open(error) from error
            raise

    def _meet(self, gather: Callable[[Any], list[Any]]) -> None:
        me = _Member(
            network_name(), addresses(), secrets.token_hex(SECRET_NBYTES), self._incarnation
        )
        # a gather through JSON returns lists in place of tuples
        present = [_Member(*member) for member in gather(me) if member is not None]
        self._secret = bytes.fromhex(present[0].secret)
        known = [(m.network, [(name, at) for name, at in m.addresses]) for m in present]
        self._addresses = [a and _Address(*a) for a in gather(self._listen(known))]
        for rank, address in enumerate(self._addresses):
            if address is not None and address.error:
                raise TopologyError(f"{self._kind} {rank}: {address.error}")
        thread = threading.Thread(target=self._main, name="adpsgd-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise self._cannot_open(error) from error
        self._thread = thread
        self._ready.wait()
        if self._broken is not None:
            raise self._cannot_open(self._broken)

    @property
    def address(self) -> str:
        """The address on which this end listens; known after `meet`."""
        own = self._addresses[self._rank]
        assert own is not None
        return own.host

    def address_of(self, rank: int) -> str:
        """Host and port on which the end with this rank listens, as text for messages."""
        other = self._addresses[rank]
        return f"{other.host} port {other.port}" if other is not None else "no address"

    def _listen(self, known: list[tuple[str, list[tuple[str, str]]]]) -> _Address:
        address = "any address"
        try:
            address = choose_address(self._config.nics, network_name(), known)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.socket(family, socket.SOCK_STREAM)
            self._listener.bind((address, 0))
            self._listener.listen(1024)
            self._listener.setblocking(False)
        except TopologyError as error:
            return _Address("", 0, 0, str(error))
        except OSError as error:
            return _Address("", 0, 0, f"listening on {address}: {error}")
        return _Address(address, self._listener.getsockname()[1], self._incarnation)

    def _main(self) -> None:
        while not self._closing.is_set():
            serving = self._serve()
            try:
                asyncio.run(serving)
            except Exception as error:
                serving.close()  # it never ran if there is no event loop
                if not self._ready.is_set():
                    self._broken = error
                    self._ready.set()
                    return
                # else the kernel would accept peers' connections, and this end count as living, for ever
                log.warning(
                    "%s %d: the thread that opens connections to peers has failed (%r), and begins anew. "
                    "Restart this %s if that repeats.",
                    *(self._kind, self._rank, error, self._kind),
                )
                self._closing.wait(_AGAIN_LAST_S)

    async def _serve(self) -> None:
        loop, serving = asyncio.get_running_loop(), asyncio.current_task()
        assert serving is not None
        self._stop = functools.partial(loop.call_soon_threadsafe, serving.cancel)
        if self._closing.is_set():
            return
        self._dialing.clear()  # the engine repeats what it has asked for
        loop.add_reader(self._dials_out, self._take_dials)
        self._ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_tending())
                await self._accept()

    async def _keep_tending(self) -> None:
        while self._tend is not None:
            await asyncio.sleep(_TEND_S)
            self._tend()

    async def _tell(self, kind: int, peer: int, connection: socket.socket | None = None) -> None:
        """Write to the engine's pipe a connection whose handshake is complete, or event `kind` of `peer`."""
        handle = -1 if connection is None else self._hand(connection)
        record = _NEWS.pack(kind, peer, handle)
        try:
            while not _is_written(self._news_in, record):
                await asyncio.sleep(_PIPE_S)
        except BaseException:
            if handle >= 0:
                os.close(handle)
            raise

    def _shake(self, make: Callable[[], socket.socket]) -> socket.socket:
        """Return a new non-blocking socket, which a forked child closes."""
        with _forks:
            connection = make()
            self._shaking.add(connection)
        connection.setblocking(False)
        return connection

    def _hand(self, connection: socket.socket) -> int:
        """Return the descriptor of a socket that the engine is to own."""
        with _forks:
            inode = os.fstat(connection.fileno()).st_ino
            handle = connection.detach()
            self._handed[handle] = inode
        self._shaking.discard(connection)
        return handle

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        self._shaking.discard(connection)

    def _note(self, error: OSError) -> None:
        """Log once that no socket can be made, because of a limit of the process or the machine."""
        if error.errno not in _NO_DESCRIPTOR or self._is_short:
            return
        self._is_short = True
        log.warning(
            "%s %d cannot open connections to peers: %s (limit of open files: %d). It averages only with "
            "peers to which it has connections, and tries again. Raise the limit: ulimit -n.",
            *(self._kind, self._rank, os.strerror(error.errno)),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    async def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while True:
            await _readable(listener)
            try:
                connection = self._shake(lambda: listener.accept()[0])
            except BlockingIOError:
                continue
            except OSError as error:
                self._note(error)
                if error.errno in _NO_DESCRIPTOR:
                    await asyncio.sleep(_NO_DESCRIPTOR_S)
                continue
            # let handshakes read first: one whose Hello names both engines is no longer counted as unproven
            await asyncio.sleep(0)
            if len(self._unproven) >= _UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._welcome(connection))
            self._unproven[task] = None
            task.add_done_callback(functools.partial(self._end_welcome, connection))

    def _end_welcome(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._drop(connection)

    async def _welcome(self, connection: socket.socket) -> None:
        """Hand a copy of an accepted connection to the engine if its other end belongs to the job."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                hello = self._checked(Hello.parse(await _read(connection, HELLO_NBYTES)))
                task = asyncio.current_task()
                if task is not None:  # a stranger cannot know the engines' incarnations
                    self._unproven.pop(task, None)
                reply = hello.reply(self._secret)
                await loop.sock_sendall(connection, reply)
                hello.check(self._secret, reply, await _read(connection, PROOF_NBYTES))
        except (NotAMember, OSError, TimeoutError) as error:
            log.debug("a connection was refused: %s", error)
            if isinstance(error, Refused):
                with contextlib.suppress(OSError):
                    connection.send(error.pack())
            return
        try:
            # before WELCOME is sent: the engine must know the connection before the peer uses it
            prepare(connection, self._config.failure_timeout_s)
            await self._tell(TcpWire.ACCEPTED, hello.caller, self._shake(connection.dup))
            await loop.sock_sendall(connection, WELCOME)
        except OSError as error:
            self._note(error)

    def _checked(self, hello: Hello) -> Hello:
        """Return the Hello if it is from an engine of the job and for this engine; else raise Refused."""
        known = hello.caller < len(self._addresses) and hello.caller != self._rank
        caller = self._addresses[hello.caller] if known else None
        if caller is None or caller.incarnation != hello.caller_incarnation:
            raise Refused("it does not know the calling engine")
        if (hello.called, hello.called_incarnation) != (self._rank, self._incarnation):
            raise Refused("another engine listens at this port")
        return hello

    def _take_dials(self) -> None:
        """Dial the peers that the engine asks for; the engine repeats a request until it has a connection."""
        with contextlib.suppress(BlockingIOError):
            while wanted := os.read(self._dials_out, _RANK.size):
                (peer,) = _RANK.unpack(wanted)
                if peer not in self._dialing:
                    task = asyncio.create_task(self._dial(peer))
                    self._dialing[peer] = task
                    task.add_done_callback(functools.partial(self._end_dial, peer))

    def _end_dial(self, peer: int, task: asyncio.Task[None] | None) -> None:
        """Mark dialing `peer` as over: the engine's next request for `peer` is for another connection."""
        if self._dialing.get(peer) is task:
            del self._dialing[peer]

    async def _dial(self, peer: int) -> None:
        """Connect to a peer, again and again until it refuses or was unreachable for failure_timeout_s."""
        address = self._addresses[peer]
        if address is None:
            await self._tell(TcpWire.REFUSED, peer)
            return
        pause, again = _AGAIN_FIRST_S, self._dialed.get(peer, 0.0) + _AGAIN_FIRST_S
        # a network may end each connection as soon as it is open: open no two to a peer within _AGAIN_FIRST_S
        await asyncio.sleep(again - time.monotonic())
        ends = time.monotonic() + self._config.failure_timeout_s
        while time.monotonic() < ends:
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    connection = await self._connect(address)
            except ConnectionRefusedError:
                # No socket listens there any more: the process has ended. A host that is only busy drops a
                # SYN for which it has no room, and sends no reset. A firewall that rejects looks
                # like an ended process.
                await self._tell(TcpWire.REFUSED, peer)
                return
            except (OSError, TimeoutError) as error:
                self._note(error)
                log.debug("%s %d cannot be reached: %s", self._kind, peer, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _AGAIN_LAST_S)
                continue
            ends = time.monotonic() + self._config.failure_timeout_s  # the peer's host has answered
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    await self._introduce(connection, peer, address)
                prepare(connection, self._config.failure_timeout_s)
                self._dialed[peer] = time.monotonic()
                # before DIALED is sent: after DIALED the engine may ask for another connection to this peer
                self._end_dial(peer, asyncio.current_task())
                await self._tell(TcpWire.DIALED, peer, connection)
                return
            except NotAMember as error:
                log.warning("%s %d at %s port %d: %s", self._kind, peer, *address[:2], error)
                self._drop(connection)
                await self._tell(TcpWire.REFUSED, peer)
                return
            except (OSError, TimeoutError) as error:
                self._drop(connection)
                log.debug("%s %d does not answer: %s", self._kind, peer, error)
                await self._tell(TcpWire.LIVES, peer)
            except BaseException:  # cancelled
                self._drop(connection)
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_LAST_S)

    async def _connect(self, address: _Address) -> socket.socket:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        connection = self._shake(lambda: socket.socket(family, socket.SOCK_STREAM))
        try:
            where = address.host, address.port
            await asyncio.get_running_loop().sock_connect(connection, where)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    async def _introduce(self, connection: socket.socket, peer: int, address: _Address) -> None:
        """Shake hands as the side that dials: check the peer's proof, and send this engine's proof."""
        loop = asyncio.get_running_loop()
        hello = Hello.new(self._rank, peer, self._incarnation, address.incarnation)
        await loop.sock_sendall(connection, hello.pack())
        reply = await _read(connection, REPLY_NBYTES)
        await loop.sock_sendall(connection, hello.answer(self._secret, reply))
        if await _read(connection, len(WELCOME)) != WELCOME:
            raise ConnectionResetError("the other end has not accepted the handshake")

    def close(self) -> None:
        """Send the remaining messages, for at most 0.5 s, then end the thread and close all connections.

        Messages whose connection has ended, and which are sent again, count as remaining. Call it after the
        engine's thread has ended.
        """
        if self._thread is not None:
            for _ in polls(time.monotonic() + _FLUSH_S):
                self.wire.progress()  # makes the wire notice connections that have ended, too
                if not self.wire.unfinished:
                    break
            self._closing.set()
            with contextlib.suppress(RuntimeError):  # its loop has just ended by an error
                self._stop()
            self._thread.join()
            self._thread = None
            # takes the last connections from the pipe, so that wire.close() closes them
            self.wire.progress()
        self.wire.close()
        if self._listener is not None:
            self._listener.close()
        self._close_pipes()
        _open.discard(self)

    def forget(self) -> None:
        """Close the parent's sockets in a forked child: while open, they hide the parent's end from peers."""
        self.wire.forget()
        if self._listener is not None:
            self._listener.close()
        for connection in self._shaking:
            connection.close()
        for handle, inode in self._handed.items():
            with contextlib.suppress(OSError):  # the engine has closed the connection
                if os.fstat(handle).st_ino == inode:
                    os.close(handle)


_open: weakref.WeakSet[Connections] = weakref.WeakSet()
_forks = threading.RLock()  # held while a socket is made or handed on, and by fork


def _forget_all() -> None:
    for connections in list(_open):
        connections.forget()
    _open.clear()
    _forks.release()


os.register_at_fork(
    before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_forget_all
)


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files to the system's, if it is below `count`: often it is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _is_written(pipe: int, record: bytes) -> bool:
    """Write the record to the pipe; return False if the pipe is full (a record is never written in part)."""
    try:
        return os.write(pipe, record) > 0
    except BlockingIOError:
        return False


async def _readable(listener: socket.socket) -> None:
    """Wait until there may be a connection to accept."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


async def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Receive exactly `nbytes` bytes.

    Raises:
        ConnectionResetError: if the connection ends earlier.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        more = await loop.sock_recv(connection, nbytes - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


def prepare(connection: socket.socket, failure_s: float) -> None:
    """Set TCP options: send small messages at once, and detect a lost host on an idle connection too."""
    every = max(1, round(failure_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
