"""A super learner that stops in the middle of an exchange over a thin link is suspected, and stays so."""

import contextlib
import functools
import itertools
import time

import pytest
from hvd_adpsgd_lab.machines import Cluster, unavailable

from hvd_adpsgd.engine.peers import PeerState
from tests.wires.test_processes import LONGEST_S, Remote, met

pytestmark = [pytest.mark.slow, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)

RATE = "8mbit"  # 0.26 s for a chunk, of which the kernel holds several
DEADLINE_S = 0.1
WATCHED_S = 4.0


def test_what_the_link_takes_is_no_sign_of_life() -> None:
    """Chunks that wait here for the link are sent seconds after the other side has stopped."""
    options = {"deadline_s": DEADLINE_S, "elements": 4_000_000, "chunk_kib": 512}
    with Cluster(2) as cluster, contextlib.ExitStack() as stack:

        def popen(host: str, command: list[str], **how: object) -> object:
            return stack.enter_context(cluster.started(command, host=host, **how))  # type: ignore[arg-type]

        hosts = [functools.partial(popen, f"node{i + 1}") for i in range(2)]
        a, b = met([Remote(i, 2, dict(options), hosts[i]) for i in range(2)])
        cluster.shape("node2", RATE)
        a.do("ask", 1)
        ends = time.monotonic() + LONGEST_S
        while a.do("merged") < 3:
            assert time.monotonic() < ends
            time.sleep(0.01)
        b.say(["freeze"])
        seen, began = [], time.monotonic()
        while time.monotonic() < began + WATCHED_S or seen[-1][1] != PeerState.SUSPECT:
            assert time.monotonic() < began + LONGEST_S, seen[-1]
            seen.append((a.do("merged"), a.do("states")[1], a.do("merged")))
        woken = [
            (before, after)
            for (before, was, _), (_, now, after) in itertools.pairwise(seen)
            if was == PeerState.SUSPECT and now == PeerState.ALIVE
        ]
        print(f"{len(seen)} looks, alive again {woken}")
        assert all(before < after for before, after in woken), "without a chunk from it"
