"""Answers HTTP requests for the dashboard: the page, its event stream, metrics. Needs starlette and uvicorn.

A request needs the token. The page is drawn once for all viewers, and only while there is a viewer; the pause
between two drawings is so long that drawing takes at most 1 % of a core. Connections
beyond 50 per second are closed unread, because training needs the core. Beyond 32 open connections the oldest
one without a request is closed, or if all have one, the new request is refused; beyond 64 open connections a
new one is closed unread, because training needs the file descriptors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import html
import json
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching import page
from hvd_adpsgd.watching.access import Token
from hvd_adpsgd.watching.board import Board
from hvd_adpsgd.watching.prometheus import exposition
from hvd_adpsgd.watching.record import Run, lines, read

__all__ = ["Server", "application"]

log = logging.getLogger("hvd_adpsgd")

_ANSWERED, _OPEN = 32, 64  # most connections that are answered, and that are open
_PER_S, _BURST = 50.0, 100.0  # connections that are read: per second, and at once after a pause
_CLOSED_AT_ONCE = 64  # connections closed unread before the server serves open ones again
_HEADERS_NBYTES = 16 << 10
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_REQUEST_S = 10.0  # longest time until the headers of a request are complete
_AGAIN_S = 1.0  # an answer of /metrics or /record is reused for this time
_NEWEST = 200  # reports of each super learner in /record
_PAUSE_S, _REST = (
    1.0,
    100,
)  # pause between two drawings: least seconds, and factor of the drawing's own time
_TAIL_NBYTES = 20_000  # bytes read from the end of each file of the record
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",  # one request per connection, so that no idle connection stays open
}
_SHELL = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hvd_adpsgd</title><link rel="stylesheet" href="style.css?token=TOKEN">
<script src="dashboard.js?token=TOKEN" defer></script></head><body>
<header id="head"><h1>A run</h1></header><p id="status" role="status">connecting</p>
<main><div id="table"></div><div id="charts" class="grid2"></div><div id="events"></div></main>
<noscript><p>This page needs JavaScript.</p></noscript></body></html>
"""
_STANDSTILL = "<h1>A run</h1><p class='fail'>An error of the library: this page stands still.</p>"
_STYLE = ".grid2 > div { min-width: 0; } #status { font-size: .85rem; } #status.fail { color: var(--bad); }"


class Server:
    """HTTP server of the dashboard on one listening socket.

    Args:
        board: the reports and events that are shown.
        token: the token that a request must carry.
        record: folder of the record, or None.
    """

    def __init__(self, board: Board, token: Token, record: str | None = None):
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                application(board, token, record),
                http=_Bounded,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="critical",  # requests of strangers must not fill the job's log
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_ANSWERED + 1,
                h11_max_incomplete_event_size=_HEADERS_NBYTES,
                timeout_graceful_shutdown=0,
            )
        )

    def run(self, listener: socket.socket) -> None:
        """Serve on `listener` until stop() is called, then close it."""
        self._uvicorn.run([_Listener(listener)])

    def stop(self) -> None:
        self._uvicorn.should_exit = True


class Bucket:
    """Token bucket that limits a rate.

    Args:
        per_s: tokens that are added per second.
        most: tokens at the beginning, and the most that the bucket holds.
    """

    def __init__(self, per_s: float, most: float):
        self._per_s, self._most = per_s, most
        self._tokens, self._at_s = most, math.inf

    def take(self, now_s: float) -> bool:
        """Take a token; return False if the bucket is empty.

        Args:
            now_s: time of a clock that is never set (time.monotonic).
        """
        grown = self._tokens + self._per_s * max(0.0, now_s - self._at_s)
        self._tokens, self._at_s = min(self._most, grown), now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class _Listener(socket.socket):
    """A listening socket, made from another one, that closes connections over the allowed rate unread.

    To close a connection unread takes a tenth of the time of reading and refusing its request.
    """

    def __init__(self, listener: socket.socket):
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self._bucket = Bucket(_PER_S, _BURST)

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(_CLOSED_AT_ONCE):
            connection, address = super().accept()
            if self._bucket.take(time.monotonic()):
                return connection, address
            connection.close()
        raise BlockingIOError  # more connections may wait in the queue; asyncio calls again


class _Bounded(H11Protocol):
    """An HTTP connection that is closed if too many are open, or if no request arrives within 10 s."""

    _nbytes = 0  # bytes received before the request was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began_s = self.loop.time()
        if len(self.connections) > _OPEN:
            transport.abort()
            return
        self.loop.call_later(_REQUEST_S, self._end_without_request)
        others = [one for one in self.connections if isinstance(one, _Bounded) and one is not self]
        idle = [one for one in others if one.is_idle]
        if len(others) >= _ANSWERED and idle:  # no viewers: a viewer's request follows at once
            oldest = min(idle, key=lambda one: one._began_s)
            self.connections.discard(oldest)
            oldest.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no complete request has arrived on this connection yet."""
        return self.conn.their_state is h11.IDLE

    def data_received(self, data: bytes) -> None:
        if self.is_idle:
            self._nbytes += len(data)
            if self._nbytes > _HEADERS_NBYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return
        super().data_received(data)

    def _end_without_request(self) -> None:
        if self.is_idle:
            self.transport.abort()


def application(board: Board, token: Token, record: str | None = None) -> ASGIApp:
    """Return the dashboard as an ASGI application; the arguments are those of Server."""
    drawing = _Drawing(board, record)
    here = Path(__file__).parent
    script = (here / "dashboard.js").read_text("utf-8")
    grafana = (here / "grafana.json").read_text("utf-8")
    shell = _SHELL.replace("TOKEN", html.escape(quote(token.text, safe="")))

    async def metrics(_: Request) -> Response:
        text, kind = await drawing.metrics()
        return Response(text, headers={"content-type": kind})

    async def newest(_: Request) -> Response:
        text, kind = await drawing.newest()
        return Response(text, headers={"content-type": kind})

    async def events(_: Request) -> Response:
        return StreamingResponse(drawing.stream(), media_type="text/event-stream")

    def fixed(path: str, text: str, kind: str) -> Route:
        async def answer(_: Request) -> Response:
            return Response(text, media_type=kind)

        return Route(path, answer)

    routes = [
        fixed("/", shell, "text/html"),
        fixed("/dashboard.js", script, "text/javascript"),
        fixed("/style.css", page.style() + _STYLE, "text/css"),
        fixed("/grafana.json", grafana, "application/json"),
        Route("/events", events),
        Route("/metrics", metrics),
        Route("/record", newest),
    ]
    return _Guard(Starlette(routes=routes), token)


class _Guard:
    """ASGI wrapper that refuses requests without the token, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, token: Token):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._app if self._permits(Request(scope)) else _REFUSAL
        await app(scope, receive, send_with_headers)

    def _permits(self, request: Request) -> bool:
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._token.is_that(bearer.strip()):
            return True
        return self._token.is_that(request.query_params.get("token", ""))


_REFUSAL = PlainTextResponse(
    "The token is missing or wrong: the log of the job has the whole address.\n", 403
)


class _Drawing:
    """Draws the parts of the page, metrics and record lines, once for all viewers."""

    def __init__(self, board: Board, record: str | None):
        self._board, self._record = board, record
        self._parts: dict[str, str] = {}
        self._next_s, self._pause_s = 0.0, _PAUSE_S
        self._made: dict[str, tuple[float, tuple[bytes, str]]] = {}  # (time, answer) by name
        self._lock = asyncio.Lock()
        self._told = False  # whether an error in drawing was logged

    def run(self) -> Run:
        """Return the board's run, with the other super learners' exchanges by peer read from the record."""
        run = self._board.run()
        if self._record is None:
            return run
        try:
            recorded = read(self._record, _TAIL_NBYTES)
        except (ConfigError, OSError):
            return run
        others = recorded.tracks
        run.events += [event for event in recorded.events if event.what == "joining"]
        run.events.sort(key=lambda event: event.time_s)
        for i, track in run.tracks.items():
            other = others.get(i)
            if other and other.reports and other.reports[-1].time_s >= track.reports[0].time_s:
                peers, staleness = track.peers or other.peers, track.staleness or other.staleness
                run.tracks[i] = dataclasses.replace(track, peers=peers, staleness=staleness)
        return run

    async def parts(self) -> dict[str, str]:
        """Return the parts of the page as HTML, by name; they are drawn again only after a pause."""
        async with self._lock:
            if time.monotonic() >= self._next_s:
                self._parts = await asyncio.to_thread(self._draw)
        return self._parts

    async def metrics(self) -> tuple[bytes, str]:
        """Return the metrics for Prometheus, and their content type."""
        return await self._lately("metrics", lambda: exposition(self.run(), time.time()))

    async def newest(self) -> tuple[bytes, str]:
        """Return the newest reports and the events as lines of a record, and their content type."""
        return await self._lately("record", self._lines)

    def _lines(self) -> tuple[bytes, str]:
        text = "".join(line + "\n" for line in lines(self.run(), _NEWEST))
        return text.encode(), "application/x-ndjson"

    async def _lately(self, name: str, make: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
        """Return make(), or its last result under this name if that is less than a second old."""
        async with self._lock:
            made_s, found = self._made.get(name, (-math.inf, (b"", "")))
            if time.monotonic() >= made_s + _AGAIN_S:
                found = await asyncio.to_thread(make)
                self._made[name] = time.monotonic(), found
        return found

    def _draw(self) -> dict[str, str]:
        began, parts = time.thread_time(), self._parts
        try:
            parts = page.live(self.run(), time.time())
        except Exception as error:
            parts = {**parts, "head": _STANDSTILL}
            if not self._told:
                log.error("the dashboard cannot be drawn: %s", error, exc_info=True)
            self._told = True
        self._pause_s = max(_PAUSE_S, _REST * (time.thread_time() - began))
        self._next_s = time.monotonic() + self._pause_s
        return parts

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events for one viewer: the parts of the page that have changed, as JSON."""
        sent: dict[str, str] = {}
        while True:
            parts = await self.parts()
            changed = {name: text for name, text in parts.items() if sent.get(name) != text}
            yield f"data: {json.dumps({'order': list(parts), 'parts': changed})}\n\n"
            sent = parts
            await asyncio.sleep(max(0.1, self._next_s - time.monotonic()))
