"""The survival probe: learners start under horovodrun, one kills itself, its peers continue."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_adpsgd.config import PREFIX
from hvd_adpsgd.tools.doctor.findings import ULFM_OPTIONS, Survival
from hvd_adpsgd.tools.doctor.probes import Answer, bounded, last_line, marked

# Every learner gives 1. One os.write per line, for learners share the pipe.
PROGRAM = """
import json, os, signal, torch
import hvd_adpsgd.torch as hvd

def say(**facts):
    os.write(1, ("\\n@doctor " + json.dumps(facts) + "\\n").encode())

def count(name):
    return int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name=name).item())

hvd.init()
torch.set_num_threads(1)
rank, last = hvd.rank(), hvd.size() - 1
say(rank=rank, together=count("together"))
hvd.barrier()
if rank == last:
    say(rank=rank, killed=True)
    os.kill(os.getpid(), signal.SIGKILL)
say(rank=rank, alive=count("alive"))
"""


def _options() -> dict[str, str | None]:
    """Two super learners, and no option of the user's: they are judged by themselves."""
    theirs = {name: None for name in os.environ if name.startswith(PREFIX)}
    return {**theirs, f"{PREFIX}SUPER_LEARNER_SIZE": "1", "OMP_NUM_THREADS": "1"}


def find_horovodrun() -> str | None:
    """The one beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("horovodrun")
    return str(beside) if beside.exists() else shutil.which("horovodrun")


def try_survival(seconds: float, switch_on: bool, hosts: Sequence[str] = ()) -> Survival:
    """Launch and see.

    Args:
        seconds: longest time.
        switch_on: give horovodrun the options for ULFM, which it does not set itself.
        hosts: where, one learner on each; fewer than two: two learners here.
    """
    n = max(2, len(hosts))
    horovodrun = find_horovodrun()
    if horovodrun is None:
        return Survival(n, False, False, None, 0.0, "no horovodrun beside this Python or on PATH")
    where = ["-H", ",".join(f"{host}:1" for host in hosts)] if len(hosts) > 1 else []
    options = list(ULFM_OPTIONS) if switch_on else []
    command = [horovodrun, "-np", str(n), *where, *options, sys.executable, "-c", PROGRAM]
    return read_survival(n, bounded(command, seconds, _options()))


def read_survival(n: int, answer: Answer) -> Survival:
    """Judge by what learner 0 of n said, not by the exit status: after a loss it is anything."""
    said = marked(answer.out)
    first = [facts for facts in said if facts.get("rank") == 0]
    return Survival(
        learners=n,
        together=any(facts.get("together") == n for facts in first),
        killed=any("killed" in facts for facts in said),
        alive=next((facts["alive"] for facts in first if "alive" in facts), None),
        seconds=answer.seconds,
        error=answer.error or _complaint(answer),
    )


def _complaint(answer: Answer) -> str:
    """The line that says most: of an exception if there is one, else the last."""
    lines = [line for line in answer.err.splitlines() if "Error" in line]
    words = lines[-1].strip() if lines else last_line(answer.err)
    return words or f"exit status {answer.status}"
