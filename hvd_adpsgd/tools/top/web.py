"""Serves the page of a run to browsers of this host, from the run's record."""

import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvd_adpsgd.errors import AdpsgdError, ConfigError
from hvd_adpsgd.tools.page import page, script
from hvd_adpsgd.watching.record import read

_EVERY_S = 10  # seconds after which a browser loads the page again
_SCRIPT = "/plotly.js"


def serve(folder: str, port: int) -> None:
    """Serve the page of the record in `folder` until Ctrl-C, on the loopback interface.

    Raises:
        ConfigError: if there is no record, or the port is in use.
        MissingRequirementError: if plotly is not installed.
    """
    with server(folder, port) as serving:
        print(f"http://localhost:{serving.server_port}/ (until Ctrl-C)", flush=True)
        serving.serve_forever()


def server(folder: str, port: int) -> ThreadingHTTPServer:
    """Return the server of the page, which listens; see `serve`."""
    read(folder)

    class Handler(_Handler):
        record, script = folder, script().encode()

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no page at port {port}: {error}. Pass a free one of 1 to 65535 with --web."
        ) from error


class _Handler(BaseHTTPRequestHandler):
    record: str
    script: bytes

    def do_GET(self) -> None:
        if self.path == _SCRIPT:
            self._answer(200, "text/javascript", self.script, "Cache-Control", "max-age=86400")
        elif self.path != "/":
            self.send_error(404)
        else:
            try:
                status, kind, text = 200, "text/html", page(read(self.record), time.time(), _SCRIPT)
            except AdpsgdError as error:
                status, kind, text = 503, "text/plain", str(error)
            self._answer(status, kind, text.encode(), "Refresh", str(_EVERY_S))

    def _answer(self, status: int, kind: str, body: bytes, *header: str) -> None:
        with suppress(ConnectionError):  # the browser has loaded another page
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return
