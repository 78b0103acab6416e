"""A cluster on this machine: python -m hvd_adpsgd_lab.machines up N | status | run -- COMMAND | ..."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hvd_adpsgd_lab.machines import Cluster, ClusterError, _end_on_sigterm, _lives, clusters


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    _end_on_sigterm()
    try:
        return int(args.act(args) or 0)
    except ClusterError as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hvd_adpsgd_lab.machines", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, act: object, about: str, *names: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=about, description=about)
        sub.set_defaults(act=act)
        for each in names:
            sub.add_argument(each)
        return sub

    verb("up", _up, "start hosts node1 ... nodeN").add_argument("n", type=int, metavar="N")
    verb("down", _down, "end the cluster, and what a killed program left behind")
    verb("status", _status, "list the hosts")
    verb("shape", _shape, "limit a link: 100mbit, 1gbit, off", "host", "rate")
    verb("cut", lambda a: _mine().cut(a.host), "take a host's cable out", "host")
    verb("heal", lambda a: _mine().heal(a.host), "put it back", "host")
    kill = verb("kill", _kill, "end every process of a host", "host")
    kill.add_argument("--silently", action="store_true", help="as when the power fails")
    run = verb("run", _run, "run a command in a host: run -- horovodrun -H node1:2,node2:2 ...")
    run.add_argument("--on", default="node1", help="the host (default: node1)")
    run.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    run.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _mine() -> Cluster:
    """The cluster of the command line."""
    staying = [folder for folder, owner in clusters().items() if owner is None]
    if not staying:
        raise ClusterError("no cluster is up. Start one: python -m hvd_adpsgd_lab.machines up N.")
    return Cluster.found(staying[0])


def _up(args: argparse.Namespace) -> None:
    staying = [folder for folder, owner in clusters().items() if owner is None]
    if staying:
        raise ClusterError(f"up: a cluster is up already, in {staying[0]}. End it first: down.")
    cluster = Cluster(args.n, stays=True).up()
    print(*cluster.hosts)


def _down(_: argparse.Namespace) -> None:
    for folder, owner in clusters().items():
        if owner is None or not _lives(owner):
            Cluster.found(folder).down()


def _status(_: argparse.Namespace) -> None:
    cluster = _mine()
    for host in cluster.hosts:
        print(host, "up" if cluster.alive(host) else "dead")


def _shape(args: argparse.Namespace) -> None:
    _mine().shape(args.host, None if args.rate == "off" else args.rate)


def _kill(args: argparse.Namespace) -> None:
    _mine().kill(args.host, silently=args.silently)


def _run(args: argparse.Namespace) -> int:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cluster = _mine()
    done = cluster.run(args.command, host=args.on, env=environment, timeout=args.timeout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
