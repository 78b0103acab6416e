"""Hosts of a job: parses lists of hosts as Horovod does, and runs the doctor's checks on them over ssh."""

import ipaddress
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.lifecycle.threads import in_thread
from hvd_adpsgd.tools.doctor.findings import PACKAGES, Visit
from hvd_adpsgd.tools.doctor.probes import bounded, last_line, marked

CONNECT_S = 5
AT_ONCE = 32
_HOST = re.compile(r"[\w.-]+:[0-9]+")


class Host(NamedTuple):
    """Name of a host, and the number of learners (`slots`) that it shall run."""

    name: str
    slots: int


class Ssh(NamedTuple):
    """Port and identity file of ssh connections; None for ssh's default."""

    port: int | None = None
    identity: str | None = None


def read_hosts(text: str) -> list[Host]:
    """Return the hosts of a list like "node1:4,node2:4".

    Raises:
        ConfigError: if horovodrun would refuse the list.
    """
    return [_host(item.strip()) for item in text.split(",")]


def _host(item: str) -> Host:
    if not _HOST.fullmatch(item):
        raise ConfigError(
            f"-H: {item!r} is no NAME:SLOTS with a name of letters, digits, dots, dashes and "
            "underscores. Write for instance node1:4,node2:4."
        )
    name, _, slots = item.partition(":")
    return Host(name, int(slots))


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a file with lines like "node1 slots=4".

    Empty lines and comments are errors, because Horovod ends with an IndexError at such a line.

    Raises:
        ConfigError: if the file cannot be read, or horovodrun would refuse a line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"hostfile {path} cannot be read: {problem}. Name a file with a line NAME slots=N for "
            "each host."
        ) from None
    hosts = [_line(line, f"hostfile {path}, line {n}") for n, line in enumerate(lines, 1)]
    if not hosts:
        raise ConfigError(f"hostfile {path} is empty. Give it a line NAME slots=N for each host.")
    return hosts


def _line(line: str, where: str) -> Host:
    words, parts = line.split(), line.rstrip().split("=")
    if len(parts) < 2 or not _HOST.fullmatch(f"{words[0]}:{parts[1]}"):
        raise ConfigError(
            f"{where}: {line!r} is not NAME slots=N. Write every line so, and leave out comments "
            "and empty lines: horovodrun stops at them."
        )
    return Host(words[0], int(parts[1]))


def is_local(name: str, seconds: float = CONNECT_S) -> bool:
    """Return whether a name means this host; Horovod decides that by the address of the name."""
    if name in ("localhost", socket.gethostname()):
        return True
    address = _within(seconds, lambda: socket.gethostbyname(name))
    return address is not None and _is_own(address)


def _is_own(address: str) -> bool:
    """Return whether `address` belongs to this host: a socket can be bound to no other address."""
    if ipaddress.ip_address(address).is_unspecified:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _within(seconds: float, call: Callable[[], str]) -> str | None:
    """Return the result of call(); None if it fails or takes longer (a silent name server, say)."""
    try:
        return in_thread("hvd_adpsgd.doctor", call).result(seconds)
    except (OSError, UnicodeError):  # a TimeoutError is an OSError
        return None


_NAMES = tuple(PACKAGES)
# The check program: one line without an exclamation mark, which csh would expand.
_PROGRAM = (
    "import json,os,sys; from importlib import metadata as m; import hvd_adpsgd as h; "
    "s=os.statvfs('/dev/shm'); "
    "v={d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}; "
    "print('\\n@doctor '+json.dumps(dict(version=h.__version__, "
    f"packages={{n: v.get(n) for n in {_NAMES!r}}}, "
    "cores=len(os.sched_getaffinity(0)), free_bytes=s.f_bavail*s.f_frsize, "
    "daemon=os.path.exists(sys.argv[1]))))"
)


def remote_command(python: str, folder: str, pythonpath: str | None, daemon: str | None) -> str:
    """Return the command that runs the check program on another host; it looks for mpirun's `daemon` too."""
    return in_folder(folder, pythonpath, shlex.join([python, "-c", _PROGRAM, daemon or "/"]))


def in_folder(folder: str, pythonpath: str | None, command: str) -> str:
    """Return a command for ssh that runs a shell's command in a folder, if the other host has that one."""
    path = f"PYTHONPATH={shlex.quote(pythonpath)} " if pythonpath else ""
    return f"sh -c {shlex.quote(f'cd {shlex.quote(folder)} 2>/dev/null; {path}exec {command}')}"


def ssh_command(host: str, ssh: Ssh, remote: str, more: Sequence[str] = ()) -> list[str]:
    """Return an ssh command with Horovod's options (new host keys are accepted), which never prompts."""
    options = ["BatchMode=yes", "StrictHostKeyChecking=no", f"ConnectTimeout={CONNECT_S}", *more]
    command = ["ssh", *(word for option in options for word in ("-o", option))]
    command += ["-p", str(ssh.port)] if ssh.port is not None else []
    command += ["-i", ssh.identity] if ssh.identity is not None else []
    return [*command, host, remote]


def visit(host: Host, ssh: Ssh, remote: str, seconds: float) -> Visit:
    """Run `remote` (see remote_command) on a host, unless it is this host, for at most `seconds`."""
    if is_local(host.name):
        return Visit(host.name, host.slots, local=True)
    answer = bounded(ssh_command(host.name, ssh, remote), seconds)
    said = marked(answer.out)
    error = answer.error or last_line(answer.err)
    return Visit(host.name, host.slots, False, answer.status, said[-1] if said else None, error)


def visit_all(hosts: Sequence[Host], ssh: Ssh, remote: str, seconds: float) -> list[Visit]:
    """Run visit() once per host, on AT_ONCE hosts at a time; return the results in the order of `hosts`."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda host: visit(host, ssh, remote, seconds), dict.fromkeys(hosts)))
