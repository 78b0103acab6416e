"""Several hosts on one machine: namespaces on a virtual switch, with sshd and names of their own.

A host is one process tree in namespaces of its own: network, host name, mounts, process ids. Its
first process is sshd, if wanted. The switch is a bridge in one more network namespace, so the
machine's own network, /etc/hosts, ~/.ssh, /run and /dev/shm are never touched, and two clusters
share nothing: both may call their hosts node1, node2, ... When a host's first process ends, the
kernel ends all others of the host and removes its link.

    with Cluster(2) as cluster:
        cluster.run(["horovodrun", "-np", "4", "-H", "node1:2,node2:2", "python", "x.py"])

Needs root, iproute2, util-linux and, but for `Cluster(2, ssh=False)`, sshd (Debian, Ubuntu: apt
install iproute2 openssh-server).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "hvd_adpsgd.cluster."
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
SSH_TOOLS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
MOST = 32  # hosts
START_S = 60.0  # for one host to answer
COMMAND_S = 240.0  # for ip, tc, nsenter, ssh-keygen
END_S = 60.0  # for the kernel to end a host

# The first program in a host: $1 is the cluster's folder, $2 the host's name, $3 sshd or nothing. Without
# sshd the shell stays, and reaps what has lost its parent.
BOOT = """
set -e
echo "$2" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mkdir -m 1777 /run/tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$1/hosts" /etc/hosts
if [ "$3" ]; then mount --bind "$1/ssh_config" /etc/ssh/ssh_config; fi
if [ -e /etc/nsswitch.conf ]; then mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf; fi
if [ -d ~/.ssh ]; then mount --bind "$1/empty" ~/.ssh; fi
ip link set lo up
if ! [ "$3" ]; then touch /run/booted; sleep infinity & wait; fi
exec "$3" -D -f "$1/sshd_config" -E "$1/$2.log"
"""
SWITCH = "set -e; ip link add name switch type bridge; ip link set switch up; exec sleep infinity"

SSHD = """
ListenAddress 0.0.0.0
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv TMPDIR=/run/tmp PATH={path}
"""
SSH = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 10
"""


class ClusterError(Exception):
    """A cluster cannot be made, or cannot do what was asked; one line with the cure."""


def unavailable(*, ssh: bool = True) -> str | None:
    """Why no cluster, with or without sshd, can be made here; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"a cluster needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"a cluster needs root, this is user {os.geteuid()}"
    for tool, package in {**TOOLS, **(SSH_TOOLS if ssh else {})}.items():
        if _find(tool) is None:
            return f"a cluster needs {tool} (Debian, Ubuntu: apt install {package})"
    probe = [
        _tool("unshare"), "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh",
        "-c", "ip link add name a0 type veth peer name a1 && ip link add name b0 type bridge",
    ]  # fmt: skip
    done = subprocess.run(probe, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        return f"namespaces cannot be made here: {' '.join(done.stderr.split())}"
    return None


class Cluster:
    """Hosts node1 ... nodeN, joined by a switch.

    As a context manager it is up inside, and down afterwards, also after an exception, SIGINT and
    SIGTERM; if this process is killed, the kernel ends the hosts.

    Args:
        n: number of hosts, 1 to 32.
        stays: whether the hosts outlive this process (the command line's `up`). Otherwise they end
            with the thread that calls `up`.
        ssh: whether sshd runs on each host.

    Raises:
        ClusterError: if n is out of range.
    """

    def __init__(self, n: int, *, stays: bool = False, ssh: bool = True):
        if not 1 <= n <= MOST:
            raise ClusterError(f"up: {n} hosts asked for, allowed are 1 to {MOST}.")
        self.hosts = [f"node{i + 1}" for i in range(n)]
        self.folder: Path | None = None
        self._stays, self._ssh = stays, ssh

    def __enter__(self) -> Cluster:
        self._restore = _end_on_sigterm()
        try:
            return self.up()
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.down()
        finally:
            self._restore()

    # ---- life

    def up(self) -> Cluster:
        """Start the switch and all hosts; back when each answers.

        Raises:
            ClusterError: if that cannot be done here; what had been made is removed.
        """
        reason = unavailable(ssh=self._ssh)
        if reason:
            raise ClusterError(f"up: {reason}.")
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._write_files()
            self._start("switch", ["sh", "-c", SWITCH], "--net")
            _wait(lambda: self._in("switch", "ip", "link", "show", "switch"), "the switch is up")
            for number, host in enumerate(self.hosts, 1):
                self._boot(number, host)
            for host in self.hosts:
                _wait(functools.partial(self._answers, host), f"{host} answers", START_S)
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End all hosts and remove every trace. Does nothing the second time."""
        if self.folder is None:
            return
        for name in [*self.hosts, "switch"]:
            self._end(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None

    @classmethod
    def found(cls, folder: Path) -> Cluster:
        """The cluster that lives in a folder.

        Raises:
            ClusterError: if there is none.
        """
        try:
            facts = json.loads((folder / "cluster.json").read_text())
        except (OSError, ValueError):
            raise ClusterError(f"no cluster lives in {folder}. Start one: up N.") from None
        cluster = cls(len(facts["hosts"]), stays=True)
        cluster.folder = folder
        return cluster

    def alive(self, host: str) -> bool:
        """Whether a host lives."""
        return self._pid(self._known(host)) is not None

    # ---- what may happen to hosts

    def shape(self, host: str, rate: str | None) -> None:
        """Limit a host's link, both ways, by a token bucket; None: no limit.

        Args:
            host: its name.
            rate: as tc writes it, bits per second: "100mbit", "1gbit".

        Raises:
            ClusterError: if there is no such host, or tc refuses the rate.
        """
        if rate is not None and not re.fullmatch(r"\d+(\.\d+)?(k|m|g)?bit", rate):
            raise ClusterError(f"shape: rate {rate!r}, allowed are rates as 100mbit or 1gbit.")
        self._living(host)
        for where, link in ((host, "eth0"), ("switch", host)):
            if rate is None:
                self._in(where, "tc", "qdisc", "del", "dev", link, "root")
                continue
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            if not self._in(where, "tc", "qdisc", "replace", "dev", link, *limit):
                raise ClusterError(f"shape: tc refuses the rate {rate} on {host}.")

    def thin(self, host: str, other: str, rate: str) -> None:
        """Limit what two hosts send to each other to a rate, as tc writes it; not together with `shape`.

        Raises:
            ClusterError: if there is no such host, or tc refuses.
        """
        for one in (host, other):
            self._living(one)
        for where, to in ((host, other), (other, host)):
            place = self.hosts.index(to) + 1
            one = f"1:{place:x}"
            link = ("dev", "eth0")
            # packets without a class are not limited
            self._in(where, "tc", "qdisc", "add", *link, "root", "handle", "1:", "htb")
            self._checked(where, "tc", "class", "replace", *link, "parent", "1:", "classid", one,
                          "htb", "rate", rate, "burst", "64kb")  # fmt: skip
            self._checked(where, "tc", "filter", "add", *link, "protocol", "ip", "parent", "1:",
                          "u32", "match", "ip", "dst", f"{_address(place)}/32", "flowid", one)  # fmt: skip

    def cut(self, host: str) -> None:
        """Take a host's cable out: nothing gets through, and nobody is told."""
        self._living(host)
        self._checked("switch", "ip", "link", "set", host, "nomaster")

    def cut_one_way(self, host: str, loses: str) -> None:
        """Let nothing through that a host sends, or that it is sent; for good.

        Args:
            host: its name.
            loses: "sent" or "received".
        """
        self._living(host)
        where, link = (host, "eth0") if loses == "sent" else ("switch", host)
        self._checked(where, "tc", "qdisc", "replace", "dev", link, "root", "pfifo", "limit", "0")
        self._checked(where, "ip", "link", "show", link)

    def heal(self, host: str) -> None:
        """Put a host's cable back."""
        self._living(host)
        self._checked("switch", "ip", "link", "set", host, "master", "switch")

    def kill(self, host: str, *, silently: bool = False) -> None:
        """End every process of a host by SIGKILL, Open MPI's daemon and sshd included.

        Args:
            host: its name.
            silently: take its cable out before, so that no connection is closed towards the others,
                as when the power fails.
        """
        self._living(host)
        if silently:
            self.cut(host)
        self._end(host)

    # ---- commands in hosts

    def run(
        self,
        command: Sequence[str],
        *,
        host: str = "node1",
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command in a host, and wait for it.

        Args:
            command: program and arguments.
            host: where.
            env: the environment; default this process's. TMPDIR is the host's own.
            timeout: seconds, after which SIGTERM, and SIGKILL 5 s later.
            options: of subprocess.Popen.

        Raises:
            ClusterError: if it is not done in time.
        """
        with self.started(command, host=host, env=env, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise ClusterError(f"run: not done after {timeout:g} s: {list(command)}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @contextlib.contextmanager
    def started(
        self,
        command: Sequence[str],
        *,
        host: str = "node1",
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Iterator[subprocess.Popen[Any]]:
        """A command under way in a host; ended when the block is left. Arguments as in `run`."""
        self._living(host)
        environment = {**(os.environ if env is None else env), "TMPDIR": "/run/tmp"}
        inside = [*self._enter(host), f"--wd={os.getcwd()}", *command]
        process = subprocess.Popen(inside, env=environment, start_new_session=True, **options)
        try:
            yield process
        finally:
            _end_group(process)

    # ---- how

    def _write_files(self) -> None:
        folder = self._where()
        (folder / "empty").mkdir()
        (folder / "cluster.json").write_text(
            json.dumps({"hosts": self.hosts, "owner": None if self._stays else os.getpid()})
        )
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/sbin:/usr/local/bin",
                                "/usr/sbin:/usr/bin:/sbin:/bin"])  # fmt: skip
        (folder / "sshd_config").write_text(SSHD.format(folder=folder, path=path))
        (folder / "ssh_config").write_text(SSH.format(folder=folder))
        names = [f"{_address(i)} {host}" for i, host in enumerate(self.hosts, 1)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        # no name server answers there, and each lookup of an address would wait for one
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        if self._ssh:
            key = [_tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
            _call(key, "up: ssh-keygen failed")

    def _boot(self, number: int, host: str) -> None:
        sshd = _tool("sshd") if self._ssh else ""
        program = ["sh", "-c", BOOT, "host", str(self._where()), host, sshd]
        self._start(host, program, "--net", "--uts", "--mount", "--mount-proc")
        pid = str(self._pid(host))
        pair = ["name", host, "type", "veth", "peer", "name", "eth0", "netns", pid]
        self._checked("switch", "ip", "link", "add", *pair)
        self._checked("switch", "ip", "link", "set", host, "master", "switch", "up")
        self._checked(host, "ip", "address", "add", f"{_address(number)}/24", "dev", "eth0")
        self._checked(host, "ip", "link", "set", "eth0", "up")

    def _start(self, name: str, program: Sequence[str], *namespaces: str) -> None:
        """Start a first process. The shell leaves its process id before it becomes unshare."""
        folder = self._where()
        bound = [] if self._stays else [_tool("setpriv"), "--pdeathsig", "KILL"]
        note = 'echo $$ > "$0.new"; mv "$0.new" "$0.pid"; exec "$@"'
        apart = [_tool("unshare"), "--pid", "--fork", "--kill-child", *namespaces]
        command = [*bound, "sh", "-c", note, str(folder / name), *apart, *program]
        with open(folder / f"{name}.err", "wb") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=err, stderr=err, start_new_session=True
            )
        threading.Thread(target=process.wait, daemon=True).start()  # no zombie is left
        _wait(lambda: self._pid(name) is not None, f"{name} starts")
        other = os.readlink("/proc/self/ns/net")
        _wait(lambda: self._namespace(name) not in (None, other), f"{name} is apart")

    def _namespace(self, name: str) -> str | None:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{self._pid(name)}/ns/net")
        return None

    def _unshare(self, name: str) -> int | None:
        """The process that holds a host, seen from outside; None if it is gone."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self._where() / f"{name}.pid").read_text())
            is_one = Path(f"/proc/{pid}/environ").read_bytes()  # empty of a zombie
            if is_one and any("unshare" in word for word in _words(pid)):
                return pid
        return None

    def _pid(self, name: str) -> int | None:
        """A host's first process; None if it is gone."""
        holder = self._unshare(name)
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0])
        return None

    def _end(self, name: str) -> None:
        holder, first = self._unshare(name), self._pid(name)
        for pid in (first, holder):  # the kernel ends all of a host with its first process
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _wait(lambda: not any(_lives(pid) for pid in (first, holder)), f"{name} ends", END_S)

    def _enter(self, name: str) -> list[str]:
        kinds = ["--net"] if name == "switch" else ["--net", "--uts", "--mount", "--pid"]
        return [_tool("nsenter"), f"--target={self._pid(name)}", *kinds]

    def _in(self, name: str, *command: str) -> bool:
        """Whether a command in a host, or the switch, ends well."""
        inside = [*self._enter(name), *command]
        done = subprocess.run(inside, capture_output=True, timeout=COMMAND_S, check=False)
        return done.returncode == 0

    def _checked(self, name: str, *command: str) -> None:
        _call([*self._enter(name), *command], f"{' '.join(command)} failed in {name}")

    def _answers(self, host: str) -> bool:
        if self._pid(host) is None:
            said = " ".join((self._where() / f"{host}.err").read_text().split())
            raise ClusterError(f"up: {host} did not start: {said}")
        if not self._ssh:
            return self._in(host, "test", "-e", "/run/booted")
        return self._in(self.hosts[0], "ssh", host, "true")

    def _where(self) -> Path:
        if self.folder is None:
            raise ClusterError("the cluster is down. Start it: up().")
        return self.folder

    def _known(self, host: str) -> str:
        if host not in self.hosts:
            raise ClusterError(f"no host {host!r}, there are {', '.join(self.hosts)}.")
        return host

    def _living(self, host: str) -> None:
        if not self.alive(host):
            raise ClusterError(f"{host} is dead. Start the cluster again: down, up N.")


def clusters() -> dict[Path, int | None]:
    """Folders of all clusters on this machine, with the process that each ends with (None: none)."""
    found = {}
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, ValueError):
            found[folder] = json.loads((folder / "cluster.json").read_text())["owner"]
    return found


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _tool(name: str) -> str:
    found = _find(name)
    assert found, name
    return found


def _call(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{what}: {' '.join(done.stderr.split())}")


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


def _lives(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait(condition: Callable[[], Any], what: str, seconds: float = COMMAND_S) -> None:
    if not comes(condition, seconds, 0.01):
        raise ClusterError(f"not in {seconds:g} s: {what}.")


def comes(condition: Callable[[], Any], seconds: float, pause: float) -> bool:
    """Wait for a condition: whether it comes in time. A question counts as a second at most, also in a stall.

    Args:
        condition: is asked again and again.
        seconds: to wait at most.
        pause: between two questions, in seconds.
    """
    waited, last = 0.0, time.monotonic()
    while not condition():
        now = time.monotonic()
        waited, last = waited + min(now - last, 1.0), now
        if waited > seconds:
            return False
        time.sleep(pause)
    return True


def _end_group(process: subprocess.Popen[Any]) -> None:
    """SIGTERM to the process group, SIGKILL 5 s later."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


def _end_on_sigterm() -> Callable[[], None]:
    """Let SIGTERM raise SystemExit, unless the program has a handler; returns how to undo it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return lambda: None

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    return lambda: void(signal.signal(signal.SIGTERM, signal.SIG_DFL))


def void(_: object) -> None:
    """Nothing, for callers that want no value."""
