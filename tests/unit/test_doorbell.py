"""An engine that sleeps is woken by what is sent to it, and by its trainer."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from tests.members import Member, connect_all, share_memory

DEADLINE_S = 60.0
IDLE_S = 0.5  # after which an engine polls every 10 ms
SAMPLES = 5
ATTEMPTS = 5  # a busy machine may let a woken thread wait


def exchange(pair: list[Member], peer: int) -> float:
    """Seconds from an order to the end of the exchange; both engines have been idle for long."""
    asks = pair[1 - peer]
    count = asks.loop.finished()
    time.sleep(IDLE_S)  # the engines' own pauses grow with it
    began = time.monotonic()
    asks.loop.ask(peer)
    while asks.loop.finished() == count:
        connect_all(pair)
        assert time.monotonic() < began + DEADLINE_S, asks.loop.view()
    asks.loop.ask(-1)
    return time.monotonic() - began


def seconds(rings: bool) -> float:
    """The median of several exchanges, and that nothing is lost by them."""
    pair = [Member(0), Member(1)]
    memory = share_memory(pair, rings)
    for member in pair:
        member.loop.start()
        member.step()
    while any(member.loop.finished() == 0 for member in pair):  # of credit
        connect_all(pair)
    took = [exchange(pair, k % 2) for k in range(SAMPLES)]
    for member in pair:
        member.loop.pause(True)
        assert member.loop.wait_quiet(DEADLINE_S)
    total = pair[0].model.state() + pair[1].model.state()
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    for member in pair:
        member.loop.stop(within=0.1)
        member.wire.close()
    del memory
    return statistics.median(took)


def test_a_message_wakes_an_idle_engine_of_the_host() -> None:
    """It need not poll to be quick: without the doorbell an ASK waits for its next look, up to 10 ms."""
    for _ in range(ATTEMPTS):
        with_doorbell, without = seconds(True), seconds(False)
        print(f"{1e3 * with_doorbell:.2f} ms, without {1e3 * without:.2f} ms")
        if with_doorbell < 0.5 * without:
            return
    pytest.fail("a message does not wake the engine")
