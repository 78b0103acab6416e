"""Drives a headless Chromium by its debugging pipe: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser.

    Args:
        to, back: the ends of the pipe, file descriptors.

    Attributes:
        requests: URLs that the page has asked for.
        refused: what its content-security policy has stopped, and errors of scripts.
    """

    def __init__(self, to: int, back: int):
        self._to, self._back, self._buffer, self._next = to, back, b"", 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.refused: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers; events that come first are noted."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._next:
                assert "result" in found, found
                return dict(found["result"])
            self._note(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._back, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Log.entryAdded" and params["entry"]["source"] == "security":
            self.refused.append(params["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.refused.append(json.dumps(params["exceptionDetails"]))

    def show(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a page in a window of that size, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """Poll a JavaScript expression until it is true."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            value = self.value(expression)
            if value:
                return value
            time.sleep(0.05)
        return pytest.fail(
            f"not in {seconds} s: {expression}; {self.value('document.body.innerText')}"
        )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a screenshot, of the window or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A headless Chromium with an empty profile; skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no Chromium: install the package chromium to look at pages in a browser")
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    # Chromium reads from descriptor 3 and writes to 4
    command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    with subprocess.Popen(
        ["bash", "-c", shell, "browser", *command],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(to, back)
        finally:
            process.kill()
            os.close(to)
            os.close(back)
