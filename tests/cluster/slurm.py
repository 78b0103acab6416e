"""Slurm on the hosts of a cluster: munged and slurmd on each, slurmctld on the last, which runs no job.

    with Cluster(4, ssh=False) as cluster, Slurm(cluster) as slurm:
        job = slurm.sbatch(["--nodes=3", "job.sh"], cwd=folder)
        slurm.wait_state(job, "COMPLETED")

Each compute host pretends to have CPUS cores and GPUS GPUs. Needs what Cluster needs, slurmctld, slurmd and
munged (Debian, Ubuntu: apt install slurmctld slurmd slurm-client munge); their services need not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvd_adpsgd_lab import machines
from hvd_adpsgd_lab.machines import Cluster

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
CPUS, GPUS = 32, 4  # of each compute host
DOWN_S = 10  # without an answer, after which slurmctld takes a node for lost
KILL_S = 8  # between SIGTERM and SIGKILL: more than a super learner takes to leave
LONGEST_S = 240.0  # of a wait for what must come
COMMAND_S = 600.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")

CONF = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
MpiDefault=pmi2
KillOnBadExit=1
WaitTime=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=1,bf_interval=2
ReturnToService=2
SlurmdTimeout={down_s}
KillWait={kill_s}
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={nodes} CPUs={cpus} CoresPerSocket={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=usual Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
{limits}
"""
# What Slurm waits for a machine that stalls.
PATIENT = "MessageTimeout=300\nTCPTimeout=100\nBatchStartTimeout=600\n"
PATIENT_DOWN_S = 600


class Slurm:
    """A Slurm on a cluster's hosts; as a context manager it is up inside.

    Args:
        cluster: is up; its last host becomes the controller.
        grace_s: between SIGTERM and the end of a job that a job of partition `urgent` preempts.
        patient: whether it waits minutes for a daemon that does not answer, lost nodes included.
    """

    def __init__(self, cluster: Cluster, *, grace_s: int = 0, patient: bool = False):
        assert cluster.folder is not None
        self.cluster, self.controller = cluster, cluster.hosts[-1]
        self.nodes = cluster.hosts[:-1]
        self.folder = cluster.folder / "slurm"
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._grace_s, self._patient, self._stack = grace_s, patient, contextlib.ExitStack()

    def __enter__(self) -> Slurm:
        self._write_files()
        try:
            for host in self.cluster.hosts:
                self.cluster.run(["mkdir", "-m", "755", "/run/munge", "/run/slurmd"], host=host)
                files = [f"--{kind}-file=/run/munged.{kind}" for kind in ("pid", "seed", "log")]
                self._start(host, "munged", "-F", f"--key-file={self.folder}/munge.key", *files)
                self.wait_for(lambda host=host: self._works(host, "munge", "-n"), "munged answers")
            self._start(self.controller, "slurmctld", "-D")
            self.wait_for(lambda: self._works(self.controller, "sinfo"), "slurmctld answers")
            for host in self.nodes:
                self.start_slurmd(host)
            self.wait_for(lambda: self.states() == ["idle"] * len(self.nodes), "all nodes are idle")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_slurmd(self, host: str) -> None:
        """Start a host's slurmd."""
        self._start(host, "slurmd", "-D", "-N", host)

    def restart(self, host: str) -> None:
        """End slurmd, the steps and their tasks on a host, and start slurmd again, as a reboot does."""
        self.cluster.run(["kill", "-KILL", *self._processes(host)], host=host)
        self.start_slurmd(host)

    def _processes(self, host: str) -> list[str]:
        """Ids, in the host, of Slurm's processes and its tasks: of all but the first and munged."""
        listed = ["ps", "axo", "pid,args"]
        done = self.cluster.run(listed, host=host, stdout=subprocess.PIPE, text=True)
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
        spared = ("sleep infinity", "munged", "ps axo")
        ours = [pid for pid, words in lines if not any(word in words for word in spared)]
        return [pid for pid in ours if pid != "1"]

    def sbatch(self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> int:
        """Submit a job: its number."""
        chdir = ["env", "-C", str(cwd), *(f"{name}={env[name]}" for name in env)]
        return int(self.run(*chdir, "sbatch", "--parsable", *arguments))

    def states(self) -> list[str]:
        """Of the nodes."""
        return self.run("sinfo", "-h", "-N", "-p", "usual", "-o", "%T").split()

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` prints of a job, or of an array's task such as 4711_0."""
        shown = self.run("scontrol", "show", "job", "-o", str(number))
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def scontrol(self, *arguments: str) -> str:
        """What scontrol prints."""
        return self.run("scontrol", *arguments)

    def scancel(self, *arguments: str) -> None:
        """Cancel, or signal, a job."""
        self.run("scancel", *arguments)

    def wait_state(self, number: int | str, *states: str) -> dict[str, str]:
        """Wait until a job has one of these states: what scontrol prints then."""
        self.wait_for(lambda: self.job(number)["JobState"] in states, f"job {number}: {states}",
                      lambda: str(self.job(number)))  # fmt: skip
        return self.job(number)

    def wait_for(
        self, condition: Callable[[], bool], what: str, report: Callable[[], str] = str
    ) -> None:
        """Wait for what must come.

        Raises:
            AssertionError: if it does not within LONGEST_S.
        """
        came = machines.comes(condition, LONGEST_S, 0.2)
        assert came, f"not in {LONGEST_S:g} s: {what}. {report()}"

    def _start(self, host: str, name: str, *arguments: str) -> None:
        command = [machines._tool(name), *arguments]
        env = {**os.environ, **self.env}
        with open(self.folder / f"{host}.{name}", "ab") as log:
            started = self.cluster.started(command, host=host, env=env, stdout=log, stderr=log)
            self._stack.enter_context(started)

    def _works(self, host: str, *command: str) -> bool:
        """Whether a command ends well."""
        done = self.cluster.run(
            command, host=host, env={**os.environ, **self.env}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=COMMAND_S,
        )  # fmt: skip
        return done.returncode == 0

    def run(self, *command: str) -> str:
        """Run a command on the controller: what it prints."""
        done = self.cluster.run(
            command, host=self.controller, env={**os.environ, **self.env}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return str(done.stdout)

    def _write_files(self) -> None:
        self.folder.mkdir()
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(1024))
        last = len(self.nodes)
        conf = CONF.format(
            folder=self.folder, controller=self.controller, nodes=f"node[1-{last}]", cpus=CPUS,
            gpus=GPUS, down_s=PATIENT_DOWN_S if self._patient else DOWN_S, kill_s=KILL_S,
            grace_s=self._grace_s, limits=PATIENT if self._patient else "",
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(conf)
        devices = f"NodeName=node[1-{last}] Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(devices)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for i in range(GPUS):  # slurmd wants devices
            _make_device(self.folder / f"gpu{i}")


def release() -> str:
    """Of the Slurm that is installed here, such as slurm-wlm 22.05.8."""
    return subprocess.run(
        [machines._tool("slurmctld"), "-V"], capture_output=True, text=True
    ).stdout


def unavailable() -> str | None:
    """Why no Slurm can be started here; None if it can."""
    for tool, package in TOOLS.items():
        if machines._find(tool) is None:
            return f"Slurm needs {tool} (Debian, Ubuntu: apt install {package})"
    return machines.unavailable(ssh=False) or _no_devices()


def _no_devices() -> str | None:
    """Why no device file can be made, such as in some containers; None if one can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_device(Path(folder) / "gpu")
        except OSError as error:
            return f"Slurm needs device files for its GPUs: {error.strerror}"
    return None


def _make_device(file: Path) -> None:
    """One like /dev/null."""
    os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 3))
