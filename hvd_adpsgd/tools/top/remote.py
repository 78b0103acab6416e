"""Fetches the newest part of a run's record from the run's live page."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit, urlunsplit

from hvd_adpsgd.errors import ConfigError

__all__ = ["fetched"]

_TIMEOUT_S = 10.0
_MOST_NBYTES = 32 << 20


def fetched(url: str) -> list[bytes]:
    """Return the lines of the record that the live page at `url` serves.

    Args:
        url: URL of the live page as the job has logged it, with its token.

    Raises:
        ConfigError: if no live page answers at `url`, or it refuses the token.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _none(url, str(error)) from error
    # No proxy: the token is for the live page alone.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        address = urlunsplit((parts.scheme, parts.netloc, "/record", parts.query, ""))
        with opener.open(address, timeout=_TIMEOUT_S) as answer:
            found: bytes = answer.read(_MOST_NBYTES)
    except urllib.error.HTTPError as error:
        raise _none(parts.netloc, f"it answers {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _none(parts.netloc, str(getattr(error, "reason", error))) from error
    return found.splitlines()


def _none(host: str, why: str) -> ConfigError:
    return ConfigError(
        f"no run at {host!r}: {why}. Pass the URL that the job has logged, with its token "
        "(HVD_ADPSGD_DASHBOARD)."
    )
