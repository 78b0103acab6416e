"""Predictions of runs against clocks: learners event by event, and averages counted in seconds."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory import limits


def gradients_without_waiting(periods, horizon):
    """How many all learners compute in that time, event by event; each starts the next one at once."""
    ends = [(period, i) for i, period in enumerate(periods)]
    heapq.heapify(ends)
    done = 0
    while ends[0][0] <= horizon:
        time, i = heapq.heappop(ends)
        done += 1
        heapq.heappush(ends, (time + periods[i], i))
    return done


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("slowdown", [1, 2, 7])
def test_throughput_by_events(n, slowdown):
    periods, horizon = [slowdown, *[1] * (n - 1)], 700
    free = gradients_without_waiting(periods, horizon) / horizon
    assert limits.straggler_throughput(n, slowdown) == pytest.approx(free)
    waiting = n * (horizon // slowdown) / horizon
    assert limits.straggler_throughput(n, slowdown, waits=True) == pytest.approx(waiting)


def test_a_stopped_learner():
    assert limits.straggler_throughput(4, float("inf")) == 3
    assert limits.straggler_throughput(4, float("inf"), waits=True) == 0


@given(st.integers(1, 64), st.integers(1, 50), st.floats(1e-3, 10), st.floats(0, 10))
def test_averaging_speedup_by_a_clock(n, period, step_s, allreduce_s):
    alone, together = n * period * step_s, 0.0  # seconds for the same data
    for _ in range(period):
        together += step_s
    together += allreduce_s
    speedup = limits.averaging_speedup(n, period, step_s, allreduce_s)
    assert speedup == pytest.approx(alone / together)
    share = limits.allreduce_share(n, min(speedup, n))
    assert share == pytest.approx(allreduce_s / (period * step_s), abs=1e-9)


def test_published_speedups_fit_an_allreduce_of_log_n_stages():
    """Su and Chen, arXiv:1507.01239: 9.3 times with 16 GPUs and 17 times with 32."""
    growth = limits.allreduce_share(32, 17) / limits.allreduce_share(16, 9.3)
    assert growth == pytest.approx(np.log2(32) / np.log2(16), rel=0.03)


@pytest.mark.parametrize(
    "call",
    [
        lambda: limits.averaging_speedup(4, 0, 1.0, 1.0),
        lambda: limits.averaging_speedup(4, 1, 0.0, 1.0),
        lambda: limits.averaging_speedup(4, 1, 1.0, float("nan")),
        lambda: limits.allreduce_share(4, 4.1),
        lambda: limits.straggler_throughput(0, 2),
        lambda: limits.straggler_throughput(4, 0.5),
        lambda: limits.averaging_speedup(0, 1, 1.0, 1.0),
        lambda: limits.allreduce_share(0, 1.0),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises((ConfigError, TopologyError), match=r"got .*\. "):
        call()
