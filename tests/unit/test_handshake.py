"""The proof that both ends of a connection give each other."""

import contextlib
import dataclasses
import hashlib
import os
import random
import re
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd import PROTOCOL
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine import connections, handshake
from hvd_adpsgd.engine.connections import Connections
from hvd_adpsgd.engine.handshake import (
    HELLO_NBYTES,
    PROOF_NBYTES,
    REPLY_NBYTES,
    SECRET_NBYTES,
    WELCOME,
    Hello,
    NotAMember,
)
from tests.gathers import Gathers, together
from tests.hostile import mutated
from tests.launcher import wait_for

SECRET = bytes(range(SECRET_NBYTES))
OTHER = bytes(SECRET_NBYTES)


def test_both_sides_accept_a_member() -> None:
    hello = Hello.new(3, 5, 2**64 - 1, 17)
    received = Hello.parse(hello.pack())
    reply = received.reply(SECRET)
    proof = hello.answer(SECRET, reply)
    received.check(SECRET, reply, proof)
    assert received == hello
    assert (len(hello.pack()), len(reply), len(proof)) == (HELLO_NBYTES, REPLY_NBYTES, PROOF_NBYTES)


def test_a_called_side_without_the_secret_is_refused() -> None:
    hello = Hello.new(3, 5, 1, 2)
    with pytest.raises(NotAMember, match="called side"):
        hello.answer(SECRET, hello.reply(OTHER))


def test_a_calling_side_without_the_secret_is_refused() -> None:
    hello = Hello.new(3, 5, 1, 2)
    reply = hello.reply(SECRET)
    forged = hello._proof(OTHER, b"dials", reply[:32])
    with pytest.raises(NotAMember, match="calling side"):
        hello.check(SECRET, reply, forged)


def test_a_proof_does_not_serve_the_other_side() -> None:
    """A stranger who sends a member's own proof back to it."""
    hello = Hello.new(3, 5, 1, 2)
    reply = hello.reply(SECRET)
    with pytest.raises(NotAMember):
        hello.check(SECRET, reply, reply[32:])


def test_a_recorded_proof_is_worthless() -> None:
    hello = Hello.new(3, 5, 1, 2)
    recorded = hello.answer(SECRET, hello.reply(SECRET))
    with pytest.raises(NotAMember):
        hello.check(SECRET, hello.reply(SECRET), recorded)  # another nonce


@pytest.mark.parametrize("field", ["caller", "called", "caller_incarnation", "called_incarnation"])
def test_a_proof_is_for_one_call_only(field: str) -> None:
    """What was said about who calls whom cannot be changed on the way."""
    hello = Hello.new(3, 5, 1, 2)
    changed = dataclasses.replace(hello, **{field: 9})
    reply = changed.reply(SECRET)
    with pytest.raises(NotAMember):
        hello.answer(SECRET, reply)


@given(st.binary(max_size=2 * HELLO_NBYTES))
def test_bytes_of_strangers_are_no_hello(data: bytes) -> None:
    with pytest.raises(NotAMember):
        Hello.parse(data)


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.extended)])
def test_no_mutated_message_is_accepted(count: int) -> None:
    """Each of the three messages in turn; nothing but NotAMember is raised."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    hello = Hello.new(3, 5, 1, 2)
    reply = hello.reply(SECRET)
    proof = hello.answer(SECRET, reply)
    sent = hello.pack()
    for i in range(count):
        with pytest.raises(NotAMember):
            if i % 3 == 0:  # the proof is one of what was sent, not of what has arrived
                Hello.parse(mutated(sent, draw)).check(SECRET, reply, proof)
            elif i % 3 == 1:
                hello.answer(SECRET, mutated(reply, draw))
            else:
                hello.check(SECRET, reply, mutated(proof, draw))


@contextlib.contextmanager
def both_met() -> Iterator[list[Connections]]:
    """Two engines that know each other."""
    gathers = Gathers(2)
    both = [Connections(rank, 2, Config(wire="tcp")) for rank in (0, 1)]
    try:
        together(lambda rank: both[rank].meet(gathers.of(rank)), (0, 1))
        yield both
    finally:
        for each in both:
            each.close()


@pytest.mark.parametrize("changed", ["version", "called"])
def test_who_is_refused_by_name_dials_no_more(
    changed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another version of the protocol; or another engine has the port of one that has ended."""
    with both_met() as (a, b):
        if changed == "version":
            form, parse = handshake._FORM, Hello.parse
            other = form.pack(handshake._MAGIC, PROTOCOL + 1, 0, 1, 0, 0, bytes(32))
            monkeypatch.setattr(Hello, "parse", lambda data: parse(other))
        else:
            b._incarnation += 1
        a.wire.call(1)
        failed: list[int] = []

        def fails() -> bool:
            a.wire.progress()
            failed.append(a.wire.next_failed(True))
            return failed[-1] >= 0

        wait_for(fails, "it dials no more")
        assert failed[-1] == 1
    version = f"version {PROTOCOL} of the protocol, not {PROTOCOL + 1}"
    reason = {"version": version, "called": "another engine listens"}
    assert "the called side refuses" in caplog.text and reason[changed] in caplog.text


def ports_of_sockets() -> list[set[int]]:
    """The ports of each connected TCP socket of this process."""
    found = []
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as end:
            if end.family == socket.AF_INET:
                found.append({end.getsockname()[1], end.getpeername()[1]})
    return found


def test_a_forked_child_has_no_socket_of_a_connection_that_is_being_opened() -> None:
    """One waits for the proof of its other end; two are on their way to engines."""
    with both_met() as (a, b), socket.socket() as stranger:
        stranger.connect((a.address, a._addresses[0].port))
        wait_for(lambda: a._unproven, "the event")
        a.wire.call(1)
        wait_for(lambda: a._handed and b._handed, "the event")
        ports = {each._addresses[rank].port for rank, each in enumerate((a, b))}
        assert sum(bool(ports & each) for each in ports_of_sockets()) > 3, "the test sees none"
        child = os.fork()
        if child == 0:
            stranger.close()
            os._exit(sum(bool(ports & each) for each in ports_of_sockets()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        a.wire.progress()
        b.wire.progress()
        assert (a.wire.connections[0], b.wire.connections[1]) == (1, 1), "the parent's are closed"


def test_the_thread_begins_anew_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the kernel would accept connections for it, and peers believe for ever that it lives."""
    monkeypatch.setattr(connections, "_AGAIN_LAST_S", 0.01)
    failing, readable = threading.Event(), connections._readable

    async def fails_once(listener: socket.socket) -> None:
        await readable(listener)
        if not failing.is_set():
            failing.set()
            raise MemoryError("none")

    monkeypatch.setattr(connections, "_readable", fails_once)
    with both_met() as (a, b):
        a.wire.call(1)
        wait_for(
            lambda: a.wire.progress() or b.wire.progress() or b.wire.connections[1], "the event"
        )
    assert failing.is_set() and "begins anew" in caplog.text and "MemoryError" in caplog.text


def test_a_limit_of_open_files_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with both_met() as (a, _), socket.socket() as stranger:
        free = os.dup(0)
        os.close(free)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            stranger.connect((a.address, a._addresses[0].port))
            wait_for(lambda: caplog.messages, "the event")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        wait_for(lambda: a._unproven, "the event")
    (message,) = caplog.messages
    assert "super learner 0 cannot open connections to peers: Too many open files" in message
    assert f"(limit of open files: {free})" in message and "ulimit -n" in message


def test_strangers_close_no_connection_of_an_engine_that_has_said_who_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_HANDSHAKE_S", 300.0)
    with both_met() as (a, b), contextlib.ExitStack() as opened:
        place = a.address, a._addresses[0].port
        member = opened.enter_context(socket.create_connection(place, timeout=60))
        hello = Hello.new(1, 0, b._incarnation, a._incarnation)
        member.sendall(hello.pack())
        reply = member.recv(REPLY_NBYTES, socket.MSG_WAITALL)
        first, *_ = [
            opened.enter_context(socket.create_connection(place, timeout=60))
            for _ in range(connections._UNPROVEN + 1)
        ]
        assert first.recv(1) == b""  # so many are waited for, and no more
        member.sendall(hello.answer(a._secret, reply))
        assert member.recv(1) == WELCOME


def test_the_number_of_the_protocol_is_raised_with_what_travels() -> None:
    """If the digest differs, messages of two builds do: raise PROTOCOL, and write the new pair here."""
    root = Path(__file__).parents[2] / "ext/hvd_adpsgd/engine"
    structs = {
        "core.pxd": ("Message", "Parcel", "Place", "Report"),
        "agreement.pxd": ("Header",),
        "wire_tcp.pxd": ("Head",),
    }
    found = handshake._FORM.format
    for name, each in structs.items():
        text = (root / name).read_text()
        for struct in each:
            (fields,) = re.findall(rf"cdef struct {struct}:.*\n((?:    .*\n)+)", text)
            found += re.sub(r"\s*#.*|\s+", " ", fields)
    codes = (root.parents[1] / "c/codes.h").read_text()
    (message,) = re.findall(r"A message: (.*?\.)\n", codes, re.DOTALL)
    found += " ".join(message.replace("*", " ").split())
    digest = hashlib.sha256(found.encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == (9, "499b2fb3b1915cdc")
