"""Whether this host's own name resolves to an IPv4 address."""

import socket


def unresolved_host() -> str:
    """Return the name of this host if it has no IPv4 address, else "": Gloo would end the process."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return name
    return ""
