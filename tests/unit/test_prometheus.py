"""Metrics for Prometheus: which, at which address, and what Grafana asks of them."""

import json
import logging
import math
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvd_adpsgd.engine.metrics import PEER_TABLES
from hvd_adpsgd.errors import ConfigError, MissingRequirementError
from hvd_adpsgd.watching import prometheus, watcher
from hvd_adpsgd.watching.prometheus import Exporter
from hvd_adpsgd.watching.record import Event, Run, Track
from hvd_adpsgd.watching.reports import Report
from hvd_adpsgd.watching.table import STATES

ODD = 'a "name"\n of another {kind}'
GRAFANA = Path(prometheus.__file__).with_name("grafana.json")  # also of an installed wheel


def filled() -> Run:
    """Three super learners, of which the last one has failed."""
    report = Report(
        time_s=1e9,
        step=40,
        steps_per_s=10.0,
        distance=0.5,
        exchanges=9,
        inner_allreduce=0.25,
        staleness_p95=3,
        idle_s=2.0,
        scalars={"loss": 0.2, ODD: 1.0, "none": math.nan},
    )
    tracks = {i: Track(f"node{i} {ODD}, learner {i}", [report]) for i in range(3)}
    tracks[0].tables = {table.name: {1: 7, 2: 5} for table in PEER_TABLES}
    return Run(tracks, [Event(1e9, "failed", 2, ""), Event(1e9, "alert", 1, "")])


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter(":0")
    made.show(filled())
    made.open()
    yield made
    made.close()


def get(address: Any) -> str:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, list[Any]]:
    """Samples by name, as Prometheus reads them."""
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def values(found: list[Any], *labels: str) -> dict[Any, float]:
    return {tuple(s.labels[label] for label in labels): s.value for s in found}


def test_metrics_are_those_of_the_reports(exporter: Exporter) -> None:
    found = samples(get(exporter.address))
    steps = values(found["hvd_adpsgd_steps_total"], "super_learner")
    assert steps == {("0",): 40.0, ("1",): 40.0, ("2",): 40.0}
    scalars = values(found["hvd_adpsgd_scalar"], "super_learner", "name")
    assert scalars == {(str(i), n): v for i in range(3) for n, v in (("loss", 0.2), (ODD, 1.0))}
    pairs = values(found["hvd_adpsgd_pair_exchanges_total"], "super_learner", "peer")
    assert pairs == {("0", "1"): 7.0, ("0", "2"): 5.0}
    states = {
        (s.labels["super_learner"], s.labels["state"]) for s in found["hvd_adpsgd_state"] if s.value
    }
    assert states == {("0", "SILENT"), ("1", "SILENT"), ("2", "FAILED")}
    shares = values(found["hvd_adpsgd_step_share"], "super_learner", "part")
    assert shares["0", "inner_allreduce"] == 0.25 and shares["2", "offer"] == 0.0
    ages = values(found["hvd_adpsgd_staleness_steps"], "super_learner", "quantile")
    assert (ages["0", "0.5"], ages["0", "0.95"]) == (0.0, 3.0)
    hosts = [s.labels["host"] for s in found["hvd_adpsgd_since_step_seconds"]]
    assert hosts == [f"node{i} {ODD}, learner {i}" for i in range(3)]
    assert values(found["hvd_adpsgd_events"], "event") == {("failed",): 1.0, ("alert",): 1.0}


def test_a_run_without_reports_has_metrics_without_samples() -> None:
    assert "hvd_adpsgd_steps" in {metric.name for metric in prometheus.RunCollector().collect()}


def test_it_serves_again_after_it_was_closed(exporter: Exporter) -> None:
    before = exporter.address
    exporter.open()
    assert exporter.address == before
    exporter.close()
    exporter.close()
    with pytest.raises(urllib.error.URLError):
        get(before)
    exporter.open()
    assert get(exporter.address)


def test_a_port_in_use_is_warned_about_once(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = exporter.address or ("", 0)
    assert host == "127.0.0.1", "loopback alone"
    second = Exporter(f":{port}")
    with caplog.at_level(logging.WARNING):
        second.open()
        second.open()
    assert caplog.text.count("no metrics at 127.0.0.1 port") == 1 and second.address is None
    exporter.close()
    second.open()
    assert get(second.address)
    second.close()


@pytest.mark.parametrize("text", ["8265", "host", ":65536", "::1:80", "a b:1", ":-1", "h:1/x", ":"])
def test_what_is_no_address_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="HVD_ADPSGD_METRICS_ADDRESS"):
        Exporter(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [(":8265", "127.0.0.1", 8265), ("0.0.0.0:1", "0.0.0.0", 1), ("[::1]:65535", "::1", 65535)],
)
def test_addresses(text: str, host: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(*address: Any) -> Any:
        asked.append(address[:2])
        raise OSError("in use")

    monkeypatch.setattr(prometheus, "start_http_server", refuse)
    Exporter(text).open()
    assert asked == [(port, host)]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hvd_adpsgd.watching.prometheus")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingRequirementError, match=r"prometheus_client.*hvd_adpsgd\[metrics\]"):
        watcher._exporter(":0")
    assert watcher._exporter(None) is None


def test_the_grafana_dashboard_asks_for_metrics_that_exist(exporter: Exporter) -> None:
    """Names and labels of every query."""
    found = samples(get(exporter.address))
    made = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in made["templating"]["list"] if v["type"] == "query"]
    assert len(queries) >= 12
    for query in queries:
        names = re.findall(r"hvd_adpsgd_\w+", query)
        assert names and all(name in found for name in names), query
        labels = {label for sample in found[names[0]] for label in sample.labels}
        used = re.findall(r"(\w+)(?:=~|!=|=)\"", query) + re.findall(r"by \((\w+)\)", query)
        used += re.findall(r"label_values\(\w+, (\w+)\)", query)
        assert set(used) <= labels, query


def test_the_page_of_docs_names_each_metric_and_state(exporter: Exporter) -> None:
    text = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    listed = text[text.index("Of each super learner `hvd_adpsgd_`") :].partition("`grafana.json`")[
        0
    ]
    served = {name.removeprefix("hvd_adpsgd_") for name in samples(get(exporter.address))}
    assert set(re.findall(r"`(\w+)`", listed)) - {"hvd_adpsgd_"} == served
    rows = re.findall(r"(?m)^\| (ok, left|[A-Z]+) \|", text)
    assert set(", ".join(rows).split(", ")) == set(STATES)
