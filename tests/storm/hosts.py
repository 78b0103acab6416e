"""Hosts for a storm: network namespaces on a switch, whose links learners cut at events of the run.

Lighter than tests/cluster, without sshd: processes, /tmp and /dev/shm are the machine's own, and learners are
started in their host. A host ends with the process that has made it.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_S = 60.0
# bridges: a host that is cut off is on none, those of a partition on the other
SIDES = ("switch", "apart")
SWITCH = " && ".join(
    f"ip link add name {side} type bridge && ip link set {side} up" for side in SIDES
)
BOOT = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && ip link set lo up'
# $1: the switch's process, $2: seconds, $3: the bridge meanwhile, or nowhere; then hosts. Returns at once.
CUT = """#!/bin/sh
switch=$1; seconds=$2; side=$3; shift 3
move() { to=$1; shift; for host; do nsenter -t $switch --net ip link set $host $to; done; }
if [ $side = nowhere ]; then move nomaster "$@"; else move "master $side" "$@"; fi
(sleep $seconds; move "master switch" "$@") < /dev/null > /dev/null 2>&1 &
"""


def unavailable() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "hosts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    probe = ["unshare", "--net", "--uts", "--mount", "sh", "-c", SWITCH]
    done = _run(probe)
    return None if done.returncode == 0 else f"namespaces cannot be made: {done.stderr.strip()}"


def name(number: int) -> str:
    """Of a host."""
    return f"storm{number}"


def address(number: int) -> str:
    """Of a host."""
    return f"10.78.0.{number + 1}"


class Hosts:
    """Running hosts.

    Attributes:
        cut: command that cuts links, to be followed by seconds, a bridge or "nowhere", and hosts.
    """

    def __init__(self, n: int, folder: Path):
        self._holders: list[subprocess.Popen[bytes]] = []
        names = "\n".join(
            ["127.0.0.1 localhost", *(f"{address(i)} {name(i)}" for i in range(n)), ""]
        )
        (folder / "hosts").write_text(names)
        (folder / "cut").write_text(CUT)
        switch = self._hold(f"{SWITCH}", folder / "switch")
        self.cut = ["sh", str(folder / "cut"), str(switch)]
        for i in range(n):
            host = self._hold(
                BOOT, folder / name(i), "--uts", "--mount", words=[name(i), str(folder / "hosts")]
            )
            inside, outside = (
                ["nsenter", "-t", str(host), "--net"],
                ["nsenter", "-t", str(switch), "--net"],
            )
            pair = ["name", name(i), "type", "veth", "peer", "name", "eth0", "netns", str(host)]
            for command in (
                [*outside, "ip", "link", "add", *pair],
                [*outside, "ip", "link", "set", name(i), "master", SIDES[0], "up"],
                [*inside, "ip", "address", "add", f"{address(i)}/24", "dev", "eth0"],
                [*inside, "ip", "link", "set", "eth0", "up"],
            ):
                done = _run(command)
                assert done.returncode == 0, f"{command}: {done.stderr}"

    def _hold(
        self, boot: str, ready: Path, *namespaces: str, words: Sequence[str] = ("switch",)
    ) -> int:
        """A process that holds namespaces, made and ready."""
        program = f'{boot} && touch "{ready}" && exec sleep infinity'
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", *namespaces]
        holder = subprocess.Popen(
            [*command, "sh", "-c", program, *words],
            env={**os.environ, "PATH": PATH},
            stdin=subprocess.DEVNULL,
        )
        self._holders.append(holder)
        ends = time.monotonic() + START_S
        while not ready.exists():
            assert time.monotonic() < ends and holder.poll() is None, f"no host: {command}"
            time.sleep(0.01)
        return holder.pid

    def of(self, number: int) -> int:
        """The process that holds a host, for `enter`."""
        return self._holders[1 + number].pid

    def down(self) -> None:
        """End them, and their links with them."""
        for holder in self._holders:
            holder.kill()
            holder.wait()


@contextlib.contextmanager
def hosts(n: int, folder: Path) -> Iterator[Hosts]:
    """Running, and gone behind the block."""
    made = Hosts(n, folder)
    try:
        yield made
    finally:
        made.down()


def enter(holder: int) -> None:
    """From now on this process, which has one thread, is in a host."""
    folder, library = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{holder}/ns/{space}", os.O_RDONLY) for space in ("uts", "net", "mnt")]
    for space in spaces:
        if library.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    os.chdir(folder)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": PATH}
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=START_S, check=False
    )
