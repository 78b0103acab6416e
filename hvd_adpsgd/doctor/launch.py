"""The survival probe: two learners start under horovodrun, one kills itself, one goes on."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from hvd_adpsgd.config import PREFIX
from hvd_adpsgd.doctor.findings import ULFM_OPTIONS, Survival
from hvd_adpsgd.doctor.probes import Answer, bounded, last_line, marked

__all__ = ["find_horovodrun", "try_survival"]

# Learner r gives 3 + r, so 7 is the sum of both and 3 that of learner 0 alone. One os.write per
# line, for learners share the pipe.
PROGRAM = """
import json, os, signal, torch
import hvd_adpsgd.torch as hvd

def say(**facts):
    os.write(1, ("\\n@doctor " + json.dumps(facts) + "\\n").encode())

hvd.init()
torch.set_num_threads(1)
rank = hvd.rank()
given = torch.tensor([3.0 + rank])
say(rank=rank, together=hvd.allreduce(given, op=hvd.Sum, name="together").item())
hvd.barrier()
if rank == 1:
    say(rank=rank, killed=True)
    os.kill(os.getpid(), signal.SIGKILL)
say(rank=rank, alone=hvd.allreduce(given, op=hvd.Sum, name="alone").item())
"""


def _knobs() -> dict[str, str | None]:
    """Two super learners, and no knob of the user's: they are judged by themselves."""
    theirs = {name: None for name in os.environ if name.startswith(PREFIX)}
    return {**theirs, f"{PREFIX}SUPER_LEARNER_SIZE": "1", "OMP_NUM_THREADS": "1"}


def find_horovodrun() -> str | None:
    """The one beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("horovodrun")
    return str(beside) if beside.exists() else shutil.which("horovodrun")


def try_survival(seconds: float, switch_on: bool) -> Survival:
    """Launch and see.

    Args:
        seconds: longest time.
        switch_on: give horovodrun the options for ULFM, which it does not set itself.
    """
    horovodrun = find_horovodrun()
    if horovodrun is None:
        return Survival(False, False, None, 0.0, "no horovodrun beside this Python or on PATH")
    options = list(ULFM_OPTIONS) if switch_on else []
    command = [horovodrun, "-np", "2", *options, sys.executable, "-c", PROGRAM]
    return read_survival(bounded(command, seconds, _knobs()))


def read_survival(answer: Answer) -> Survival:
    """Judge by what learners said, not by the exit status: after a loss it is anything."""
    said = marked(answer.out)
    alone = [facts["alone"] for facts in said if "alone" in facts and facts["rank"] == 0]
    return Survival(
        together=any(facts.get("together") == 7.0 and facts["rank"] == 0 for facts in said),
        killed=any("killed" in facts for facts in said),
        alone=alone[0] if alone else None,
        seconds=answer.seconds,
        error=answer.error or _complaint(answer),
    )


def _complaint(answer: Answer) -> str:
    """The line that says most: of an exception if there is one, else the last."""
    lines = [line for line in answer.err.splitlines() if "Error" in line]
    words = lines[-1].strip() if lines else last_line(answer.err)
    return words or f"exit status {answer.status}"
