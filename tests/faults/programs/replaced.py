"""Trains a float64 model with super learners that have failed, one after the other, and replaced.

The model of super learner k sets off with k + 1 everywhere and has a gradient of its own, so that
models differ. When all super learners train, the next of --victims kills itself; when all victims have been
replaced, all super learners train --after more epochs. Each learner says its facts.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.joining.admission as admission
import hvd_adpsgd.joining.joining as joining
import hvd_adpsgd.joining.reconnect as reconnect
import hvd_adpsgd.torch as hvd
from tests.mpi.programs.learner import say

NEW = "HVD_ADPSGD_JOIN" in os.environ
STEPS = 5
ELEMENTS = 1000
BREATHER_S = 0.01  # of a step, for which this machine has too few cores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--victims", default="", help="ranks, by comma; lost in this order")
    parser.add_argument("--after", type=int, default=6, help="epochs after the last replacement")
    parser.add_argument("--fails", default="", help="where a joining learner has failed")
    parser.add_argument("--exits", action="store_true", help="... by an exception")
    parser.add_argument("--stops", action="store_true", help="... by SIGSTOP")
    parser.add_argument(
        "--starter-fails", action="store_true", help="when all meet, the first time"
    )
    parser.add_argument("--member-fails", type=int, help="rank; when all meet, the first time")
    parser.add_argument("--fail-times", type=int, default=1, help="how many joining learners are")
    parser.add_argument("--patience-s", type=float, default=60.0)
    parser.add_argument("--reconnect-s", type=float, default=reconnect.RECONNECT_S)
    parser.add_argument("--seconds", type=float, default=170.0, help="then all give up")
    parser.add_argument("--alone", type=int, default=0, help="end after so many epochs without it")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="LOG %(relativeCreated)d %(message)s"
    )
    if NEW:
        fail(args, "start")
    admission.RECONNECT_S = joining.RECONNECT_S = args.reconnect_s
    hvd.init()
    Run(args).train()


def fail(args: argparse.Namespace, where: str) -> None:
    """The first joining learners that come here have failed; the files that they leave tell so."""
    for i in range(args.fail_times if args.fails == where else 0):
        if leaves(args.folder / f"failed{i}"):
            if args.exits:
                raise RuntimeError("a joining learner's script fails")
            if args.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            die()


def leaves(file: Path) -> bool:
    """Whether this process is the one that makes the file."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.victims = [int(v) for v in args.victims.split(",") if v]
        self.model = torch.nn.Linear(ELEMENTS, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.model.weight.fill_(hvd.super_rank() + 1.0)
        plain = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.optimizer = hvd.DistributedOptimizer(
            plain, named_parameters=self.model.named_parameters()
        )
        self.facts = {"rank": hvd.rank(), "size": hvd.size(), "new": NEW, "super": hvd.super_rank()}
        self.facts["host"] = socket.gethostname()
        self.ends = time.monotonic() + args.seconds
        self.slowest = 0.0

    def train(self) -> None:
        if NEW:
            fail(self.args, "wrapped")
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)  # as scripts do
        self.fail_at_reconnect()
        state = self.replace({"epoch": 0, "whole": 0, "alone": 0, "told": []})
        self.facts |= {"began": state["epoch"], "first": self.values()}
        if NEW:
            fail(self.args, "joined")
            saved = self.optimizer.state_dict()["state"]
            self.facts["momentum"] = [v["momentum_buffer"] is not None for v in saved.values()]
        while True:
            mean, alive = self.exact_mean()
            if state["told"]:
                state["told"][-1][1:] = [mean, alive]
            lost = sum((self.args.folder / f"lost{i}").exists() for i in range(len(self.victims)))
            whole = alive == list(range(hvd.super_size()))
            if whole and lost == len(self.victims):
                state["whole"] += 1
            state["alone"] += not whole
            if (state["whole"] > self.args.after and self.all_met()) or self.late():
                break
            if self.args.alone and state["alone"] > self.args.alone:
                break
            self.epoch()
            state["epoch"] += 1
            if whole and state["epoch"] % 4 == 3:
                self.lose_some(lost)
            state["told"].append([self.exact_mean()[0], 0.0, []])
            state = self.replace(state)
        self.facts |= state
        self.facts |= {"slowest_s": self.slowest, "peers": hvd.metrics()["peers"]}
        hvd.average_model(self.model)
        self.facts["last"] = self.values()
        self.facts["done"] = time.monotonic()
        say(**self.facts)

    def fail_at_reconnect(self) -> None:
        """Have a joining learner, or its starter, die before or just after all are connected."""
        meet = reconnect.connect_anew

        def failing(*args: Any, **kwargs: Any) -> Any:
            if NEW:
                fail(self.args, "reconnect")
            elif hvd.rank() == self.args.member_fails and leaves(self.args.folder / "member"):
                die()
            merged = meet(*args, **kwargs)
            if NEW:
                fail(self.args, "met")
            elif (
                self.args.starter_fails and hvd.rank() == 0 and leaves(self.args.folder / "starter")
            ):
                die()
            return merged

        reconnect.connect_anew = failing

    def epoch(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            drift = torch.full((1, ELEMENTS), 0.01 * (hvd.super_rank() + 1))
            self.model(drift.double()).sum().backward()
            self.optimizer.step()
            time.sleep(BREATHER_S)

    def replace(self, state: dict) -> dict:
        began = time.monotonic()
        state = hvd.admit(self.model, self.optimizer, state, patience_s=self.args.patience_s)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return state

    def values(self) -> list[float]:
        """Smallest and largest element of the model."""
        return [float(self.model.weight.detach().min()), float(self.model.weight.detach().max())]

    def exact_mean(self) -> tuple[float, list[int]]:
        """Of the super learners' models, which stay as they are; and the numbers of those that live."""
        began = time.monotonic()
        with hvd.averaging_paused():
            mine = (hvd.super_rank(), float(self.model.weight.detach().mean()))
            means = dict(hvd.allgather_object(mine))
        self.slowest = max(self.slowest, time.monotonic() - began)
        return sum(means.values()) / len(means), sorted(means)

    def all_met(self) -> bool:
        """Whether each leader has exchanged with each other one."""
        met = [n for i, n in enumerate(hvd.metrics()["peers"]) if i != hvd.super_rank()]
        return all(hvd.allgather_object(not hvd.is_leader() or not met or min(met) > 0))

    def late(self) -> bool:
        return any(hvd.allgather_object(not NEW and time.monotonic() > self.ends))

    def lose_some(self, lost: int) -> None:
        """The next victim, after `lost` of them."""
        if lost < len(self.victims):
            self.lose(self.victims[lost], self.args.folder / f"lost{lost}")

    def lose(self, rank: int, file: Path) -> None:
        """A victim dies; all see that it is about to."""
        if hvd.rank() == rank and leaves(file):
            die()
        while not file.exists():
            time.sleep(0.01)


main()
