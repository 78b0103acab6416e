"""Starts Horovod over Gloo in a super learner, in jobs without MPI between the processes.

Each super learner has a Horovod world of its own: its leader runs Horovod's rendezvous server, and its
learners pass their ranks to Horovod in the variables that `horovodrun --gloo` sets.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.interfaces import addresses, choose_address, interface_of, network_name
from hvd_adpsgd.launch.inner_sockets import closed_in_children
from hvd_adpsgd.launch.processes import variables
from hvd_adpsgd.messaging.sockets import Communicator

if TYPE_CHECKING:
    from hvd_adpsgd.launch.world import World

_server: Any = None  # of a leader's Horovod, which may query it until it shuts down
_settings: dict[str, str] = {}  # HOROVOD_* variables set for Gloo; empty if Horovod runs over MPI


def variables_set() -> contextlib.AbstractContextManager[None]:
    """Context manager that sets HOROVOD_* variables, which Horovod reads whenever it makes a process set."""
    return variables(_settings)


@contextlib.contextmanager
def world_over_gloo(world: World) -> Iterator[None]:
    """Context manager in which Horovod starts over Gloo: sets HOROVOD_* variables."""
    global _settings
    _settings = _variables(world, _meeting_place(world.inner, world.config))
    with closed_in_children(), variables_set():
        yield


def _meeting_place(inner: Communicator, config: Config) -> tuple[str, int, str]:
    """Start the rendezvous server on the leader; return its address, its port, this learner's interface."""
    networks = inner.allgather((network_name(), addresses()))
    own = choose_address(config.nics, network_name(), networks)
    address, port = inner.bcast((own, _serve(inner.Get_size())) if inner.Get_rank() == 0 else None)
    return address, port, interface_of(own)


def _serve(size: int) -> int:
    """Start Horovod's rendezvous server for a world of `size` learners; return its port."""
    global _server
    if _server is not None:
        _server.stop()
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
        "GLOO_TIMEOUT_SECONDS": os.environ.get(
            "HOROVOD_GLOO_TIMEOUT_SECONDS", max(30, round(world.config.failure_timeout_s))
        ),
    }
    words = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_IFACE": interface,
        "HOSTNAME": socket.gethostname(),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in (numbers | words).items()}
