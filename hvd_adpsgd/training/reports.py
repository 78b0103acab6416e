"""Metrics of this learner's optimizers (`hvd.metrics`), and their section of its state file (SIGUSR1)."""

import math
import time
from typing import Any

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.engine.metrics import ExchangeMetrics
from hvd_adpsgd.formats import first_format
from hvd_adpsgd.lifecycle import state_dump
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.timeline import Counters

_NO_SHARE = {"exchange_share": math.nan, "exchange_bits": 0, "exchange_overhead": math.nan}


def metrics() -> dict[str, Any]:
    """Return the metrics of this learner since its optimizer was wrapped: a dict of counters and seconds.

    On every learner: steps, steps_per_s, and the seconds of steps by part: inner_allreduce_s (backward() or
    step() waits for the super learner's gradients), optimizer_s (the user's optimizer), collect_s (applying
    corrections and copying the model to the engine's memory), offer_s (offering the model to peers), each
    with a moving average `*_ema_s`; nonfinite_steps. For the whole process: global_operations (number of
    operations over all learners, such as allreduce) and global_operations_s (their seconds, waits included).

    Of the engine, so 0 or NaN on learners that are not leaders: exchanges (active + passive), refused
    and declined requests for an exchange, parked peers, bytes_sent and bytes_received (of chunks and
    sums, over the network or as messages inside a host, counted as they arrive), bytes_shared (of chunks
    averaged with peers on this host through shared memory, which no link carries), staleness (chunks by
    age in steps, 0 to 63 and more) and staleness_mean, consensus_distance (estimated from the exchanges
    since the last call; NaN if no element was compared yet), peers (number of exchanges with each peer)
    and the other PEER_TABLES of hvd_adpsgd.engine.metrics, engine_cpu_s, exchange_share (of the model, in
    the next exchanges), exchange_bits (per element, between hosts, at most, as a peer may want fewer: 4, 8
    or 16; 0: as many as the model has),
    exchange_overhead (what exchanges cost, as a part of a step; NaN unless exchange_share="auto").

    Returns:
        The metrics by name; with several wrapped optimizers those of the first one, and a list of the metrics
        of all of them under "optimizers". All 0 or NaN if nothing is averaged between super learners.
    """
    every = [metrics_of(averaging) for averaging in live()]
    if not every:
        nothing = Counters(time.monotonic).to_dict()
        every = [{**nothing, "nonfinite_steps": 0, **ExchangeMetrics(1).read(None), **_NO_SHARE}]
    first = {**every[0], **usage.totals()}
    return first if len(every) < 2 else {**first, "optimizers": every}


def metrics_of(averaging: Averaging) -> dict[str, Any]:
    """Return the metrics of one wrapped optimizer's averaging, by name."""
    return {
        **averaging.record.counters.to_dict(),
        "nonfinite_steps": averaging.nonfinite_steps,
        **averaging.engine.metrics(),
        "exchange_share": share_of(averaging),
        "exchange_bits": bits_of(averaging),
        "exchange_overhead": math.nan
        if averaging.share is None
        else averaging.share.control.overhead,
    }


def share_of(averaging: Averaging) -> float:
    """Return the share of the model that the next exchanges move; NaN on learners without an engine."""
    if averaging.engine.loop is None:
        return math.nan
    return (
        averaging.spec.config.first_share
        if averaging.share is None
        else averaging.share.control.share
    )


def bits_of(averaging: Averaging) -> int:
    """Return the bits per element of the next exchanges between hosts; 0: as many as the model has."""
    if averaging.engine.loop is None:
        return 0
    if averaging.share is not None and averaging.spec.config.chooses_bits:
        return averaging.share.control.wire_format.bits
    return first_format(averaging.spec.config.wire_dtype).bits


def _views() -> list[dict[str, Any]]:
    """Return the entries of a state file (written on SIGUSR1), one dict per optimizer that averages."""
    return [
        {
            "strategy": averaging.spec.strategy.spec(),
            "step": averaging.step,
            "published": averaging.engine.memory.own.published,
            "readable": averaging.engine.memory.own.readable,
            "landing": averaging.engine.memory.own.landing is not None,
            "stopped": averaging.stopped,
            "engine": averaging.engine.view(),
        }
        for averaging in live(also_stopping=True)
    ]


state_dump.add_source("averaging", _views)
