"""Super learners call hvd.admit(blocking=False) at steps of their own; one is stopped, another one killed.

The last super learner is slower. Super learner 1 stops itself after some steps: another one makes AHEAD
steps meanwhile, which ends the stop. Then super learner 2 kills itself, and a new one takes its place. With
--called super learner 1 stops when it is called to the meeting that is to let the new one in. With
--evaluates all average their models after every 5th call, too. When the new one has trained for some steps,
each ends at its own step. Files in --folder record who has stopped, joined and trained.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
import hvd_adpsgd.training.presence as presence
from hvd_adpsgd.joining.meetings import Meetings
from tests.mpi.programs.learner import say

NEW = "HVD_ADPSGD_JOIN" in os.environ
PAUSE_S, SLOW_S = 0.01, 0.05  # of a step
GIVES_UP_S = 150.0
AHEAD = 30  # steps


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.step, self.longest = args, 0, 0
        self.me = hvd.super_rank()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1000, 1, bias=False)
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.5)
        names = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(plain, named_parameters=names)
        self.ends = time.monotonic() + GIVES_UP_S

    def train(self) -> None:
        collected = count_collections()
        if self.args.called and self.me == 1:
            self.stop_when_called()
        if NEW:
            self.note("ready")
        calls = self.admit(0)
        if NEW:
            self.note("joined")
        while not self.is_over():
            for _ in range(2):
                self.make_step()
            if self.args.evaluates and calls % 5 == 4:  # an operation between the calls
                with hvd.averaged(self.model):
                    pass
            calls = self.admit(calls + 1)
        metrics = hvd.metrics()
        facts = {"rank": hvd.rank(), "super": self.me, "new": NEW, "steps": self.step}
        facts |= {"calls": calls, "size": hvd.size(), "exchanges": metrics["exchanges"]}
        facts["collections"] = len(collected)
        say(**facts)

    def admit(self, calls: int) -> int:
        return hvd.admit(self.model, self.optimizer, calls, blocking=False)

    def make_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 1000)).square().mean().backward()
        self.optimizer.step()
        self.step += 1
        time.sleep(SLOW_S if self.me == 0 else PAUSE_S)
        if NEW:
            if self.step == 20:
                self.note("trained")
            return
        stops_here = not (self.args.evaluates or self.args.called)
        if self.me == 1 and self.step == 20 and hvd.is_leader() and stops_here:
            self.stop()
        if self.me == 0 and self.told("stopped") and not self.told("ahead"):
            self.longest += 1
            if self.longest == AHEAD:
                self.note("ahead")
        dies = self.step >= 30 and (not stops_here or self.told("ahead"))
        if self.me == 2 and dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop_when_called(self) -> None:
        """Stop once when this leader is about to wait for the others in a meeting."""
        called = Meetings.called

        def called_and_stopped(*args: Any) -> Any:
            answer = called(*args)
            if args[0].waits and self.told("ready") and not self.told("stopped"):
                self.stop()
            return answer

        Meetings.called = called_and_stopped

    def stop(self) -> None:
        """SIGSTOP, until super learner 0 has made its steps."""
        wait = (
            f"until [ -e {self.args.folder}/ahead ]; do sleep 0.05; done; kill -CONT {os.getpid()}"
        )
        subprocess.Popen(["sh", "-c", wait], start_new_session=True)
        self.note("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)

    def is_over(self) -> bool:
        """Whether the new one has trained; all learners of a super learner get the same result."""
        late = time.monotonic() > self.ends
        if late:
            print("gives up", file=sys.stderr, flush=True)
        if self.args.evaluates:  # equally many operations on all
            ends = hvd.allreduce(torch.tensor([float(self.told("trained") or late)]), op=hvd.Max)
            return bool(ends.item())
        mine = torch.tensor([float(self.told("trained") or late)])
        return bool(hvd.allreduce(mine, op=hvd.Max, process_set=hvd.super_learner).item())

    def note(self, what: str) -> None:
        (self.args.folder / what).touch()

    def told(self, what: str) -> bool:
        return (self.args.folder / what).exists()


def count_collections() -> list[object]:
    """A list that grows with each full garbage collection of the library, whose optimizers admit is given."""
    found: list[object] = []
    collect = presence.gc.collect
    presence.gc.collect = lambda: found.append(None) or collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--called", action="store_true")
    parser.add_argument("--evaluates", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="LOG %(message)s")
    hvd.init()
    Run(args).train()


main()
