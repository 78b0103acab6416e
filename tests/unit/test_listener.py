"""The listener of a job: who knows the secret enters, also beside many who do not."""

import os
import queue
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.handshake import RELEASE
from hvd_adpsgd.errors import LaunchError, PeerFailedError
from hvd_adpsgd.joining import joining
from hvd_adpsgd.joining import listener as conversations
from hvd_adpsgd.joining.candidates import JoiningSuperLearner, JoinRequest
from hvd_adpsgd.joining.listener import Conversation, Listener, connect, new_secret
from tests.launcher import wait_for

SECRET = new_secret()


@pytest.fixture
def entered() -> queue.Queue[Conversation]:
    return queue.Queue()


@pytest.fixture
def listener(entered: queue.Queue[Conversation]) -> Iterator[str]:
    made = Listener("127.0.0.1", SECRET, entered.put)
    yield f"127.0.0.1:{made.port}"
    made.close()


def test_both_sides_talk(listener: str, entered: queue.Queue[Conversation]) -> None:
    candidate = connect(listener, SECRET)
    job = entered.get(timeout=60)
    candidate.send({"a": 1})
    assert job.receive(60) == {"a": 1}
    assert job.received() == []
    job.send((2, 3))
    assert candidate.receive(None) == (2, 3)
    candidate.close()
    with pytest.raises(PeerFailedError, match="lost"):
        job.receive(60)
    with pytest.raises(PeerFailedError, match="lost"):
        job.received()


def test_who_says_nothing_is_waited_for_no_longer(
    listener: str, entered: queue.Queue[Conversation]
) -> None:
    with pytest.raises(PeerFailedError, match="sent no complete message for 0.01 s"):
        connect(listener, SECRET).receive(0.01)


def _stop_in_mid_message(conversation: Conversation) -> None:
    """Send the beginning of a message, as a process does that is stopped then."""
    os.write(conversation._connection.fileno(), struct.pack("!i", 1000) + bytes(500))


def test_who_stops_in_mid_message_is_waited_for_no_longer(
    entered: queue.Queue[Conversation], listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while all meet, nor where a message is looked for; what comes later is no message."""
    monkeypatch.setattr(conversations, "MESSAGE_S", 0.01)
    for looks in (lambda job: job.receive(60), lambda job: job.received()):
        candidate = connect(listener, SECRET)
        job = entered.get(timeout=60)
        _stop_in_mid_message(candidate)
        assert job._connection.poll(60)
        with pytest.raises(PeerFailedError, match="sent no complete message for 0.01 s"):
            looks(job)
        with pytest.raises(PeerFailedError, match="lost: handle is closed"):
            job.received()


def test_a_newcomer_that_stops_in_mid_message_is_given_up(
    listener: str, entered: queue.Queue[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MESSAGE_S", 0.01)
    candidate = connect(listener, SECRET)
    here = JoiningSuperLearner(1, time.monotonic() + 1e6)
    here.enters(entered.get(timeout=60), JoinRequest((), None))
    assert here.state() == "starting"
    _stop_in_mid_message(candidate)
    wait_for(lambda: here.state() != "starting", "the first half", 60)
    assert here.state() == "failed" and "sent no complete message" in here.problem


def test_who_receives_nothing_is_waited_for_no_longer(
    listener: str, entered: queue.Queue[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has received of the message tells it nothing: the connection is lost."""
    monkeypatch.setattr(conversations, "MESSAGE_S", 0.1)
    connection = connect(listener, SECRET)
    job = entered.get(timeout=60)
    with pytest.raises(PeerFailedError, match="received no complete message for 0.1 s"):
        job.send(bytes(2**26))
    for act in (lambda: job.send("more"), job.received):
        with pytest.raises(PeerFailedError, match="lost: handle is closed"):
            act()
    with pytest.raises(PeerFailedError, match="lost"):
        connection.receive(60)


def test_large_objects_arrive(listener: str, entered: queue.Queue[Conversation]) -> None:
    candidate = connect(listener, SECRET)
    job, data = entered.get(timeout=60), os.urandom(2**24)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(candidate.send, [data, data])
        assert job.receive(60) == [data, data]
        sending.result(60)


def test_who_has_another_secret_stays_out(
    listener: str, entered: queue.Queue[Conversation]
) -> None:
    with pytest.raises(LaunchError, match=r"cannot be joined.*secret"):
        connect(listener, new_secret())
    connect(listener, SECRET)
    entered.get(timeout=60)
    assert entered.empty()


def test_strangers_keep_nobody_out(listener: str, entered: queue.Queue[Conversation]) -> None:
    host, port = listener.split(":")
    strangers = [socket.create_connection((host, int(port)), timeout=60) for _ in range(60)]
    for stranger in strangers[::2]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
    connect(listener, SECRET).send("in")
    assert entered.get(timeout=60).receive(60) == "in"
    for stranger in strangers:
        stranger.close()
    assert entered.empty()


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            b"hvd_adpsgd 0.0.7 (protocol 1)",
            f"the job runs hvd_adpsgd 0.0.7 (protocol 1), this learner hvd_adpsgd {RELEASE}",
        ),
        (
            b"hvd_adpsgd " + b"x" * 60,
            f"the job runs hvd_adpsgd {53 * 'x'}, this learner hvd_adpsgd {RELEASE}",
        ),
        (b"HTTP/1.1 400 Bad Request", "this is no listener of hvd_adpsgd"),
        (b"\xff" * 64, "this is no listener of hvd_adpsgd"),
    ],
)
def test_a_door_of_another_release_is_named(says: bytes, told: str) -> None:
    """With another protocol too: it is the first message, before those that differ."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        requesting = pool.submit(connect, f"127.0.0.1:{listener.getsockname()[1]}", SECRET)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(says.ljust(64))
            with pytest.raises(LaunchError, match=re.escape(told)):
                requesting.result(60)


def test_a_door_tells_its_release_before_it_knows_the_other_one(listener: str) -> None:
    host, port = listener.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as stranger:
        said = stranger.recv(64, socket.MSG_WAITALL)
    assert said == f"hvd_adpsgd {RELEASE}".encode().ljust(64)


@pytest.mark.parametrize("listeners", ["", "nowhere", "127.0.0.1:x", "127.0.0.1:1, [::1]:1"])
def test_no_door_is_told(listeners: str) -> None:
    with pytest.raises(LaunchError, match="cannot be joined"):
        connect(listeners, SECRET)


def test_the_next_door_is_tried(listener: str, entered: queue.Queue[Conversation]) -> None:
    connect(f"127.0.0.1:1,{listener}", SECRET)
    entered.get(timeout=60)


def test_a_moment_without_descriptors_does_not_close_it(
    listener: str, entered: queue.Queue[Conversation], caplog: pytest.LogCaptureFixture
) -> None:
    host, port = listener.split(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early:
        next_one = os.dup(early.fileno())
        os.close(next_one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
        try:
            early.connect((host, int(port)))
            wait_for(
                lambda: "for the moment: [Errno 24]" in caplog.text, "an accept that fails", 10
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connect(listener, SECRET).send("in")
    assert entered.get(timeout=60).receive(60) == "in"
    assert caplog.text.count("for the moment") == 1


def test_a_host_that_is_cut_off_is_asked_whether_it_is_there() -> None:
    """By the system, on both sides: neither waits for the other one without bound."""
    entered: queue.Queue[Conversation] = queue.Queue()
    made = Listener("127.0.0.1", SECRET, entered.put, failure_s=20.0)
    candidate = connect(f"127.0.0.1:{made.port}", SECRET, failure_s=20.0)
    for side in (candidate, entered.get(timeout=60)):
        with socket.socket(fileno=os.dup(side._connection.fileno())) as connection:
            told = [
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert told == [5, 5, 3]
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    made.close()


@pytest.mark.parametrize(("text", "joins"), [("", False), ("None", False), ("node1:4000", True)])
def test_an_empty_option_is_no_door(
    text: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_ADPSGD_JOIN", text)
    assert joining.is_joining(Config()) == joins


@pytest.mark.parametrize("text", ["", "127.0.0.1:1"])
def test_options_of_a_config_are_the_same(
    text: str,
    listener: str,
    entered: queue.Queue[Conversation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable comes first: hvd.admit starts the script once more with those of the job's listener."""
    file = tmp_path / "secret"
    file.write_text(SECRET.hex())
    file.chmod(0o600)
    monkeypatch.setattr(joining.exit_state, "hub", None)
    if text:
        monkeypatch.setenv("HVD_ADPSGD_JOIN", listener)
        monkeypatch.setenv("HVD_ADPSGD_JOIN_SECRET_FILE", str(file))
        config = Config(join=text, join_secret_file="/nowhere")
    else:
        config = Config(join=listener, join_secret_file=str(file))
    assert joining.is_joining(config)
    with ThreadPoolExecutor(1) as pool:
        learner = pool.submit(joining.JoiningLearner, None, config)
        job = entered.get(timeout=60)
        assert len(job.receive(60).placements) == 1
        job.send(None)
        with pytest.raises(SystemExit):
            learner.result(60)
    joining.exit_state.hub.close()


def test_init_joins_by_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(join="node1:4000")

    def enter(store: object, given: object) -> None:
        assert given is config
        raise LaunchError("it joins")

    monkeypatch.setattr(joining, "enter", enter)
    with pytest.raises(LaunchError, match="it joins"):
        hvd.init(config=config)
