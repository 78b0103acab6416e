"""Opens the connections of a TcpWire, in a thread beside the engine's.

The engine's thread runs without the GIL, and this one must not slow it down: they talk through two pipes.
When the engine needs a connection to a peer, or one has ended, it asks for it, once per second again; a
connection goes to it when both ends have proven that they belong to the job (handshake.py), and nothing that
was received before that is kept. The engine decides which peers have failed; this thread tells it which hosts
refuse a connection, and which answer.

Strangers cost little: at most 64 connections are unproven at once, the oldest makes room; each has 5 seconds,
and what is read of it is 130 bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
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

__all__ = ["Connections"]

log = logging.getLogger("hvd_adpsgd")

_HANDSHAKE_S = 5.0  # from the connection to its proof
_UNPROVEN = 64
_AGAIN_FIRST_S, _AGAIN_LAST_S = 0.05, 2.0  # between two attempts to reach a peer
_TEND_S = 1.0
_PIPE_S = 0.01  # until the next attempt, when the engine has not read what it was told
_NO_DESCRIPTOR_S = 0.2  # until the next accept, when the process has no descriptor left
_FLUSH_S = 0.5  # for what was not sent yet, at the end
_NEWS = struct.Struct("=iii")
_RANK = struct.Struct("=i")


class _Member(NamedTuple):
    """What an engine says of itself when the engines meet, before they choose their addresses."""

    network: str
    addresses: list[tuple[str, str]]
    secret: str  # hexadecimal: a gather may go through JSON
    incarnation: int


class _Address(NamedTuple):
    """Where an engine listens; or why it cannot."""

    host: str
    port: int
    incarnation: int
    error: str = ""


class Connections:
    """The connections between engines, or learners, all of which make theirs together.

    Args:
        rank, size: of these.
        config: nics, connections, idle_connection_s, failure_timeout_s.
        kind: what they are, for messages.
        tend: called once per second on the thread beside the engine's; for a wire without an engine's thread.

    Attributes:
        wire: what the engine is handed.
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
        self._unproven: dict[asyncio.Task[Any], None] = {}  # oldest first
        self._dialing: dict[int, asyncio.Task[None]] = {}  # by peer
        self._dialed: dict[int, float] = {}  # when it got its last connection
        self._ready = threading.Event()
        self._broken: OSError | None = None  # why the thread has ended
        self._stop: Callable[[], object] = bool
        self._thread: threading.Thread | None = None
        self._news_out, self._news_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._dials_out, self._dials_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.wire = TcpWire(
            SystemClock(),
            rank,
            size,
            self._news_out,
            self._dials_in,
            config.connections,
            config.idle_connection_s,
            config.failure_timeout_s,
        )
        _open.add(self)

    # ---- meeting -------------------------------------------------------------------------

    def meet(self, gather: Callable[[Any], list[Any]]) -> None:
        """Learn the addresses of the others, and listen.

        Args:
            gather: see Engine.start.

        Raises:
            TopologyError: on all, if one of them finds no address to listen on.
        """
        me = _Member(
            network_name(), addresses(), secrets.token_hex(SECRET_NBYTES), self._incarnation
        )
        # what was gathered through JSON has lists in place of tuples
        present = [_Member(*member) for member in gather(me) if member is not None]
        self._secret = bytes.fromhex(present[0].secret)
        known = [(m.network, [(name, at) for name, at in m.addresses]) for m in present]
        self._addresses = [a and _Address(*a) for a in gather(self._listen(known))]
        for rank, address in enumerate(self._addresses):
            if address is not None and address.error:
                self.close()
                raise TopologyError(f"{self._kind} {rank}: {address.error}")
        self._thread = threading.Thread(target=self._main, name="adpsgd-connect", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._broken is not None:
            self.close()
            raise TransportError(
                f"{self._kind} {self._rank} cannot open connections: {self._broken}. Raise its limit of open "
                "files (ulimit -n)."
            )

    @property
    def address(self) -> str:
        """On which this one listens, after `meet`."""
        own = self._addresses[self._rank]
        assert own is not None
        return own.host

    def address_of(self, rank: int) -> str:
        """Where another one listens, for messages."""
        other = self._addresses[rank]
        return f"{other.host} port {other.port}" if other is not None else "no address"

    def _listen(self, known: list[tuple[str, list[tuple[str, str]]]]) -> _Address:
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

    # ---- the thread ----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._broken = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(self._accept())
        loop.add_reader(self._dials_out, self._take_dials)
        self._stop = functools.partial(loop.call_soon_threadsafe, accepting.cancel)
        tending = loop.create_task(self._keep_tending())
        self._ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        tending.cancel()

    async def _keep_tending(self) -> None:
        while self._tend is not None:
            await asyncio.sleep(_TEND_S)
            self._tend()

    async def _tell(self, kind: int, peer: int, connection: socket.socket | None = None) -> None:
        """Give a proven connection to the engine, or tell it what is known of the peer."""
        handle = -1 if connection is None else connection.detach()
        record = _NEWS.pack(kind, peer, handle)
        try:
            while not _is_written(self._news_in, record):
                await asyncio.sleep(_PIPE_S)
        except BaseException:
            if handle >= 0:
                os.close(handle)
            raise

    # ---- accepting -----------------------------------------------------------------------

    async def _accept(self) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener
        assert listener is not None
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    await asyncio.sleep(_NO_DESCRIPTOR_S)
                continue
            # handshakes read what has come: one that names both engines is kept
            await asyncio.sleep(0)
            if len(self._unproven) >= _UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._welcome(connection))
            self._unproven[task] = None
            task.add_done_callback(lambda done: self._unproven.pop(done, None))

    async def _welcome(self, connection: socket.socket) -> None:
        """Let the other end prove who it is; hand the connection over, or close it."""
        loop = asyncio.get_running_loop()
        with connection:
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    hello = self._checked(Hello.parse(await _read(connection, HELLO_NBYTES)))
                    task = asyncio.current_task()
                    if task is not None:  # strangers know no incarnations
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
            with contextlib.suppress(OSError):
                # the engine must know the connection before the peer can use and end it
                _prepare(connection, self._config.failure_timeout_s)
                await self._tell(TcpWire.ACCEPTED, hello.caller, connection.dup())
                await loop.sock_sendall(connection, WELCOME)

    def _checked(self, hello: Hello) -> Hello:
        """The message, if it is for this engine and from one that is known."""
        known = hello.caller < len(self._addresses) and hello.caller != self._rank
        caller = self._addresses[hello.caller] if known else None
        if caller is None or caller.incarnation != hello.caller_incarnation:
            raise Refused("it does not know this engine")
        if (hello.called, hello.called_incarnation) != (self._rank, self._incarnation):
            raise Refused("another engine listens there")
        return hello

    # ---- dialing -------------------------------------------------------------------------

    def _take_dials(self) -> None:
        """The engine wants connections; it asks again for those that it has not got yet."""
        with contextlib.suppress(BlockingIOError):
            while wanted := os.read(self._dials_out, _RANK.size):
                (peer,) = _RANK.unpack(wanted)
                if peer not in self._dialing:
                    task = asyncio.create_task(self._dial(peer))
                    self._dialing[peer] = task
                    task.add_done_callback(functools.partial(self._end_dial, peer))

    def _end_dial(self, peer: int, task: asyncio.Task[None] | None) -> None:
        """What the engine asks for from now on is another connection."""
        if self._dialing.get(peer) is task:
            del self._dialing[peer]

    async def _dial(self, peer: int) -> None:
        """Open a connection, with attempts until the peer refuses, or cannot be reached for too long."""
        address = self._addresses[peer]
        if address is None:
            await self._tell(TcpWire.REFUSED, peer)
            return
        pause, again = _AGAIN_FIRST_S, self._dialed.get(peer, 0.0) + _AGAIN_FIRST_S
        await asyncio.sleep(again - time.monotonic())  # a network may end each connection at once
        ends = time.monotonic() + self._config.failure_timeout_s
        while time.monotonic() < ends:
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    connection = await _connect(address)
            except ConnectionRefusedError:
                # Nobody listens there any more: the process has ended. A host that is only busy drops
                # what it has no room for, and answers no reset. A firewall that rejects looks the same.
                await self._tell(TcpWire.REFUSED, peer)
                return
            except (OSError, TimeoutError) as error:
                log.debug("%s %d cannot be reached: %s", self._kind, peer, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _AGAIN_LAST_S)
                continue
            ends = time.monotonic() + self._config.failure_timeout_s  # its host is there
            try:
                async with asyncio.timeout(_HANDSHAKE_S):
                    await self._introduce(connection, peer, address)
                _prepare(connection, self._config.failure_timeout_s)
                self._dialed[peer] = time.monotonic()
                # before DIALED is told: the engine may then ask for the next connection to this peer
                self._end_dial(peer, asyncio.current_task())
                await self._tell(TcpWire.DIALED, peer, connection)
                return
            except NotAMember as error:
                log.warning("%s %d at %s port %d: %s", self._kind, peer, *address[:2], error)
                connection.close()
                await self._tell(TcpWire.REFUSED, peer)
                return
            except (OSError, TimeoutError) as error:
                connection.close()
                log.debug("%s %d does not answer: %s", self._kind, peer, error)
                await self._tell(TcpWire.LIVES, peer)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _AGAIN_LAST_S)

    async def _introduce(self, connection: socket.socket, peer: int, address: _Address) -> None:
        """Let the other end prove to be the peer, and prove who we are."""
        loop = asyncio.get_running_loop()
        hello = Hello.new(self._rank, peer, self._incarnation, address.incarnation)
        await loop.sock_sendall(connection, hello.pack())
        reply = await _read(connection, REPLY_NBYTES)
        await loop.sock_sendall(connection, hello.answer(self._secret, reply))
        if await _read(connection, len(WELCOME)) != WELCOME:
            raise ConnectionResetError("the other end closes the connection")

    # ---- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Send what was not sent yet, for half a second at most, and close all.

        Also what is sent again because its connection has ended. The engine's thread has ended.
        """
        ends = time.monotonic() + _FLUSH_S
        if self._thread is not None:
            self.wire.progress()  # finds the connections that have ended
        while self._thread is not None and self.wire.unfinished and time.monotonic() < ends:
            self.wire.progress()
            time.sleep(1e-3)
        if self._thread is not None:
            self._stop()
            self._thread.join()
            self._thread = None
            self.wire.progress()  # takes the connections that were handed over last
        self.wire.close()
        if self._listener is not None:
            self._listener.close()
        if self._news_in >= 0:
            for handle in (self._news_in, self._news_out, self._dials_in, self._dials_out):
                os.close(handle)
            self._news_in = -1
        _open.discard(self)

    def forget(self) -> None:
        """In a forked child: close the descriptors of the parent, else its peers would not see it end."""
        self.wire.forget()
        if self._listener is not None:
            self._listener.close()


_open: weakref.WeakSet[Connections] = weakref.WeakSet()


def _forget_all() -> None:
    for connections in list(_open):
        connections.forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)


def _is_written(pipe: int, record: bytes) -> bool:
    """Whether the pipe has taken the record, whole."""
    try:
        return os.write(pipe, record) > 0
    except BlockingIOError:
        return False


async def _connect(address: _Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
    except BaseException:
        connection.close()
        raise
    return connection


async def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        ConnectionResetError: if the connection ends before.
    """
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        more = await loop.sock_recv(connection, nbytes - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data


def _prepare(connection: socket.socket, failure_s: float) -> None:
    """Small messages go at once; a host that is gone is noticed also where nothing is sent."""
    every = max(1, round(failure_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
