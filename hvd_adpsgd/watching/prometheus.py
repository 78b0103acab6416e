"""Exports the newest report of each super learner as Prometheus metrics; grafana.json is their dashboard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hvd_adpsgd.watching.record import Run
from hvd_adpsgd.watching.reports import PARTS
from hvd_adpsgd.watching.table import rows

__all__ = ["exposition"]

_STATES = ("ok", "SLOW", "HUNG", "SUSPECT", "SILENT", "JOINING", "FAILED", "left")


class _Number(NamedTuple):
    """A field of Report that is exported as a metric: as a counter if `counts`, else as a gauge."""

    field: str
    name: str
    meaning: str
    counts: bool = False


_NUMBERS = (
    _Number("step", "steps", "Optimizer steps", counts=True),
    _Number("steps_per_s", "steps_per_second", "Optimizer steps per second, over 10 s"),
    _Number("distance", "consensus_distance", "Estimated consensus distance of the models"),
    _Number("exchanges", "exchanges", "Exchanges with peers, means of all included", counts=True),
    _Number("exchanges_per_s", "exchanges_per_second", "Exchanges per second, over 10 s"),
    _Number("share", "exchange_share", "Share of the model that an exchange moves"),
    _Number("bits", "exchange_bits", "Bits per element of exchanges between hosts; 0: all"),
    _Number("sent_per_s", "sent_bytes_per_second", "Bytes sent over links per second, over 10 s"),
    _Number("apart_s", "since_exchange_seconds", "Time since the last exchange"),
    _Number("apart_steps", "since_exchange_steps", "Steps since the last exchange"),
    _Number("idle_s", "since_step_seconds", "Time since the last step, collective or pause"),
    _Number("left_out", "left_out_chunks", "Chunks that the last 8 exchanges could not average"),
    _Number("nonfinite_steps", "nonfinite_steps", "Steps with NaN or infinity", counts=True),
)


def exposition(run: Run, now_s: float) -> tuple[bytes, str]:
    """Return the metrics of a run in Prometheus' text format, and the content type of that format.

    Args:
        run: the reports and events of the run so far.
        now_s: the current time (time.time).
    """
    registry = CollectorRegistry()
    registry.register(_Collector(run, now_s))
    return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


class _Collector(Collector):
    """Collects the metrics of a run at one moment for prometheus_client."""

    def __init__(self, run: Run, now_s: float):
        self._run, self._now_s = run, now_s
        self._last = {i: track.reports[-1] for i, track in run.tracks.items() if track.reports}
        self._names = {i: [str(i), track.name] for i, track in run.tracks.items()}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for number in _NUMBERS:
            family = CounterMetricFamily if number.counts else GaugeMetricFamily
            metric = family(f"hvd_adpsgd_{number.name}", number.meaning, labels=_WHO)
            for i, report in self._last.items():
                metric.add_metric(self._names[i], getattr(report, number.field))
            yield metric
        yield from (self._staleness(), self._parts(), self._scalars(), self._states(), self._age())
        yield from (self._pairs(), self._events())

    def _staleness(self) -> Metric:
        metric = _gauge("staleness_steps", "Age of corrections, over 10 s", "quantile")
        for i, report in self._last.items():
            metric.add_metric([*self._names[i], "0.5"], report.staleness_p50)
            metric.add_metric([*self._names[i], "0.95"], report.staleness_p95)
        return metric

    def _parts(self) -> Metric:
        metric = _gauge("step_share", "Share of time in parts of the step, over 10 s", "part")
        for i, report in self._last.items():
            shares = {part: getattr(report, part) for part in PARTS}
            shares["rest"] = max(0.0, 1.0 - sum(shares.values()))
            for part, share in shares.items():
                metric.add_metric([*self._names[i], part], share)
        return metric

    def _scalars(self) -> Metric:
        metric = _gauge("scalar", "What the script logs by hvd.log", "name")
        for i, report in self._last.items():
            for name, value in report.scalars.items():
                if not math.isnan(value):
                    metric.add_metric([*self._names[i], name], value)
        return metric

    def _states(self) -> Metric:
        metric = _gauge("state", "1 for the state of the super learner, else 0", "state")
        for row in rows(self._run, self._now_s):
            for state in _STATES:
                who = self._names[row.super_learner]
                metric.add_metric([*who, state], float(row.state == state))
        return metric

    def _age(self) -> Metric:
        metric = _gauge("report_age_seconds", "Time since the newest report")
        for i, report in self._last.items():
            metric.add_metric(self._names[i], self._now_s - report.time_s)
        return metric

    def _pairs(self) -> Metric:
        metric = CounterMetricFamily(
            "hvd_adpsgd_pair_exchanges", "Exchanges by peer", labels=[*_WHO, "peer"]
        )
        for i, track in self._run.tracks.items():
            for peer, count in sorted(track.peers.items()):
                metric.add_metric([*self._names[i], str(peer)], count)
        return metric

    def _events(self) -> Metric:
        metric = GaugeMetricFamily(
            "hvd_adpsgd_events", "Newest 500 events, counted by kind", labels=["event"]
        )
        for what, count in Counter(event.what for event in self._run.events).items():
            metric.add_metric([what], count)
        return metric


_WHO = ("super_learner", "host")


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"hvd_adpsgd_{name}", meaning, labels=[*_WHO, *labels])
