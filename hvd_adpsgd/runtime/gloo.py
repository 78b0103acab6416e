"""Horovod over Gloo in one super learner, where no MPI joins the processes.

Each super learner has a Horovod world of its own: its leader runs Horovod's rendezvous server, and its
learners tell Horovod their places by the variables that `horovodrun --gloo` sets.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.interfaces import addresses, choose_address, interface_of, network_name
from hvd_adpsgd.runtime.sockets import Communicator

if TYPE_CHECKING:
    from hvd_adpsgd.runtime.world import World

__all__ = ["world_over_gloo"]

_server: Any = (
    None  # of the Horovod world that this process leads; Horovod may ask it until it shuts down
)


@contextlib.contextmanager
def world_over_gloo(world: World) -> Iterator[None]:
    """Inside, where Horovod starts and reads them, its variables say where its world meets."""
    variables = _variables(world, _meeting_place(world.inner, world.config))
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _meeting_place(inner: Communicator, config: Config) -> tuple[str, int, str]:
    """(address of the server, its port, interface of this learner)."""
    networks = inner.allgather((network_name(), addresses()))
    own = choose_address(config.nics, network_name(), networks)
    address, port = inner.bcast((own, _serve(inner.Get_size())) if inner.Get_rank() == 0 else None)
    return address, port, interface_of(own)


def _serve(size: int) -> int:
    """Start Horovod's rendezvous server for a world of `size`; its port."""
    global _server
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    _server = RendezvousServer()
    port = int(_server.start())
    _server.init(get_host_assignments(parse_hosts(f"{socket.gethostname()}:{size}"), size))
    return port


def _variables(world: World, place: tuple[str, int, str]) -> dict[str, str]:
    address, port, interface = place
    mine = [world.placements[rank] for rank in world.groups[world.super_rank]]
    hosts = sorted({placement.host for placement in mine})
    here = world.placements[world.rank].host
    on_host = [i for i, placement in enumerate(mine) if placement.host == here]
    numbers = {
        "RANK": world.inner_rank,
        "SIZE": world.inner_size,
        "LOCAL_RANK": on_host.index(world.inner_rank),
        "LOCAL_SIZE": len(on_host),
        "CROSS_RANK": hosts.index(here),
        "CROSS_SIZE": len(hosts),
        "GLOO_RENDEZVOUS_PORT": port,
    }
    words = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_IFACE": interface,
        "HOSTNAME": socket.gethostname(),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in (numbers | words).items()}
