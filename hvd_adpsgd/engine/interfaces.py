"""Chooses the network address of this host to which other engines connect."""

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

from hvd_adpsgd.engine.shared_memory import host_name
from hvd_adpsgd.errors import TopologyError

LOOPBACK = "127.0.0.1"


def network_name() -> str:
    """An identifier of the network namespace, equal in all processes that share its loopback interface.

    Containers of one host share the kernel, and may each have a network namespace of their own. Virtual
    machines that were resumed from one snapshot share boot id and namespace number, so the host name counts.
    """
    return f"{host_name()}:{os.stat('/proc/self/ns/net').st_ino}"


def addresses() -> list[tuple[str, str]]:
    """(interface, address) for each interface that is up: IPv4 first, no loopback or link-local address."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        (name, address.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, of_interface in psutil.net_if_addrs().items()
        for address in of_interface
        if name in up and address.family == family
    ]
    return [(name, address) for name, address in found if _is_reachable(address)]


def _is_reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return not (ip.is_loopback or ip.is_link_local)


def choose_address(
    nics: str | None, here: str, known: Sequence[tuple[str, Sequence[tuple[str, str]]]]
) -> str:
    """Return the address on which this engine listens.

    With `nics`: the address of the first of these interfaces that has one. Without: loopback if all engines
    are on this host, else the address from which the system reaches the first other host, by the first of
    that host's addresses that no third host has too (container bridges have the same address on every host).

    Args:
        nics: names of interfaces, separated by commas; None: choose.
        here: this host's `network_name()`.
        known: for each engine, by rank: its `network_name()` and its `addresses()`.

    Raises:
        TopologyError: if no such address exists.
    """
    own = next(found for host, found in known if host == here)
    if nics is not None:
        return _of_interface([name.strip() for name in nics.split(",")], own)
    hosts = {host: [address for _, address in found] for host, found in known}
    others = [host for host in hosts if host != here and not _is_same(host, here, hosts)]
    if not others:
        return LOOPBACK
    for other in others:
        for address in hosts[other]:
            unique = sum(address in found for found in hosts.values()) == 1
            if unique and (source := _source_towards(address)):
                return source
    raise TopologyError(
        "no other host can be reached: none of their addresses "
        f"({', '.join(a for other in others for a in hosts[other]) or 'they have none'}) has a route from "
        "here. Name the interface that the hosts share in HVD_ADPSGD_NICS."
    )


def _is_same(one: str, other: str, hosts: dict[str, list[str]]) -> bool:
    """Whether two network names belong to containers that share a network, under host names of their own."""
    spaces = {(name.partition(":")[0], name.rpartition(":")[2]) for name in (one, other)}
    return len(spaces) == 1 and set(hosts[one]) == set(hosts[other])


def _of_interface(names: Sequence[str], own: Sequence[tuple[str, str]]) -> str:
    if "lo" in names:
        own = [*own, ("lo", LOOPBACK)]
    for name in names:
        for interface, address in own:
            if interface == name:
                return address
    has = ", ".join(dict.fromkeys(interface for interface, _ in own)) or "none that is up"
    raise TopologyError(
        f"HVD_ADPSGD_NICS={','.join(names)}: none of these interfaces is up and has an address on "
        f"{socket.gethostname()}, which has {has}. Name one of those."
    )


def interface_of(address: str) -> str:
    """The name of this host's interface that has `address`; empty if none has it."""
    for name, found in psutil.net_if_addrs().items():
        if address in (each.address for each in found):
            return str(name)
    return ""


def _source_towards(address: str) -> str | None:
    """Return this host's address from which the system would send to `address`; None without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a UDP connect sends no packet; it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return None
