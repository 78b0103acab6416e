"""The page of a run: it fetches nothing, shows what the record has, and is served to browsers."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.errors import ConfigError, MissingRequirementError
from hvd_adpsgd.tools.page import page, script
from hvd_adpsgd.tools.top import web
from hvd_adpsgd.watching.record import Record, read
from hvd_adpsgd.watching.reports import Report

ATTACK = "<script>document.title='broken'</script><img src=x onerror=\"alert(1)\">"
FINE = Report(steps_per_s=10.0, distance=1.0, share=0.25, inner_allreduce=0.25, offer=0.25)


def recorded(folder: Path, n: int = 3, seconds: int = 20) -> Path:
    """A record with a script in every text; learner 1 exchanges most with learner 2."""
    for i in range(n):
        record = Record(folder, i)
        record.write("start", time_s=1e9, name=ATTACK, script=ATTACK, averaging=ATTACK)
        for s in range(seconds):
            scalars = {"loss": 1 / (1 + s), ATTACK: float(s)}
            report = replace(FINE, time_s=1e9 + s, step=10 * s, scalars=scalars)
            peers = {str(j): s * (1 + j) for j in range(n) if j != i}
            record.report(i, report, peers=peers, staleness={"1": s, "5": 1})
        record.write("event", time_s=1e9 + seconds, event="failed", about=n - 1, text=ATTACK)
        record.close()
    return folder


def figure(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Traces and layout that plotly's script draws."""
    decoder = json.JSONDecoder()
    at = text.rindex("Plotly.newPlot(")
    data, end = decoder.raw_decode(text, text.index("[", at))
    layout, _ = decoder.raw_decode(text, text.index("{", end))
    return data, layout


def of(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    return figure(page(read(folder), 1e9 + 20, "/plotly.js"))


def lines(traces: list[Any], first: int) -> list[Any]:
    """The lines of the chart that has `first` as its number."""
    axes = list(dict.fromkeys(t["xaxis"] for t in traces if t["type"] == "scatter"))
    return [t for t in traces if t["type"] == "scatter" and t["xaxis"] == axes[first]]


def test_it_holds_all_that_it_needs(tmp_path: Path) -> None:
    text = page(read(recorded(tmp_path)), 1e9 + 20)
    assert script() in text
    rest = text.replace(script(), "")
    assert not re.search(r"<(link|img|iframe|form)|<script[^>]*\bsrc|@import", rest)
    assert len(rest) < 100_000


def test_it_shows_what_the_record_has(tmp_path: Path) -> None:
    traces, layout = of(recorded(tmp_path))
    losses = lines(traces, 0)
    assert [line["name"] for line in losses] == ["0", "1", "2"]
    assert losses[0]["x"][:3] == [0, 10, 20] and losses[0]["y"][:2] == [1.0, 0.5]
    (pairs,) = [t for t in traces if t["type"] == "heatmap"]
    assert pairs["z"] == [[0, 38, 57], [19, 0, 57], [19, 38, 0]]
    bars = {t.get("name"): t for t in traces if t["type"] == "bar"}
    assert (bars[None]["x"], bars[None]["y"]) == ([1, 5], [57, 3])
    assert bars["inner allreduce"]["y"] == [0.25] * 3
    assert bars["forward, backward, rest"]["y"] == [0.5] * 3
    table, events = (t["cells"]["values"] for t in traces if t["type"] == "table")
    assert table[0] == ["0", "1", "2"]
    assert [state.split()[0] for state in table[2]] == ["ok", "ok", "FAILED"]
    assert events[1].count("failed") == 1 and events[1].count("start") == 3
    assert {shape["label"]["text"] for shape in layout["shapes"]} == {"failed"}
    titles = [note["text"] for note in layout["annotations"]]
    assert (
        "loss" in titles
        and any("consensus distance" in title for title in titles)
        and "Events" in titles
    )


def test_no_text_of_a_record_is_html(tmp_path: Path) -> None:
    text = page(read(recorded(tmp_path)), 1e9 + 20, "/plotly.js")
    assert ATTACK not in text and "<img" not in text

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            for one in value.values() if isinstance(value, dict) else value:
                yield from texts(one)

    shown = list(texts(list(figure(text))))
    assert any("&lt;img" in one for one in shown), "plotly reads entities, and shows them as text"
    assert not any("<" in one for one in shown if "%{" not in one)


@pytest.mark.parametrize(("every_s", "parts"), [(1.0, 2), (100.0, 1)])
def test_lines_have_gaps_where_nothing_is_known(tmp_path: Path, every_s: float, parts: int) -> None:
    record = Record(tmp_path, 0)
    record.write("start", time_s=1e9, every_s=every_s)
    for s in (1, 2, 9, 200, 201, 202):
        record.report(0, replace(FINE, time_s=1e9 + s, step=s))
    record.close()
    assert [line["y"].count(None) for line in lines(of(tmp_path)[0], 0)] == [parts - 1]


def test_a_line_does_not_go_back_to_the_steps_of_a_new_run(tmp_path: Path) -> None:
    record = Record(tmp_path, 0)
    for s, step in ((1, 100), (2, 200), (4, 0), (5, 100)):
        record.report(0, replace(FINE, time_s=1e9 + s, step=step))
    record.close()
    (line,) = lines(of(tmp_path)[0], 1)
    assert line["x"] == [100, 200, 200, 0, 100] and line["y"] == [1.0, 1.0, None, 1.0, 1.0]


def test_an_empty_run_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"kind":"start","time_s":1}\n')
    traces, layout = of(tmp_path)
    assert [t["type"] for t in traces] == ["table", "table"]
    assert layout["title"]["text"].startswith("Run of a script: 1 super learners")


def test_a_long_run_has_fewer_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_adpsgd.tools.page._POINTS", 20)
    for line in lines(of(recorded(tmp_path))[0], 1):
        assert len(line["x"]) == 5 and None not in line["y"]


def test_plotly_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(MissingRequirementError, match=r"hvd_adpsgd\[view\]"):
        page(read(recorded(tmp_path)), 0.0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[int]:
    """The port of a page."""
    with web.server(str(recorded(tmp_path)), 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving.server_port
        serving.shutdown()
        thread.join()


def get(port: int, path: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_a_browser_gets_the_page_and_its_script(served: int, tmp_path: Path) -> None:
    status, headers, text = get(served, "/")
    assert status == 200 and headers["Refresh"] == "10"
    assert 'src="/plotly.js"' in text and len(text) < 100_000
    assert get(served, "/plotly.js")[2] == script()
    assert get(served, "/0.jsonl")[0] == get(served, "/../0.jsonl")[0] == 404
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    status, headers, text = get(served, "/")
    assert (status, headers["Refresh"]) == (503, "10") and "no record in" in text


def test_a_port_in_use_is_an_error(served: int, tmp_path: Path) -> None:
    for port in (served, 70_000):
        with pytest.raises(ConfigError, match="--web"):
            web.server(str(tmp_path), port)
