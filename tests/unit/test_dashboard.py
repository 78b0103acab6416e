"""The live page: who may read it, what it withstands, what it shows, and what Prometheus reads."""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import math
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvd_adpsgd.errors import ConfigError, MissingRequirementError
from hvd_adpsgd.tools import top
from hvd_adpsgd.watching import dashboard as dashboards
from hvd_adpsgd.watching import server
from hvd_adpsgd.watching.access import Address, Token
from hvd_adpsgd.watching.board import Board
from hvd_adpsgd.watching.dashboard import Dashboard
from hvd_adpsgd.watching.page import live
from hvd_adpsgd.watching.prometheus import exposition
from hvd_adpsgd.watching.record import Event, Record, of_lines
from hvd_adpsgd.watching.reports import Report
from tests.browser import browser
from tests.launcher import wait_for

TOKEN = "a-token-of-the-test"
SCRIPT = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
GRAFANA = Path(dashboards.__file__).with_name("grafana.json")  # also of an installed wheel


def report(i: int, k: int) -> Report:
    return Report(
        time_s=1e9 + k,
        step=10 * k,
        steps_per_s=10.0 + i,
        distance=0.5 / (1 + k),
        exchanges=9 * k,
        inner_allreduce=0.25,
        staleness_p95=3,
        scalars={"loss": 1 / (1 + k), SCRIPT: 1.0},
    )


def filled(n: int = 3, reports: int = 5) -> Board:
    """A board of n super learners, with a script in every text."""
    names = [f"node{i} {SCRIPT}, learner {i}" for i in range(n)]
    board = Board(names, {"script": SCRIPT, "averaging": "ring"})
    for k in range(reports):
        board.take({i: report(i, k) for i in range(n)})
    board.tables(0, {1: 7, 2: 5}, {0: 10, 1: 4})
    board.event(Event(1e9 + 2, "failed", 2, f"super learner 2 ({SCRIPT}): failed"))
    return board


@pytest.fixture(scope="module", autouse=True)
def unbounded() -> Iterator[None]:
    """These tests ask more often than viewers may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_BURST", 1e9)
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """A page that is open, on a free port; for tests that only ask."""
    yield from opened()


@pytest.fixture
def own() -> Iterator[Dashboard]:
    """A page of one test's own."""
    before = threading.active_count()
    yield from opened()
    assert threading.active_count() <= before, "its threads have ended"


def opened() -> Iterator[Dashboard]:
    page = Dashboard("127.0.0.1:0", TOKEN, filled())
    page.open()
    yield page
    page.close()


def get(
    page: Dashboard, path: str, token: str | None = TOKEN, headers: Mapping[str, str] = {}
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", page.address.port, timeout=60)
    try:
        query = "" if token is None else f"?token={token}"
        connection.request("GET", path + query, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def first_event(page: Dashboard) -> dict[str, Any]:
    """The first that a viewer is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", page.address.port, timeout=60)
    try:
        connection.request("GET", f"/events?token={TOKEN}")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("content-type", "").startswith(
            "text/event-"
        )
        line = answer.readline().decode()
        assert line.startswith("data: ")
        return dict(json.loads(line.removeprefix("data: ")))
    finally:
        connection.close()


# ---- where it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":8265", "127.0.0.1", 8265),
        ("node-1.cluster:80", "node-1.cluster", 80),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == (host, port)


@pytest.mark.parametrize("text", ["8265", "host", ":65536", "::1:80", "a b:1", ":-1", "h:1/x", ":"])
def test_what_is_no_address_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed is \[host\]:port .* Set it to :8265"):
        Address.parse(text)


def test_all_interfaces_are_told_by_the_name_of_the_host() -> None:
    assert Address("0.0.0.0", 1).url("a/b") == f"http://{socket.gethostname()}:1/?token=a%2Fb"
    assert Address("::1", 1).url("t") == "http://[::1]:1/?token=t"


def test_it_is_bound_to_the_loopback_interface_alone(served: Dashboard) -> None:
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{served.address.port:04X} 00000000:0000 0A" in listening
    assert f"00000000:{served.address.port:04X} 00000000:0000 0A" not in listening


def test_a_port_in_use_is_warned_about_once(own: Dashboard, caplog: Any) -> None:
    other = Dashboard(f":{own.address.port}", TOKEN, filled())
    other.open()
    other.open()
    assert not other.is_open
    (warning,) = [record.getMessage() for record in caplog.records if "no dashboard" in record.msg]
    assert f"port {own.address.port} (Address already in use)" in warning
    own.close()
    other.open()
    assert other.is_open
    other.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        dashboards.importlib.util,
        "find_spec",
        lambda name: None if name == "uvicorn" else found(name),
    )
    with pytest.raises(MissingRequirementError, match=r"uvicorn is not .*\[dashboard\]"):
        Dashboard(":0", None, filled())


def test_a_short_token_is_an_error_that_does_not_tell_it() -> None:
    with pytest.raises(ConfigError, match="has 6 characters") as error:
        Token("secret")
    assert "secret" not in str(error.value)
    assert len({Token().text for _ in range(3)}) == 3 and len(Token().text) >= 40


@pytest.mark.parametrize(
    "token",
    [
        "a-token-with-\udcff-bytes",
        "a-token-with-é-in-it",
        "a token with spaces",
        "0123456789abcdef\n",
    ],
)
def test_a_token_that_no_address_can_hold_is_an_error(token: str) -> None:
    with pytest.raises(ConfigError, match="no printable ASCII") as error:
        Token(token)
    assert token not in str(error.value)


def test_an_error_while_the_page_opens_ends_the_page_alone(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    page = Dashboard(":0", TOKEN, filled())
    for _ in range(2):
        page.open()
    assert not page.is_open and [r.levelname for r in caplog.records] == ["ERROR"]
    page.close()


def test_the_address_is_told_once(caplog: Any) -> None:
    page = Dashboard(":0", None, filled())
    page.open()
    page.open()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(f"http://127.0.0.1:{page.address.port}/?token={page.token.text}")
    page.close()


# ---- who may read it -----------------------------------------------------------------------------

PATHS = (
    "/",
    "/events",
    "/metrics",
    "/record",
    "/dashboard.js",
    "/style.css",
    "/grafana.json",
    "/nothing",
)


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "%FF%00", "é"])
def test_nothing_is_told_without_the_token(served: Dashboard, token: str | None) -> None:
    for path in PATHS:
        quoted = token if token is None else token.replace("é", "%C3%A9")
        status, headers, text = get(served, path, quoted)
        assert status == 403 and "token is missing or wrong" in text, path
        assert headers["content-security-policy"].startswith("default-src 'none'")


def test_the_token_may_be_a_header(served: Dashboard) -> None:
    assert get(served, "/metrics", None, {"Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert get(served, "/metrics", None, {"Authorization": "Bearer wrong"})[0] == 403
    assert get(served, "/metrics", None, {"Authorization": f"Basic {TOKEN}"})[0] == 403


def test_every_answer_has_the_policy(served: Dashboard) -> None:
    for path in set(PATHS) - {"/events"}:
        status, headers, _ = get(served, path)
        assert status == (404 if path == "/nothing" else 200), path
        policy = dict(
            part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert {policy[k] for k in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    ["/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/server.py", "/..\\x"],
)
def test_a_path_outside_is_not_found(served: Dashboard, path: str) -> None:
    status, _, text = get(served, path)
    assert status == 404 and "root:" not in text


def test_other_methods_are_refused(served: Dashboard) -> None:
    for method in ("POST", "PUT", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", served.address.port, timeout=60)
        connection.request(method, f"/?token={TOKEN}", body=b"x")
        assert connection.getresponse().status == 405
        connection.close()


# ---- what it withstands --------------------------------------------------------------------------


def raw(page: Dashboard, data: bytes) -> bytes:
    """All that is answered to some bytes."""
    with socket.create_connection(("127.0.0.1", page.address.port), timeout=60) as connection:
        try:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00" + bytes(range(256)),
    ],
    ids=["header", "path", "headers", "bytes"],
)
def test_huge_headers_and_other_bytes_are_refused(
    served: Dashboard, data: bytes, caplog: Any
) -> None:
    caplog.clear()
    answer = raw(served, data)
    assert not answer or re.match(rb"HTTP/1.1 4(00|31)", answer), answer[:200]
    assert get(served, "/")[0] == 200
    assert not caplog.records, "what strangers send is not for the log of the job"


def test_200_idle_connections_take_no_descriptors_and_keep_no_viewer_out(own: Dashboard) -> None:
    assert get(own, "/")[0] == 200
    before = descriptors()
    idle = []
    try:
        for _ in range(200):
            idle.append(socket.create_connection(("127.0.0.1", own.address.port), 30))
        assert get(own, "/")[0] == 200, "all that were before it have been accepted"
        assert descriptors() - before - len(idle) <= 64
    finally:
        for connection in idle:
            connection.close()
    wait_for(lambda: descriptors() <= before + 1, "every descriptor is given back")


def test_connections_that_are_too_many_per_second_are_closed_unread(
    monkeypatch: pytest.MonkeyPatch, own: Dashboard
) -> None:
    monkeypatch.setattr(server, "_PER_S", 0.0)
    monkeypatch.setattr(server, "_BURST", 3.0)
    page = Dashboard(":0", TOKEN, filled())
    page.open()
    assert [get(page, "/", "wrong")[0] for _ in range(3)] == [403] * 3
    for _ in range(100):
        with pytest.raises(OSError):
            get(page, "/")
    page.close()
    assert get(own, "/")[0] == 200


def test_a_bucket_fills_as_time_passes() -> None:
    bucket = server.Bucket(50.0, 100.0)
    assert [bucket.take(7.0) for _ in range(101)] == [True] * 100 + [False]
    assert [bucket.take(7.125) for _ in range(7)] == [True] * 6 + [False]
    assert [bucket.take(1000.0) for _ in range(101)] == [True] * 100 + [False]


@pytest.mark.parametrize("nbytes", [15_000, 17_000])
def test_headers_in_one_write_are_bounded_too(served: Dashboard, nbytes: int) -> None:
    start = f"GET /?token={TOKEN} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    answer = raw(served, start + b"X: yyyy\r\n" * (nbytes // 9) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200" if nbytes < 16_384 else b"HTTP/1.1 431"), answer[:100]


def test_metrics_are_made_once_for_many(monkeypatch: pytest.MonkeyPatch, own: Dashboard) -> None:
    made = []
    monkeypatch.setattr(server, "_AGAIN_S", 1e9)
    monkeypatch.setattr(server, "exposition", lambda *_: made.append(1) or (b"a 1\n", "text/plain"))
    for _ in range(3):
        assert get(own, "/metrics")[2] == "a 1\n"
    assert len(made) == 1


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_viewers_than_it_serves_are_refused(own: Dashboard) -> None:
    viewers = []
    for _ in range(32):
        viewer = http.client.HTTPConnection("127.0.0.1", own.address.port, timeout=60)
        viewer.request("GET", f"/events?token={TOKEN}")
        answer = viewer.getresponse()
        assert answer.status == 200
        viewers.append((viewer, answer))  # the answer holds the connection
    assert get(own, "/")[0] == 503
    for viewer, answer in viewers:
        answer.close()
        viewer.close()


@pytest.mark.extended
@pytest.mark.slow
def test_a_connection_without_a_request_is_closed(served: Dashboard) -> None:
    assert raw(served, b"GET / HTTP/1.1\r\n") == b""


# ---- what it shows -------------------------------------------------------------------------------


def test_all_texts_are_escaped(served: Dashboard) -> None:
    sent = "".join(first_event(served)["parts"].values())
    assert SCRIPT not in sent and "<script" not in sent and "<img" not in sent
    assert "&lt;script&gt;" in sent
    assert not re.search(r"(?i)<[^>]*\s(on\w+|style|href|src)=", re.sub(r'"[^"]*"', '""', sent))


def test_the_first_event_has_every_part(served: Dashboard) -> None:
    event = first_event(served)
    assert set(event["order"]) == set(event["parts"])
    text = "".join(event["parts"].values())
    for title in (
        "loss, over steps",
        "loss, over time",
        "consensus distance, over steps",
        "consensus distance, over time",
        "steps per second",
        "Who exchanges with whom",
        "Staleness of corrections",
        "Where the time goes",
        "Events",
    ):
        assert title in text, title


def test_the_newest_events_are_shown_newest_first() -> None:
    board = filled(1)
    for k in range(300):
        board.event(Event(1e9 + 10 + k, "alert", None, f"number {k}."))
    events = live(board.run(), 1e9)["events"]
    assert events.index("number 299.") < events.index("number 150.") and "number 1." not in events


def test_a_section_that_cannot_be_drawn_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from hvd_adpsgd.watching import page as pages

    monkeypatch.setattr(pages, "_told", set())
    monkeypatch.setattr(pages.svg, "heat_map", lambda *_: 1 / 0)
    monkeypatch.setattr(pages, "rows", lambda *_: [].pop())
    for _ in range(2):
        parts = live(filled().run(), 1e9)
    texts = [text for text in parts.values() if "cannot be drawn" in text]
    assert len(texts) == 2 and "ZeroDivisionError" in texts[1] and "IndexError" in parts["table"]
    for title in ("loss, over steps", "Staleness of corrections", "Events"):
        assert title in "".join(parts.values())
    assert len(caplog.records) == 2, "each is logged once"


def test_later_events_have_what_has_changed(own: Dashboard) -> None:
    board = own._board
    connection = http.client.HTTPConnection("127.0.0.1", own.address.port, timeout=60)
    connection.request("GET", f"/events?token={TOKEN}")
    answer = connection.getresponse()
    first = json.loads(answer.readline().removeprefix(b"data: "))
    assert answer.readline() == b"\n"
    board.event(Event(1e9 + 3, "joined", 2, "it is back"))
    later = json.loads(answer.readline().removeprefix(b"data: "))
    assert "it is back" in later["parts"]["events"]
    assert set(later["parts"]) < set(first["parts"])
    assert later["order"] == first["order"]
    connection.close()


def test_whose_tables_are_shown_is_said(served: Dashboard) -> None:
    text = "".join(first_event(served)["parts"].values())
    assert text.count("Of super learner 0 only") == 2


def test_tables_of_others_come_from_the_record(tmp_path: Path) -> None:
    record = Record(tmp_path, 1)
    record.report(1, report(1, 9), peers={0: 7, 2: 40404}, staleness={5: 3})
    record.close()
    page = Dashboard("127.0.0.1:0", TOKEN, filled(), str(tmp_path))
    page.open()
    text = "".join(first_event(page)["parts"].values())
    assert "1 with 2: 40404" in text and "Of super learner 0, 1 only" in text
    page.close()


def test_a_board_is_bounded_and_keeps_the_oldest_and_the_newest() -> None:
    board = filled(2, 5000)
    for track in board.run().tracks.values():
        assert 150 <= len(track.reports) <= 300
        assert track.reports[0].step < 200 and track.reports[-1].step == 10 * 4999
        times = [one.time_s for one in track.reports]
        assert times == sorted(set(times))
    for k in range(2000):
        board.event(Event(float(k), "alert", None, ""))
    assert len(board.run().events) == 500


def test_old_reports_are_not_taken_twice() -> None:
    board = filled(1, 3)
    board.take({0: report(0, 1)})
    board.take({0: report(0, 2)})
    assert [one.step for one in board.run().tracks[0].reports] == [0, 10, 20]


def test_warnings_and_states_are_events() -> None:
    """Warnings as such, but alerts once; a super learner that is replaced has joined."""
    from types import SimpleNamespace

    from hvd_adpsgd.engine.peers import PeerState
    from hvd_adpsgd.training import watching

    board = Board(["a", "b"], {})
    watcher: Any = watching.Watcher.__new__(watching.Watcher)
    watcher._board, watcher._record = board, None
    watcher._states, watcher._suspect = [PeerState.ALIVE, PeerState.ALIVE], {}
    watcher._ill = {}
    handler = watching._Warnings(board, 0)
    watching.logger.addHandler(handler)
    try:
        watching.logger.warning("the disk is %s", "full")
        watcher._warn(watching.Alert("slow", 1, "super learner 1 is slow"))
    finally:
        watching.logger.removeHandler(handler)
    for state in (PeerState.SUSPECT, PeerState.ALIVE, PeerState.FAILED, PeerState.ALIVE):
        membership = SimpleNamespace(states=[PeerState.ALIVE, state], names=["a", "b"])
        watcher._note_states(SimpleNamespace(membership=membership), 0.0)
    assert [(event.what, event.about) for event in board.run().events] == [
        ("warning", 0),
        ("alert", 1),
        ("suspect", 1),
        ("alive", 1),
        ("failed", 1),
        ("joined", 1),
    ]


# ---- Prometheus and Grafana ----------------------------------------------------------------------


def metrics(text: str) -> dict[str, list[Any]]:
    """Samples by name, as Prometheus reads them."""
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_metrics_are_those_of_the_reports(served: Dashboard) -> None:
    status, headers, text = get(served, "/metrics")
    found = metrics(text)
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    assert {s.labels["super_learner"]: s.value for s in found["hvd_adpsgd_steps_total"]} == {
        "0": 40.0,
        "1": 40.0,
        "2": 40.0,
    }
    scalars = {
        (s.labels["super_learner"], s.labels["name"]): s.value for s in found["hvd_adpsgd_scalar"]
    }
    assert scalars["1", "loss"] == pytest.approx(0.2) and scalars["1", SCRIPT] == 1.0
    pairs = {
        (s.labels["super_learner"], s.labels["peer"]): s.value
        for s in found["hvd_adpsgd_pair_exchanges_total"]
    }
    assert pairs == {("0", "1"): 7.0, ("0", "2"): 5.0}
    states = {s.labels["state"] for s in found["hvd_adpsgd_state"] if s.value == 1}
    assert states <= {"SILENT", "FAILED"} and states
    shares = [s.value for s in found["hvd_adpsgd_step_share"] if s.labels["super_learner"] == "0"]
    assert math.fsum(shares) == pytest.approx(1.0)


def test_the_grafana_dashboard_asks_for_metrics_that_exist(served: Dashboard) -> None:
    """Names and labels of every query; its layout as Grafana reads it."""
    found = metrics(get(served, "/metrics")[2])
    text = get(served, "/grafana.json")[2]
    assert text == GRAFANA.read_text()
    made = json.loads(text)
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


def test_the_grafana_dashboard_is_whole() -> None:
    made = json.loads(GRAFANA.read_text())
    assert made["title"] and made["uid"] and made["schemaVersion"] >= 36 and "id" not in made
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    variables = {variable["name"] for variable in made["templating"]["list"]}
    for panel in made["panels"]:
        box = panel["gridPos"]
        assert box["x"] >= 0 and box["x"] + box["w"] <= 24
        covered = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & covered, "panels lie over each other"
        cells |= covered
        assert panel["datasource"]["uid"] == "${datasource}"
        used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(panel)))
        assert used <= variables, panel["title"]


def test_metrics_of_an_empty_run() -> None:
    text, _ = exposition(Board(["a"], {}).run(), 0.0)
    assert b"hvd_adpsgd_steps" in text


# ---- in a browser --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "scheme", "paper"),
    [
        (1280, "light", "rgb(255, 255, 255)"),
        pytest.param(400, "dark", "rgb(13, 17, 23)", marks=pytest.mark.extended),
    ],
)
def test_in_a_browser(own: Dashboard, tmp_path: Path, width: int, scheme: str, paper: str) -> None:
    with browser(tmp_path) as page:
        page.show(own.address.url(TOKEN), width, 900, scheme)
        page.wait_for("document.querySelectorAll('svg').length >= 8")
        assert page.value("document.getElementById('status').textContent").startswith("live, ")
        assert page.value("document.title") == "hvd_adpsgd", "a logged script has run"
        assert page.value("document.querySelectorAll('main script, main img').length") == 0
        assert page.value("getComputedStyle(document.body).backgroundColor") == paper
        assert page.value("document.documentElement.scrollWidth") <= width
        lines = "[...document.querySelectorAll('.line')].every(e => getComputedStyle(e).stroke !== 'none')"
        assert page.value(lines), "the style is not applied"
        own._board.event(Event(1e9 + 4, "joined", 1, "seen at once"))
        page.wait_for("document.getElementById('events').textContent.includes('seen at once')")
        origin = f"http://127.0.0.1:{own.address.port}/"
        assert page.requests and all(url.startswith(origin) for url in page.requests)
        assert page.refused == []
        own.close()
        page.wait_for("document.getElementById('status').textContent.startsWith('No connection')")
        if width == 400:  # in one of the two: a browser pauses for seconds
            own.open()
            page.wait_for("document.getElementById('status').textContent.startsWith('live')")


def test_a_stopped_drawing_is_told_once(
    own: Dashboard, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from hvd_adpsgd.watching import page

    monkeypatch.setattr(page, "live", lambda run, now_s: 1 / 0)
    monkeypatch.setattr(server, "_PAUSE_S", 0.0)
    monkeypatch.setattr(server, "_REST", 0)
    caplog.set_level(logging.ERROR)
    for _ in range(2):
        event = first_event(own)
        assert event["order"] == ["head"] and "stands still" in event["parts"]["head"]
    assert len([r for r in caplog.records if "cannot be drawn" in r.getMessage()]) == 1


# ---- top, from another host ----------------------------------------------------------------------


def test_the_page_answers_its_run_as_lines_of_a_record(served: Dashboard) -> None:
    status, _, text = get(served, "/record")
    run, known = of_lines(text.splitlines()), filled().run()
    assert status == 200 and set(run.tracks) == set(known.tracks)
    for i, track in run.tracks.items():
        assert track.name == known.tracks[i].name
        assert track.reports == known.tracks[i].reports
    told = {(event.time_s, event.what, event.about) for event in known.events}
    assert (1e9 + 2, "failed", 2) in told
    assert {(event.time_s, event.what, event.about) for event in run.events} == told


def test_top_shows_a_run_from_its_page(
    served: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top.main(["--json", served.address.url(TOKEN)]) == 0
    found = json.loads(capsys.readouterr().out)["super_learners"]
    assert [row["super_learner"] for row in found] == sorted(filled().run().tracks)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:{port}/?token=wrong", "it answers 403"),
        ("http://127.0.0.1:1/?token=x", "refused"),
        ("http://", "no run at"),
        ("http://127.0.0.1:port/", "no run at"),
    ],
)
def test_top_without_a_page(
    served: Dashboard, capsys: pytest.CaptureFixture[str], url: str, why: str
) -> None:
    assert top.main(["--json", url.replace("{port}", str(served.address.port))]) == 2
    told = capsys.readouterr().err
    assert why in told and "Traceback" not in told and "wrong" not in told
