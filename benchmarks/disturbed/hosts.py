"""Two hosts on one machine: network namespaces with a shaped link between them. Needs root.

Each host is a namespace with a host name of its own, so that MPI and Horovod take it for a host; the
only way from one to the other is a pair of virtual interfaces, whose rate is limited on both ends. Each
has a /dev/shm of its own, for engines that find each other there do not use the network. They share the
machine's cores, memory and file system otherwise. mpirun starts its daemon on the other host by a
script in place of ssh.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from speech.problem import Problem

from . import jobs

ADDRESSES = ("10.211.7.1", "10.211.7.2")
TICK_S = 0.01  # the bucket holds what the link carries meanwhile; timers must be finer than that
QUEUE_S = 0.05  # of data wait at most at an interface


def missing() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"needs {tool} (Debian, Ubuntu: apt install iproute2 util-linux)"
    trial = f"hvd{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"cannot make network namespaces: {made.stderr!r}"


class Hosts:
    """Two hosts, from `with` to its end."""

    def __init__(self) -> None:
        token = secrets.token_hex(3)
        self.names = [f"hvd{token}{end}" for end in "ab"]  # of namespaces, hosts, interfaces

    def __enter__(self) -> Hosts:
        self.folder = Path(tempfile.mkdtemp(prefix="hvd_adpsgd."))
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def shape(self, rate: float) -> None:
        """Let the link carry `rate` bit/s, each way."""
        burst = max(round(rate / 8 * TICK_S), 16_384)
        for name in self.names:
            _do(
                *("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", name, "root"),
                *("tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b"),
                *("latency", f"{1e3 * QUEUE_S:.0f}ms"),
            )

    def run(self, command: list[str], deadline_s: float, log: Path) -> None:
        """Run one learner on each host.

        Raises:
            Problem: if it fails or takes too long.
        """
        launcher = ["mpirun", *["--allow-run-as-root"] * (os.geteuid() == 0), "--with-ft", "ulfm"]
        launcher += ["--prtemca", "plm_ssh_agent", str(self.folder / "agent"), "--bind-to", "none"]
        launcher += ["-H", ",".join(f"{name}:1" for name in self.names), "-np", "2", "--tag-output"]
        launcher += ["-mca", "pml", "ob1", "-mca", "btl", "^openib"]  # as horovodrun does
        environment = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
        launcher += [word for name in environment for word in ("-x", name)]
        here = str(self.folder / "agent")
        jobs.run([here, self.names[0], shlex.join([*launcher, *command])], {}, deadline_s, log)

    def _up(self) -> None:
        lines = [f"{a} {n}" for a, n in zip(ADDRESSES, self.names, strict=True)]
        for name in self.names:
            _do("ip", "netns", "add", name)
            etc = Path("/etc/netns") / name  # stands for /etc/hosts in the namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        a, b = self.names
        _do("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                _do("ip", "-n", name, "link", "set", device, "up")
        agent = self.folder / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)

    def _down(self) -> None:
        for name in self.names:  # its interfaces go with it
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


# Called as ssh is: host, then words of a command for its shell. `ip netns exec` has given it mounts of its
# own, so that the one here is nobody else's.
AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts /bin/sh -c '
    hostname "$0" && mount -t tmpfs tmpfs /dev/shm && eval "$@"' "$host" "$@"
"""


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
