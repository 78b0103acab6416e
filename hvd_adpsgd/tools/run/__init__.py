"""Starts a job on one or several hosts, by ssh, without MPI: a learner that fails ends no other learner.

The exit status is 0 if every learner ended with status 0, left after SIGTERM, or was replaced; 75 if
learners failed and others trained to the end, or if all left; 128 + n if signal n ended this command.
Otherwise it is the status of the first learner that failed, 128 + n if signal n killed it.
"""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools.doctor.hosts import Host, Ssh, is_local, read_hostfile, read_hosts
from hvd_adpsgd.tools.run.job import Job, Learner
from hvd_adpsgd.tools.run.output import say

_LOOPBACK = re.compile(r"localhost$|127\.")
_USAGE = "python -m hvd_adpsgd run [-np N] [-H NAME:N,...] [--replace] train.py ARGS"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit with the status of the job; return 2 if the options are wrong."""
    args = _parser().parse_args(arguments)
    try:
        found = learners(_hosts(args), args.np)
        ssh = Ssh(args.ssh_port, args.ssh_identity_file)
        args.command = args.command[args.command[:1] == ["--"] :]
        if not args.command:
            raise ConfigError(f"no script to start. Name one: {_USAGE}.")
        python = [sys.executable] if args.command[0].endswith(".py") else []
        job = Job([*python, *args.command], found, address(found), ssh, args.replace)
    except ConfigError as error:
        say(str(error))
        return 2
    # a thread may wait for ever to write the output
    os._exit(asyncio.new_event_loop().run_until_complete(job.run()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd run", usage=_USAGE, description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("-np", type=int, metavar="N", help="number of learners (default: all slots of the hosts)")
    one = parser.add_mutually_exclusive_group().add_argument
    one("-H", "--hosts", metavar="NAME:N,...", help="hosts, and slots for learners on each")
    one("--hostfile", metavar="FILE", help="the same: a line NAME slots=N for each host")
    add("-p", "--ssh-port", type=int, metavar="PORT")
    add("-i", "--ssh-identity-file", metavar="FILE")
    add("--replace", action="store_true", help="start failed super learners anew, for hvd.admit")
    add("command", nargs=argparse.REMAINDER, metavar="train.py ARGS", help="a script or program")
    return parser


def _hosts(args: argparse.Namespace) -> list[Host]:
    if args.hostfile or args.hosts:
        return read_hostfile(args.hostfile) if args.hostfile else read_hosts(args.hosts)
    if args.np is None or args.np < 1:
        raise ConfigError("how many learners? Give -np 4, or hosts: -H node1:4,node2:4.")
    return [Host("localhost", args.np)]


def learners(hosts: Sequence[Host], np: int | None) -> list[Learner]:
    """Return `np` learners, by rank; None: in all slots of the hosts. The first hosts are filled first.

    If several names mean this host, all its learners get one, which other hosts know.
    """
    names = [host.name for host in hosts for _ in range(host.slots)]
    if np is not None and not 1 <= np <= len(names):
        raise ConfigError(
            f"-np {np}, allowed is 1 to {len(names)}, the slots of the hosts. Change -np, or the slots."
        )
    own = [name for name in dict.fromkeys(names[:np]) if is_local(name)]
    here = min(own, key=lambda name: bool(_LOOPBACK.match(name)), default="")
    names = [here if name in own else name for name in names[:np]]
    return [Learner(rank, name, name in own) for rank, name in enumerate(names)]


def address(found: Sequence[Learner]) -> str:
    """Return the address at which learner 0 serves the store: loopback if all learners are on this host."""
    first = found[0].host
    if all(learner.is_here for learner in found):
        return "127.0.0.1"
    if _LOOPBACK.match(first):
        raise ConfigError(
            f"other hosts connect to the first one, and there {first} means themselves. Write its name in "
            f"their network, for instance {os.uname().nodename}."
        )
    return first
