"""Numbers and states of what averages, for people."""

from __future__ import annotations

import time
from typing import Any

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.engine.metrics import Counters, ExchangeMetrics
from hvd_adpsgd.lifecycle import state_dump
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.presence import live

__all__ = ["metrics", "metrics_of"]


def metrics() -> dict[str, Any]:
    """Numbers of this learner since the optimizer was wrapped.

    Always: steps, steps_per_s, and the seconds of steps by part: inner_allreduce_s (backward() or step()
    waits for the super learner's gradients), optimizer_s (the user's), collect_s (corrections in, model into
    the mirror), offer_s (handing it over), each with a moving average `*_ema_s`; nonfinite_steps. Of the
    process: global_operations (over all learners, such as allreduce) and global_operations_s, with their
    waits.

    Of the engine, so 0 or NaN on learners that do not lead: exchanges (active + passive), refused
    and declined questions, parked peers, bytes_sent and bytes_received, staleness (chunks by age
    in steps, 0 to 63 and more) and staleness_mean, consensus_distance (estimated from the exchanges
    since the last call; NaN if no element was compared yet), peers (exchanges with each),
    engine_cpu_s.

    Returns:
        The numbers; with several wrapped optimizers those of the first, and all in "optimizers".
        All 0 or NaN if nothing is averaged between super learners.
    """
    every = [metrics_of(averaging) for averaging in live()]
    if not every:
        nothing = Counters(time.monotonic).to_dict()
        every = [{**nothing, "nonfinite_steps": 0, **ExchangeMetrics(1).read(None)}]
    mine = {**every[0], **usage.totals()}
    return mine if len(every) < 2 else {**mine, "optimizers": every}


def metrics_of(averaging: Averaging) -> dict[str, Any]:
    """Those of one optimizer."""
    return {
        **averaging.record.counters.to_dict(),
        "nonfinite_steps": averaging.nonfinite_steps,
        **averaging.engine.metrics(),
    }


def _views() -> list[dict[str, Any]]:
    """What a state file shows of each."""
    return [
        {
            "strategy": averaging.spec.strategy.spec(),
            "step": averaging.step,
            "published": averaging.engine.memory.published,
            "readable": averaging.engine.memory.readable,
            "landing": averaging.engine.memory.own.landing is not None,
            "stopped": averaging.stopped,
            "engine": averaging.engine.view(),
        }
        for averaging in live(also_stopping=True)
    ]


state_dump.add_source("averaging", _views)
