"""Checks whether this environment is fit for training: one line per check, with the cure if it fails."""

import argparse
import dataclasses
import json
import os
import platform
import socket
import sys
from collections.abc import Generator, Iterator, Sequence

from hvd_adpsgd import __version__
from hvd_adpsgd.config import PREFIX, Config
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch.host_name import unresolved_host
from hvd_adpsgd.tools.doctor import findings, hosts, launch, probes
from hvd_adpsgd.tools.doctor.findings import FAIL, WARN, Finding

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if no check fails, 1 if one does, 130 after Ctrl-C."""
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("doctor: stopped", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    found: list[Finding] = []
    for finding in examine(args):
        found.append(finding)
        if not args.json:
            print(finding, flush=True)
    fit = all(finding.level != FAIL for finding in found)
    print(_as_json(found, fit) if args.json else _summary(found, fit))
    return 0 if fit else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hvd_adpsgd doctor", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE", help="hosts to check, as for horovodrun")
    where.add_argument("-H", "--hosts", metavar="NAME:N,...", help="hosts to check")
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="do not launch the test job")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit of one check; the launch gets twice that (default 60 s)",
    )
    return parser


def _as_json(found: Sequence[Finding], fit: bool) -> str:
    rows = [dataclasses.asdict(finding) for finding in found]
    return json.dumps({"version": __version__, "fit": fit, "findings": rows}, indent=1)


def _summary(found: Sequence[Finding], fit: bool) -> str:
    counts = {level: sum(f.level == level for f in found) for level in (FAIL, WARN)}
    if fit and not counts[WARN]:
        return f"fit: {len(found)} checks"
    return f"{'fit' if fit else 'NOT fit'}: {counts[FAIL]} FAIL, {counts[WARN]} warn"


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks; yield the Finding of each check as soon as it is known."""
    seconds = args.patience
    yield Finding(findings.OK, "python", f"{platform.python_version()}, {sys.executable}")
    packages = {name: probes.package_version(name) for name in findings.PACKAGES}
    config, problem = _config()
    inner = config.inner or ("horovod" if packages["horovod"] else "torch")
    for name, version in packages.items():
        yield findings.judge_package(name, version, inner)
    if problem is None and f"{PREFIX}AVERAGING" in os.environ:
        # `problem` stays None if hvd_adpsgd does not load
        problem = probes.ask(probes.SPEC, seconds).get("problem")
    yield findings.judge_options(sum(key.startswith(PREFIX) for key in os.environ), problem)
    yield findings.judge_host_name(socket.gethostname(), unresolved_host())
    ulfm = plain = False
    if inner == "torch":
        yield findings.judge_torch_inside(probes.ask(probes.TORCH, seconds))
    else:
        ulfm, plain = yield from _examine_mpi(seconds)
        yield findings.judge_horovod(probes.ask(probes.HOROVOD, seconds, probes.UNSTARTED))
    yield findings.judge_extension(probes.ask_extension(seconds, inner != "torch"))
    here = findings.Here(sys.executable, __version__, packages)
    reached = yield from _examine_machine(args, config, here)
    if args.quick:
        return
    survival = launch.try_survival(2 * seconds, ulfm and not plain, reached, inner)
    yield findings.judge_launch(survival, ulfm)


def _config() -> tuple[Config, str | None]:
    """Return the options of the environment, and None; or the defaults, and what is wrong with them."""
    try:
        return Config.from_environment(), None
    except ConfigError as error:
        return Config(), str(error)


def _examine_mpi(seconds: float) -> Generator[Finding, None, tuple[bool, bool]]:
    """Yield the findings about MPI, ULFM and what Horovod uses of them.

    Returns:
        whether ULFM is compiled into MPI, and whether a plain horovodrun switches ULFM on.
    """
    yield findings.judge_home(os.environ)
    mpirun, launcher = probes.mpirun_version(seconds)
    library = probes.ask(probes.LIBRARY, seconds, probes.UNSTARTED)
    yield findings.judge_mpi(mpirun, launcher, library)
    if "error" not in library:  # if mpi4py does not load, judge_mpi() has reported that
        yield findings.judge_threads(probes.ask(probes.THREADS, seconds), os.environ)
    info = probes.ompi_info(mpirun, seconds)
    yield findings.judge_ulfm_compiled(info)
    flags = probes.ask(probes.FLAGS, seconds)
    yield findings.judge_ulfm_on(flags)
    return info is not None and findings.has_ulfm(info), findings.switches_ulfm_on(flags)


def _examine_machine(
    args: argparse.Namespace, config: Config, here: findings.Here
) -> Generator[Finding, None, list[str]]:
    """Yield the findings about memory and cores of this host, and about the other hosts.

    Returns:
        names of the hosts on which learners may be started.
    """
    try:
        visits = _visits(args)
    except ConfigError as problem:
        visits = []
        yield findings.judge_problem("hosts", str(problem))
    learners = sum(visit.slots for visit in visits if visit.local) or None
    each = config.super_learner_size
    leaders = max(1, (learners or 1) // (each or learners or 1))
    yield findings.judge_memory(probes.shared_memory(), leaders, each == 1)
    yield findings.judge_cores(probes.usable_cores(), learners)
    reached = []
    for visit in visits:
        finding = findings.judge_host(visit, here)
        yield finding
        if finding.level != FAIL:
            reached.append(visit)
    return _different(reached)


def _different(visits: Sequence[findings.Visit]) -> list[str]:
    """Return the names of the hosts checked by ssh, each once; this host under its first name only."""
    local = [visit.host for visit in visits if visit.local][:1]
    return list(dict.fromkeys(v.host for v in visits if not v.local or v.host in local))


def _visits(args: argparse.Namespace) -> list[findings.Visit]:
    """Run the checks on each named host, by ssh; return an empty list if no host is named.

    Raises:
        ConfigError: if the hostfile or the list of hosts cannot be read.
    """
    if args.hostfile is None and args.hosts is None:
        return []
    named = hosts.read_hostfile(args.hostfile) if args.hostfile else hosts.read_hosts(args.hosts)
    ssh = hosts.Ssh(args.ssh_port, args.ssh_identity_file)
    remote = hosts.remote_command(
        sys.executable, os.getcwd(), os.environ.get("PYTHONPATH"), probes.mpi_daemon()
    )
    return hosts.visit_all(named, ssh, remote, args.patience)
