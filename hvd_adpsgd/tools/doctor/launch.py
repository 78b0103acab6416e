"""The doctor's test job: learners start, one kills itself, the others must continue."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_adpsgd.config import PREFIX
from hvd_adpsgd.tools.doctor.findings import ULFM_OPTIONS, Survival, asks_for_gloo
from hvd_adpsgd.tools.doctor.probes import Answer, bounded, last_line, marked

# The test job: each learner contributes 1 to a sum, so that the sum counts the learners. Each line is written
# by one os.write, because the learners share one pipe.
PROGRAM = """
import json, os, signal, torch
import hvd_adpsgd.torch as hvd

def say(**facts):
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(("\\n@doctor " + json.dumps(facts) + "\\n").encode())

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
    """Return the test job's variables: super learners of one learner; of the user's HVD_ADPSGD_* only INNER.

    judge_options() checks the user's options.
    """
    theirs = {k: None for k in os.environ if k.startswith(PREFIX) and k != f"{PREFIX}INNER"}
    return {**theirs, f"{PREFIX}SUPER_LEARNER_SIZE": "1", "OMP_NUM_THREADS": "1"}


def find_horovodrun() -> str | None:
    """Return the path of the horovodrun beside this Python, else of the first on PATH; None without one."""
    beside = Path(sys.executable).with_name("horovodrun")
    return str(beside) if beside.exists() else shutil.which("horovodrun")


def try_survival(
    seconds: float, switch_on: bool, hosts: Sequence[str] = (), inner: str = "horovod"
) -> Survival:
    """Launch the test job, whose last learner kills itself, and return how the job ended.

    Args:
        seconds: time limit of the job.
        switch_on: pass horovodrun the options that switch ULFM on, because it does not set them itself.
        hosts: hosts to start one learner on each; with fewer than two, two learners on this host.
        inner: "torch" launches by `python -m hvd_adpsgd run`, which needs neither MPI nor Horovod.
    """
    n, horovodrun = max(2, len(hosts)), find_horovodrun()
    options = ["-H", ",".join(f"{host}:1" for host in hosts)] if len(hosts) > 1 else []
    if inner == "torch":
        named, launcher = (
            "python -m hvd_adpsgd run -np",
            [sys.executable, "-m", "hvd_adpsgd", "run"],
        )
    elif horovodrun is None:
        return Survival(n, False, False, None, 0.0, "no horovodrun beside this Python or on PATH")
    else:
        named, launcher = Survival.launcher, [horovodrun]
        options += ["--gloo"] if asks_for_gloo(os.environ) else ULFM_OPTIONS if switch_on else []
    command = [*launcher, "-np", str(n), *options, sys.executable, "-c", PROGRAM]
    return parse_survival(n, bounded(command, seconds, _options()), named)


def parse_survival(n: int, answer: Answer, launcher: str = Survival.launcher) -> Survival:
    """Parse what learner 0 of the job with a killed learner has printed; its exit status says nothing."""
    said = marked(answer.out)
    first = [facts for facts in said if facts.get("rank") == 0]
    return Survival(
        learners=n,
        together=any(facts.get("together") == n for facts in first),
        killed=any("killed" in facts for facts in said),
        alive=next((facts["alive"] for facts in first if "alive" in facts), None),
        seconds=answer.seconds,
        error=answer.error or _complaint(answer),
        launcher=launcher,
    )


def _complaint(answer: Answer) -> str:
    """Return the last line of the test job's stderr that names an exception; without one, the last line."""
    lines = [line for line in answer.err.splitlines() if "Error" in line]
    words = lines[-1].strip() if lines else last_line(answer.err)
    return words or f"exit status {answer.status}"
