"""Counters and histogram against sums by hand."""

import math
from unittest.mock import MagicMock

import pytest

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.metrics import PEER_TABLES, ExchangeMetrics
from hvd_adpsgd.training.timeline import Counters


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


# ---- counters


def test_counters_by_hand():
    clock = Clock()
    counters = Counters(clock, decay=0.5)
    assert math.isnan(counters.steps_per_s)
    for optimizer_s in (1.0, 2.0, 4.0):
        clock.now += optimizer_s
        counters.add("optimizer", optimizer_s)
        counters.add("offer", 0.25)
        counters.add("offer", 0.25)
        clock.now += 1.0
        counters.end_step()
    assert counters.to_dict() == {
        "steps": 3,
        "seconds": 8.0,
        "steps_per_s": 0.25,
        "step_ema_s": 4.0,
        "inner_allreduce_s": 0.0,
        "inner_allreduce_ema_s": 0.0,
        "optimizer_s": 7.0,
        "optimizer_ema_s": 0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 4,
        "collect_s": 0.0,
        "collect_ema_s": 0.0,
        "offer_s": 1.5,
        "offer_ema_s": 0.5,
    }


# ---- exchanges


def test_numbers_of_exchanges_by_hand():
    metrics = ExchangeMetrics(4)
    nothing = metrics.read(None)
    assert nothing["exchanges"] == 0 and nothing["peers"] == [] and sum(nothing["staleness"]) == 0
    assert math.isnan(nothing["staleness_mean"]) and math.isnan(nothing["consensus_distance"])
    counters = dict.fromkeys(nothing, 0) | {
        "exchanges_active": 2, "exchanges_passive": 3, "staleness": [1, 0, 3] + [0] * 61,
        "peers": [0, 5, 0, 0], "compared": 5, "square": 20.0,
    }  # fmt: skip
    first = metrics.read(counters, 1.5)
    assert first["exchanges"] == 5 and first["staleness_mean"] == 1.5
    assert first["peers"] == [0, 5, 0, 0] and first["engine_cpu_s"] == 1.5
    assert first["consensus_distance"] == pytest.approx(math.sqrt(3 / 8 * 4.0))
    assert metrics.read(counters)["consensus_distance"] == first["consensus_distance"]
    later = metrics.read({**counters, "compared": 6, "square": 29.0})
    assert later["consensus_distance"] == pytest.approx(math.sqrt(3 / 8 * 9.0))
    of_all = {**counters, "compared": 0, "means": 1, "mean_square": 0.25}
    assert metrics.read(of_all)["consensus_distance"] == 0.5


class Forgetful(Engine):
    """Another thread releases it as soon as `loop` was read once."""

    def __init__(self, loop: object):
        self.__dict__.update(
            _loops=[loop], _members=[0], _names=["a"], _seen_events=0, _reported=[0]
        )
        self.__dict__.update(_metrics=MagicMock(), _final={})

    @property
    def loop(self):
        return self._loops.pop() if self._loops else None


@pytest.mark.parametrize(
    "read",
    [
        lambda engine: engine.send_report(b"x"),
        Engine.report,
        Engine.metrics,
        Engine.counters,
        Engine.view,
        Engine.take_events,
    ],
)
def test_an_engine_may_be_released_while_another_thread_reads_it(read):
    loop = MagicMock()
    loop.peers.return_value = [0]
    loop.counters.return_value = {table.name: [0] for table in PEER_TABLES}
    loop.view.return_value = {}
    loop.take_events.return_value = []
    read(Forgetful(loop))
