"""Serves the newest report of each super learner to Prometheus; grafana.json is the dashboard of Grafana."""

import itertools
import logging
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hvd_adpsgd.engine.metrics import TABLES
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching.record import Run
from hvd_adpsgd.watching.reports import METRICS
from hvd_adpsgd.watching.reports import Metric as ReportMetric
from hvd_adpsgd.watching.table import STATES, Row, rows

log = logging.getLogger("hvd_adpsgd")

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]*)):(\d{1,5})", re.ASCII)


class Exporter:
    """Serves /metrics for Prometheus while it is open, by prometheus_client's own server.

    Args:
        address: [host]:port; without a host the loopback interface.

    Raises:
        ConfigError: if the address has another form, or the port is over 65535.
    """

    def __init__(self, address: str):
        match = _ADDRESS.fullmatch(address.strip())
        if match is None or int(match[3]) > 65535:
            raise ConfigError(
                f"no metrics: HVD_ADPSGD_METRICS_ADDRESS is {address!r}, allowed is [host]:port with a port "
                "of 0 to 65535. Set it to :8265 for this host alone, 0.0.0.0:8265 for all its interfaces, or "
                "[::1]:8265 for an IPv6 address."
            )
        self._host, self._port = match[1] or match[2] or "127.0.0.1", int(match[3])
        self._registry = CollectorRegistry()
        self._collector = RunCollector()
        self._registry.register(self._collector)
        self._server: WSGIServer | None = None
        self._is_warned = False

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port at which /metrics is served; None while closed."""
        return self._server and self._server.server_address[:2]  # type: ignore[return-value]

    def show(self, run: Run) -> None:
        """Serve the newest reports and the events of this run from now on."""
        self._collector.run = run

    def open(self) -> None:
        """Serve, unless this is done already; if the port is in use, warn once; a later call tries again."""
        if self._server is not None:
            return
        try:
            self._server, _ = start_http_server(self._port, self._host, self._registry)
        except (OSError, RuntimeError) as error:  # the port is in use; no more threads
            if not self._is_warned:
                log.warning(
                    "no metrics at %s port %d (%s). Training continues, and the address is tried again. "
                    "Free it, or set HVD_ADPSGD_METRICS_ADDRESS to another one.",
                    self._host,
                    self._port,
                    error,
                )
            self._is_warned = True
            return
        host = socket.gethostname()
        log.info("metrics for Prometheus are on host %s: port %d", host, self._server.server_port)

    def close(self) -> None:
        """Stop serving, which takes at most about 0.5 s; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class RunCollector(Collector):
    """Collects the metrics of a run when Prometheus asks.

    Attributes:
        run: the newest reports and the events.
    """

    def __init__(self) -> None:
        self.run = Run()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        run, now_s = self.run, time.time()
        shown = rows(run, now_s)
        families = itertools.groupby(METRICS, key=lambda metric: metric.prometheus)
        for name, metrics in families:
            if name:
                yield _family(shown, name, list(metrics))
        yield _metric(shown, "scalar", "what the script logs by hvd.log", _scalars, "name")
        yield _metric(
            shown, "state", "1 for the state of the super learner, else 0", _states, "state"
        )
        yield _metric(
            shown, "report_age_seconds", "age of the newest report", lambda row: {"": row.age_s}
        )
        for table in TABLES:
            if table.prometheus:
                counts = _counts(run, table.name)
                yield _metric(shown, table.prometheus, table.title, counts, table.by, counts=True)
        events = GaugeMetricFamily(
            "hvd_adpsgd_events", "newest 500 events, counted by kind", labels=["event"]
        )
        for what, count in Counter(event.what for event in run.events).items():
            events.add_metric([what], count)
        yield events


def _family(shown: Sequence[Row], name: str, metrics: Sequence[ReportMetric]) -> Metric:
    """Return the metric of those numbers of a report that have this name, distinguished by a label."""
    first, labels = metrics[0], [metric.label or ("", "") for metric in metrics]

    def samples(row: Row) -> Mapping[str, float]:
        return {
            value: getattr(row.report, metric.name)
            for metric, (_, value) in zip(metrics, labels, strict=True)
        }

    label = [labels[0][0]] if first.label else []
    return _metric(shown, name, first.meaning, samples, *label, counts=first.counts)


def _metric(
    shown: Sequence[Row],
    name: str,
    meaning: str,
    samples: Callable[[Row], Mapping[str, float]],
    *label: str,
    counts: bool = False,
) -> Metric:
    """Return the metric hvd_adpsgd_NAME: of each super learner a sample, or one for each value of `label`."""
    family = CounterMetricFamily if counts else GaugeMetricFamily
    metric = family(f"hvd_adpsgd_{name}", meaning, labels=["super_learner", "host", *label])
    for row in shown:
        for value_of_label, value in samples(row).items():
            own = [value_of_label] if label else []
            metric.add_metric([str(row.super_learner), row.host, *own], value)
    return metric


def _counts(run: Run, table: str) -> Callable[[Row], Mapping[str, float]]:
    return lambda row: {
        str(i): n for i, n in run.tracks[row.super_learner].tables.get(table, {}).items()
    }


def _scalars(row: Row) -> Mapping[str, float]:
    return {name: value for name, value in row.report.scalars.items() if not math.isnan(value)}


def _states(row: Row) -> Mapping[str, float]:
    return {state: float(row.state == state) for state in STATES}
