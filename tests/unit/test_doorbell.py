"""An engine that sleeps is woken by what is sent to it.

Nothing here measures time: a test sleeps in the place of the engine, on its doorbell or in its wire.
tests/mpi/test_engine.py looks whether engines sleep on doorbells, over MPI.
"""

import ctypes
import errno
import platform
import select
import threading
import time

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation import engine_calls

from tests.launcher import wait_for
from tests.members import Member, come_to_rest, connect_all, share_memory

DEADLINE_S = 60.0
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
FUTEX_WAIT = 0
DOORBELL_NBYTES = 64  # at the end of an engine's shared memory: how often it was rung, who sleeps
RUNG, ASLEEP = 0, 1

libc = ctypes.CDLL(None, use_errno=True)


class Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def doorbell_of(memory: np.ndarray) -> np.ndarray:
    return memory[-DOORBELL_NBYTES:].view(np.uint32)


def sleep_on(doorbell: np.ndarray) -> int:
    """As an engine does, for DEADLINE_S. 0 if it was woken, EAGAIN if it was rung just before."""
    doorbell[ASLEEP] = 1
    wait = Timespec(int(DEADLINE_S), 0)
    address = ctypes.c_void_p(doorbell.ctypes.data)
    failed = libc.syscall(SYS_FUTEX, address, FUTEX_WAIT, 0, ctypes.byref(wait), None, 0)
    return ctypes.get_errno() if failed else 0


def exchanged(rings: bool) -> list[np.ndarray]:
    """Two engines that share memory exchange; their doorbells afterwards, at rest."""
    pair = [Member(0), Member(1)]
    memory = share_memory(pair, rings)
    for member in pair:
        member.loop.start()
        member.step()
    ends = time.monotonic() + DEADLINE_S
    while any(member.loop.finished() == 0 for member in pair):  # of credit
        connect_all(pair)
        assert time.monotonic() < ends, pair[0].loop.view()
    come_to_rest(pair)
    total = pair[0].model.state() + pair[1].model.state()
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    return [doorbell_of(memory[rank]).copy() for rank in (0, 1)]


@pytest.mark.parametrize("rings", [True, False])
def test_engines_of_a_host_exchange_with_and_without_doorbells(rings: bool) -> None:
    assert [bool(doorbell[RUNG]) for doorbell in exchanged(rings)] == [rings] * 2


def test_a_message_wakes_an_idle_engine_of_the_host() -> None:
    """In place of the engine that is asked sleeps this test."""
    pair = [Member(0), Member(1)]
    memory = share_memory(pair, rings=True)
    doorbell, woken = doorbell_of(memory[1]), []
    sleeper = threading.Thread(target=lambda: woken.append(sleep_on(doorbell)))
    sleeper.start()
    wait_for(lambda: doorbell[ASLEEP], "it sleeps")
    pair[0].loop.start()
    pair[0].step()
    pair[0].loop.ask(1)
    while sleeper.is_alive():
        connect_all(pair)
        sleeper.join(0.01)
    assert woken[0] in (0, errno.EAGAIN), "the message has woken nobody"
    assert doorbell[RUNG] > 0
    for member in pair:
        member.close()


def sleeping(member: Member) -> threading.Thread:
    """A thread that sleeps in the wire of an engine that does not run."""
    sleeper = threading.Thread(target=engine_calls.sleep, args=(member.wire, 10 * DEADLINE_S))
    sleeper.start()
    wait_for(lambda: engine_calls.sleeps(member.wire), "it sleeps")
    return sleeper


def test_an_order_of_the_trainer_wakes_an_engine_that_sleeps_in_its_wire() -> None:
    member = Member(0)
    sleeper = sleeping(member)
    member.loop.ask(1)
    sleeper.join(DEADLINE_S)
    assert not sleeper.is_alive(), "the order has woken nobody"
    member.wire.progress()  # takes note of it
    events = select.poll()
    events.register(member.wire.fileno(), select.POLLIN)
    assert events.poll(0) == [], "still woken by the order"
    engine_calls.sleep(
        member.wire, 10 * DEADLINE_S, heard=1
    )  # an order came before the sleep: none
    again = sleeping(member)
    member.loop.offer(0, True)
    again.join(DEADLINE_S)
    assert not again.is_alive()
    member.wire.close()


def test_a_message_wakes_an_engine_that_sleeps_in_its_wire() -> None:
    pair = [Member(0), Member(1)]
    pair[0].wire.post(1, 7, b"", np.zeros(4, np.uint8))
    connect_all(pair)
    for member in pair:
        member.wire.progress()  # takes the connection, and what came first
    while pair[0].wire.unfinished or pair[1].wire.take() is None:
        for member in pair:
            member.wire.progress()
    sleeper = sleeping(pair[1])
    pair[0].wire.post(1, 7, b"", np.zeros(4, np.uint8))
    sleeper.join(DEADLINE_S)
    assert not sleeper.is_alive(), "the message has woken nobody"
    for member in pair:
        member.wire.close()
