"""SIGUSR1 writes the state, whatever the main thread does, and only where it is ours."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

START = """
    import os, signal, subprocess, sys, threading, time
    from hvd_adpsgd.lifecycle import state_dump
    def wait_here():
        print(os.getpid(), flush=True)
        lock = threading.Lock(); lock.acquire()
        lock.acquire()  # in C, for ever
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """Starts START and a program; ends it afterwards."""
    running: list[subprocess.Popen] = []

    def run(program: str) -> tuple[subprocess.Popen, int]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        source = textwrap.dedent(START) + textwrap.dedent(program)
        command = [sys.executable, "-c", source]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process, int(process.stdout.readline())

    yield run
    for process in running:
        process.kill()
        process.communicate()


def rest(process: subprocess.Popen) -> str:
    """What it says behind its first line; communicate() would lose what was read ahead."""
    process.wait(DEADLINE_S)
    return process.stdout.read()


def states(folder: Path, count: int) -> list[dict]:
    """The first `count` files, once they are there."""
    ends = time.monotonic() + DEADLINE_S
    while len(found := sorted(folder.glob("hvd_adpsgd.state.*"))) < count:
        assert time.monotonic() < ends, f"{len(found)} of {count} files after {DEADLINE_S:g} s"
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in found]


def test_twice_while_the_main_thread_is_blocked_in_c(start, tmp_path):
    process, pid = start("""
        state_dump.add_source("fine", lambda: {"step": 7})
        state_dump.add_source("broken", lambda: 1 / 0)
        assert state_dump.watch(3)
        wait_here()
    """)
    for count in (1, 2):
        os.kill(pid, signal.SIGUSR1)
        said = states(tmp_path, count)[-1]
        assert (said["rank"], said["pid"], said["fine"]) == (3, pid, {"step": 7})
        assert "ZeroDivisionError" in said["broken"]["error"]
        [main] = [calls for name, calls in said["threads"].items() if "MainThread" in name]
        assert main[0].endswith("in wait_here")
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {f"hvd_adpsgd.state.3.{pid}.{n}.json" for n in (1, 2)}
    assert process.poll() is None


def test_a_handler_of_the_script_is_left_alone(start, tmp_path):
    process, _ = start(
        """
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        assert not state_dump.watch(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        print(0, heard, os.listdir(os.environ["TMPDIR"]), flush=True)
    """.replace("print(0,", "print(0, flush=True); print(")
    )
    assert rest(process).split() == ["[1]", "[]"]


def test_a_handler_that_the_script_sets_later_counts(start, tmp_path):
    process, _ = start("""
        heard = []
        assert state_dump.watch(0)
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        print(0, flush=True); print(heard, os.listdir(os.environ["TMPDIR"]), flush=True)
    """)
    assert rest(process).split() == ["[1]", "[]"]


def test_a_forked_child_neither_writes_nor_dies(start, tmp_path):
    """The parent writes after the child was signalled: what the child asked for would be there."""
    _, pid = start("""
        assert state_dump.watch(0)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        wait_here()
    """)
    os.kill(pid, signal.SIGUSR1)
    assert [said["pid"] for said in states(tmp_path, 1)] == [pid]


def test_a_program_that_is_started_has_the_default_action(start, tmp_path):
    process, _ = start("""
        assert state_dump.watch(0)
        code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
        print(0, flush=True); print(subprocess.run([sys.executable, "-c", code]).returncode)
    """)
    assert int(rest(process)) == -signal.SIGUSR1
