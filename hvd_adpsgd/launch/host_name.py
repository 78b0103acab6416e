"""Whether this host knows its own name."""

from __future__ import annotations

import socket

__all__ = ["unresolved_host"]


def unresolved_host() -> str:
    """The name of this host if it has no IPv4 address, else "": Gloo looks it up, and ends the process."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return name
    return ""
