"""Metrics of an engine: exchanges, staleness and consensus distance. Needs neither MPI nor torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

PARTS = ("inner_allreduce", "optimizer", "collect", "offer")
EVENT_NAMES = ("exchange (asked)", "exchange (answered)", "merge", "parked", "mean of all")
_COUNTED = (
    "exchanges_active",
    "exchanges_passive",
    "exchange_s",
    "refused",
    "declined",
    "parked",
    "void_chunks",
    "chunks",
    "bytes_sent",
    "bytes_received",
    "bytes_shared",
    "means",
    "mean_s",
)


class Table(NamedTuple):
    """Counts of an engine by a number: by the super_rank of its peers, or by staleness.

    Attributes:
        name: key in the engine's counters, in hvd.metrics() and in a record.
        title: what is counted.
        by: what the counts are listed by.
        prometheus: name of the counter for Prometheus, after hvd_adpsgd_; None: none.
    """

    name: str
    title: str
    by: str
    prometheus: str | None = None


# the engine counts by peer in the order of `PeerCount` (mailbox.pxd)
PEER_TABLES = (Table("peers", "exchanges by pair", "peer", "pair_exchanges"),)
TABLES = (
    *PEER_TABLES,
    Table("staleness", "chunks by staleness of the correction (63: or more)", "steps"),
)


def consensus_distance(before: Mapping[str, Any], now: Mapping[str, Any], super_size: int) -> float:
    """Estimate the consensus distance from the exchanges between two readings of an engine's counters.

    D^2 = (1/n) sum_i |x_i - m|^2 = (n - 1) / (2 n) * E|x_i - x_j|^2 over uniformly random pairs. On a fixed
    ring the estimate is too small, because the models of neighbours are closer to each other than others.
    In a run with means of all and without exchanges: the distance of this model from the last mean. NaN if
    nothing was compared. Counters: `square`, the sum of squared differences, of `compared` elements.
    """
    if now["compared"] == 0 and now["means"]:
        return math.sqrt(now["mean_square"])
    compared, square = now["compared"] - before["compared"], now["square"] - before["square"]
    if compared <= 0 or square < 0:  # the sums are read without a lock
        return math.nan
    return math.sqrt((super_size - 1) / (2 * super_size) * (square / compared))


class ExchangeMetrics:
    """Metrics of one engine, computed from the counters of its thread.

    Args:
        super_size: number of super learners.
    """

    def __init__(self, super_size: int):
        self._n = super_size
        self._before: Mapping[str, Any] = {"compared": 0, "square": 0.0}
        self._distance = math.nan

    def read(self, counters: Mapping[str, Any] | None, cpu_s: float = 0.0) -> dict[str, Any]:
        """Return all metrics by name; if `counters` is None, 0 for counts and NaN for means."""
        nothing = {**dict.fromkeys(_COUNTED, 0), **{table.name: [] for table in PEER_TABLES}}
        known = counters or {**nothing, "staleness": [0] * 64}
        staleness = np.array(known["staleness"])
        total = int(staleness.sum())
        return {
            "exchanges": known["exchanges_active"] + known["exchanges_passive"],
            **{name: known[name] for name in _COUNTED},
            "staleness": staleness.tolist(),
            "staleness_mean": float(np.arange(staleness.size) @ staleness) / total
            if total
            else math.nan,
            "consensus_distance": self._consensus_distance(counters) if counters else math.nan,
            **{table.name: known[table.name] for table in PEER_TABLES},
            "engine_cpu_s": cpu_s,
        }

    def _consensus_distance(self, counters: Mapping[str, Any]) -> float:
        """Return the consensus distance since the last `read` after an exchange, else the last one."""
        distance = consensus_distance(self._before, counters, self._n)
        if not math.isnan(distance):
            self._before, self._distance = counters, distance
        return self._distance
