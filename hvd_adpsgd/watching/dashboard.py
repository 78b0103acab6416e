"""The dashboard of a run: opens and closes its web page, whose requests server.py answers."""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
from typing import TYPE_CHECKING

from hvd_adpsgd.errors import MissingRequirementError
from hvd_adpsgd.watching.access import Address, Token
from hvd_adpsgd.watching.board import Board

if TYPE_CHECKING:
    from hvd_adpsgd.watching.server import Server

__all__ = ["Dashboard"]

log = logging.getLogger("hvd_adpsgd")

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_END_S = 2.0


class Dashboard:
    """The dashboard's page on one leader; open while this leader is the first leader that has not ended.

    Args:
        address: [host]:port.
        token: see Token.
        board: the reports and events that the page shows.
        record: folder of the record, which holds the tables of the other super learners; None: no record.

    Raises:
        ConfigError: for a bad address or token.
        MissingRequirementError: if a package that serves the page is not installed.
    """

    def __init__(self, address: str, token: str | None, board: Board, record: str | None = None):
        self.address, self.token = Address.parse(address), Token(token)
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingRequirementError(
                f"no dashboard: HVD_ADPSGD_DASHBOARD is set and {', '.join(missing)} is not installed. Run: "
                "python -m pip install 'hvd_adpsgd[dashboard]', or unset it."
            )
        self._board, self._record = board, record
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._told = False
        self._broken = False

    @property
    def is_open(self) -> bool:
        return self._thread is not None

    def open(self) -> None:
        """Open the page, unless it is open; if the port is in use, warn once; a later call tries again."""
        if self.is_open or self._broken:
            return
        try:
            self._open()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Log the error and never open the page again; reports and the record continue."""
        self._broken = True
        log.error("the dashboard ends, training continues: %s", error, exc_info=True)

    def _open(self) -> None:
        try:
            listener = self.address.listener()
        except OSError as error:
            if not self._told:
                log.warning(
                    "no dashboard at %s port %d (%s). Training continues, and the address is tried again. "
                    "Free it, or set HVD_ADPSGD_DASHBOARD to another one.",
                    self.address.host,
                    self.address.port,
                    (error.strerror or str(error)).partition(" (while")[0],
                )
            self._told = True
            return
        self.address = Address(self.address.host, listener.getsockname()[1])
        self._over = threading.Event()
        thread = threading.Thread(
            target=self._serve,
            args=(listener, self._over),
            daemon=True,
            name="hvd_adpsgd.dashboard",
        )
        try:
            thread.start()
        except RuntimeError:  # the process has reached its limit of threads
            listener.close()
            raise
        self._thread = thread
        log.warning(
            "the dashboard of this run is on host %s: %s",
            socket.gethostname(),
            self.address.url(self.token.text),
            extra={"is_shown": True},  # so that this warning does not become an event on the page
        )

    def _serve(self, listener: socket.socket, over: threading.Event) -> None:
        """Serve until `over` is set.

        close() sets `over` and then stops the server; this thread makes the server and then checks `over`, so
        one of the two always ends it.
        """
        try:
            from hvd_adpsgd.watching.server import Server

            with listener:
                self._server = server = Server(self._board, self.token, self._record)
                if not over.is_set():
                    server.run(listener)
        except Exception as error:
            self._end(error)

    def close(self) -> None:
        """Close the page, which takes at most about 2 s; idempotent."""
        if self._thread is None:
            return
        self._over.set()
        if self._server is not None:
            self._server.stop()
        self._thread.join(_END_S)
        self._thread = self._server = None
