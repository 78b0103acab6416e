"""The address on which the dashboard of a run is served, and the token that a request must carry."""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from typing import NamedTuple
from urllib.parse import quote

from hvd_adpsgd.errors import ConfigError

__all__ = ["Address", "Token"]

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]*)):(\d{1,5})", re.ASCII)
_SHORTEST = 16  # fewest characters of a token
_BACKLOG = 32


class Address(NamedTuple):
    """Host and port on which the dashboard is served."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse [host]:port; without a host the address is on the loopback interface.

        Raises:
            ConfigError: if the text has another form, or the port is over 65535.
        """
        found = _ADDRESS.fullmatch(text.strip())
        if found is None or int(found[3]) > 65535:
            raise ConfigError(
                f"no dashboard: HVD_ADPSGD_DASHBOARD is {text!r}, allowed is [host]:port with a port of 0 to "
                "65535. Set it to :8265 for this host alone, 0.0.0.0:8265 for all its interfaces, or "
                "[::1]:8265 for an IPv6 address."
            )
        return cls(found[1] or found[2] or "127.0.0.1", int(found[3]))

    def listener(self) -> socket.socket:
        """Open a socket that listens on this address.

        Raises:
            OSError: if the socket cannot listen there, for instance because the port is in use.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server(self, family=family, backlog=_BACKLOG)

    def url(self, token: str) -> str:
        """Return the dashboard's URL, with this host's name if the dashboard listens on all interfaces."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/?token={quote(token, safe='')}"


class Token:
    """The secret that a request to the dashboard must carry.

    Args:
        given: the token, at least 16 characters of printable ASCII without spaces; None: a random token.

    Raises:
        ConfigError: for an unsuitable token. The message does not contain the token.
    """

    def __init__(self, given: str | None = None):
        if given is not None and len(given) < _SHORTEST:
            raise ConfigError(
                f"no dashboard: HVD_ADPSGD_DASHBOARD_TOKEN has {len(given)} characters, needed are at least "
                f"{_SHORTEST}. Set a longer one (openssl rand -hex 16), or none for a random one."
            )
        if given is not None and not all("!" <= character <= "~" for character in given):
            raise ConfigError(
                "no dashboard: HVD_ADPSGD_DASHBOARD_TOKEN has a space or a character that is no printable "
                "ASCII. Set one of letters and digits (openssl rand -hex 16), or none for a random one."
            )
        self.text = given if given is not None else secrets.token_urlsafe(32)

    def is_that(self, other: str) -> bool:
        """Whether `other` equals the token, in a time that does not depend on where the two differ."""
        return hmac.compare_digest(self.text.encode(), other.encode("utf-8", "replace"))
