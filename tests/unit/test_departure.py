"""SIGTERM: what is done before the end, whatever the main thread does, and only where the signal is ours."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0

START = """
    import os, signal, subprocess, sys, threading, time
    import numpy as np
    from hvd_adpsgd.lifecycle import preemption
    flags = np.zeros(preemption.Departure.FLAGS, dtype=np.uint8)
    done = threading.Event()  # all that is to be done
    def departure(is_leader=True, last=False):
        made = preemption.Departure(
            "0 (here)", is_leader, flags, lambda: False, lambda: print("told", flush=True),
            lambda seconds: last,
        )
        made.at_leave(done.set)
        made.at_leave(lambda: print("first", flush=True))
        made.at_leave(lambda: print("last", flush=True))
        made.at_leave(lambda: 1 / 0)
        return made
    def wait_here():
        print(os.getpid(), flush=True)
        lock = threading.Lock(); lock.acquire()
        lock.acquire()  # in C, for ever
"""


@pytest.fixture
def start() -> Iterator:
    """Starts START and a program, which says its pid first, below other commands; ends it afterwards."""
    running: list[subprocess.Popen] = []

    def run(program: str, *above: str) -> tuple[subprocess.Popen, int]:
        source = textwrap.dedent(START) + textwrap.dedent(program)
        process = subprocess.Popen(
            [*above, sys.executable, "-c", source],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process, int(process.stdout.readline())

    yield run
    for process in running:
        process.kill()
        process.communicate()


def rest(process: subprocess.Popen) -> list[str]:
    """What it says behind its first line; communicate() would lose what was read ahead."""
    process.wait(DEADLINE_S)
    return process.stdout.read().split()


@pytest.mark.parametrize(("last", "status"), [(False, -signal.SIGTERM), (True, 75)])
def test_a_leader_that_is_blocked_in_c_departs_and_ends(start, last, status):
    process, pid = start(f"preemption.watch(departure(last={last})); wait_here()")
    os.kill(pid, signal.SIGTERM)
    # in reverse order, also after one that raises
    assert rest(process) == ["last", "first", "told"]
    assert process.returncode == status
    said = process.stderr.read()
    assert said.count("super learner 0 (here) leaves") == 1
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize("last", [False, True])
def test_what_c_libraries_have_printed_is_not_lost(start, last):
    """Into a pipe they write when their buffer is full, or when somebody flushes it."""
    process, pid = start(f"""
        import ctypes
        ctypes.CDLL(None).printf(b"printed-in-C")
        preemption.watch(departure(last={last}))
        wait_here()
    """)
    os.kill(pid, signal.SIGTERM)
    assert rest(process) == ["last", "first", "told", "printed-in-C"]


def test_a_mate_ends_once_the_leader_has_departed(start):
    process, _ = start("""
        preemption.watch(departure(is_leader=False))
        print(os.getpid(), flush=True)
        flags[0] = 1  # ASKED, by the leader
        done.wait()  # and then for ANNOUNCED
        print("later", flush=True)
        flags[1] = 1  # ANNOUNCED
        preemption.block_if_leaving()
        print("not here", flush=True)
    """)
    assert rest(process) == ["last", "first", "later"]
    assert process.returncode == -signal.SIGTERM
    assert "leaves" not in process.stderr.read(), "the leader's line"


def test_after_shutdown_the_signal_ends_the_process(start):
    process, pid = start("preemption.watch(departure()); preemption.watch(None); wait_here()")
    os.kill(pid, signal.SIGTERM)
    assert rest(process) == []
    assert process.returncode == -signal.SIGTERM


def test_in_shutdown_the_signal_changes_nothing(start):
    """It comes too late to leave: peers that have met this learner there wait for it in MPI_Finalize."""
    process, _ = start("""
        import select
        preemption.watch(made := departure())
        made.enter_shutdown()
        os.kill(os.getpid(), signal.SIGTERM)
        print(os.getpid(), flush=True)
        while select.select([preemption._reading], [], [], 0)[0]:  # until the thread has taken it
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGTERM)
        preemption.unwatch()  # takes this one, if the thread has not
        print(made.is_asked, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_here()
    """)
    assert rest(process)[0] == "False"
    assert process.returncode == -signal.SIGTERM, "it was sent after shutdown()"
    assert "leaves" not in process.stderr.read()


def test_a_learner_that_was_asked_to_leave_does_not_enter_shutdown(start):
    process, _ = start("""
        preemption.watch(made := departure(is_leader=False))
        flags[0] = 1  # ASKED, by a mate
        print(os.getpid(), flush=True)
        made.at_leave(lambda: flags.put(1, 1))  # ANNOUNCED, before what the others are to do
        made.enter_shutdown()
        print("not here", flush=True)
    """)
    assert rest(process) == ["last", "first"]
    assert process.returncode == -signal.SIGTERM


def test_a_handler_of_the_script_is_left_alone(start):
    process, _ = start("""
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        preemption.watch(departure())
        flags[0] = 1
        preemption.block_if_leaving()  # nothing holds it either
        os.kill(os.getpid(), signal.SIGTERM)
        print(0, flush=True); print(heard, flush=True)
    """)
    assert rest(process) == ["[1]"]
    assert process.returncode == 0


def test_a_forked_child_ends_by_the_signal_alone(start):
    """As a DataLoader's worker must, which is ended so."""
    process, _ = start("""
        preemption.watch(departure())
        print(os.getpid(), flush=True)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(7)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """)
    assert rest(process) == [str(-signal.SIGTERM)]
    assert process.returncode == 0


def test_the_first_process_of_a_container_ends_too(start):
    """The kernel drops a signal that process 1 of a namespace sends to itself."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces for processes here")
    process, _ = start(
        "preemption.watch(departure()); print(os.getpid(), flush=True); os.kill(1, 15); wait_here()",
        *unshare,
    )
    said = rest(process)  # "1", of wait_here(), at any time or not at all
    assert [word for word in said if word != "1"] == ["last", "first", "told"]
    assert process.returncode == 128 + signal.SIGTERM
