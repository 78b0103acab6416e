"""Processes started without MPI: their environment variables, and what they report to the launcher."""

import contextlib
import json
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

PIPE = "ADPSGD_LAUNCHER_PIPE"  # path of the pipe to `python -m hvd_adpsgd run`
REPLACES_FAILED = "ADPSGD_LAUNCHER_REPLACES"  # set if that launcher replaces failed super learners
GIVEN = "ADPSGD_LAUNCHER_GIVEN"  # names of variables that are for this process, not for a job that it starts
ATTEMPTS = 3  # starts of a super learner that fail one after the other, after which it is given up
LIVES_S = 60.0  # one that has joined and lived for so long has not failed to start

_OF_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Variables with which a launcher gives a process its rank.
_OF_LAUNCHERS = re.compile(
    "|".join(_OF_TORCHRUN) + r"|(GROUP|ROLE)_(RANK|NAME|WORLD_SIZE)|TORCHELASTIC_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|STEP_.*)|(OMPI|PMI|PMIX|PRTE)_.*"
    r"|HOROVOD_(RANK|SIZE|CONTROLLER|CPU_OPERATIONS|HOSTNAME|(LOCAL|CROSS|GLOO)_.*)"
    f"|{GIVEN}|{PIPE}|ADPSGD_LEARNER(_PID)?"
)


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process without those that a launcher has set for it alone."""
    given = environ.get(GIVEN, "").split(",")
    return {k: v for k, v in environ.items() if not _OF_LAUNCHERS.fullmatch(k) and k not in given}


def environment(environ: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process to start: `given` for it alone, the others from `environ`."""
    return {**without_launchers(environ), **given, GIVEN: ",".join(given)}


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which this process has these environment variables; after it, those of before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def place(
    rank: int, size: int, local_rank: int, local_size: int, host: str, port: int
) -> dict[str, str]:
    """Return the variables that torchrun would set: ranks, and the store that rank 0 serves at `host`."""
    values = (rank, size, local_rank, local_size, host, port)
    return {name: str(value) for name, value in zip(_OF_TORCHRUN, values, strict=True)}


def is_replaced_by_launcher() -> bool:
    """Return whether the launcher, not hvd.admit, starts failed super learners of this job anew."""
    return REPLACES_FAILED in os.environ


def free_port(host: str = "") -> int:
    """Return a free TCP port below the ephemeral ones, which connections of other programs take."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(max(1024, low - 10_000), low), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"1000 TCP ports below {low} are all in use")


def notify_launcher(**facts: object) -> None:
    """Send facts to the launcher, if `python -m hvd_adpsgd run` has started this process; never raises."""
    with contextlib.suppress(OSError), open(os.environ.get(PIPE, ""), "ab", buffering=0) as pipe:
        pipe.write(json.dumps({"pid": os.getpid(), **facts}).encode() + b"\n")
