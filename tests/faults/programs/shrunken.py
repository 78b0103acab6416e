"""Super learners that train on without a learner that ends in the middle of training (HVD_ADPSGD_SHRINK=1).

    python shrunken.py --victims 1 --at backward --step 12

Each victim ends at a place of step --step, the second one --step steps later. All others train until every
leader has made --more exchanges after the last end. Then each says what it has; see `say_all`. Places:

forward, backward, update    of the step; `reduction`: when it is to reduce gradients that all have announced
half         when it has reduced all gradients of the step, but its mate --cut has not, and its leader has
exception    the script raises
anytime      up to SOON_S after the begin of the step, as --seed has it
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import signal
import threading
import time
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.inner.over_torch.transfers import Transfers
from hvd_adpsgd.training.survivors import _REDUCED

TOGETHER = 5  # steps between two operations over all learners
SOON_S, LATER = 0.02, 20  # LATER: steps in which a victim ends that ends so soon


class Probe(torch.nn.Module):
    """Two layers, and a number whose gradient is a hundredth of what `forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Linear(300, 8))
        self.number = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layers(x).square().mean() + 0.01 * factor * self.number


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--victims", required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", type=int, default=5, help="0: no other super learner is left")
    parser.add_argument("--cut", type=int, help="rank")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    model = Probe()
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.001),
    }
    optimizer = hvd.DistributedOptimizer(
        kinds[args.optimizer](model.parameters()),
        named_parameters=model.named_parameters(),
        exchanges_per_step=2.0,
    )
    Learner(args, model, optimizer).train()
    hvd.shutdown()


class Learner:
    """A learner, what it has seen, and when it ends."""

    def __init__(self, args: argparse.Namespace, model: Probe, optimizer: Any):
        self.model, self.optimizer, self.place = model, optimizer, args.at
        self.more = args.more
        victims = [int(rank) for rank in args.victims.split(",")]
        self.last = args.step * len(victims)  # step of the last end
        self.last += LATER if args.at == "anytime" else 0
        self.delay_s = random.Random(args.seed).uniform(0, SOON_S)
        self.end = args.step * (1 + victims.index(hvd.rank())) if hvd.rank() in victims else None
        self.cut = (
            args.step if hvd.rank() == args.cut else None
        )  # step in which its reduction fails
        self.reduced = 0  # elements in the step
        self.step, self.losses, self.steps = 0, [], 0
        self.first = self.parameters()
        self.local = torch.zeros_like(self.first)  # sum of the optimizer's own updates
        self.generator = torch.Generator().manual_seed(hvd.rank())
        optimizer.register_step_pre_hook(lambda *_: self.note(-1))
        optimizer.register_step_post_hook(lambda *_: self.note(1))
        model.layers[0].weight.register_hook(lambda grad: self.ends_in("backward"))
        self.watch_reductions()

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().double().reshape(-1) for p in self.model.parameters()])

    def note(self, sign: int) -> None:
        self.local += sign * self.parameters()
        self.steps += sign == 1
        if sign == -1:
            self.ends_in("update")

    def watch_reductions(self) -> None:
        """Let the victim end when it is to reduce gradients that all have announced, or when it has."""
        reduce = Transfers._reduce

        def reduced(transfers: Transfers, tensors: list[torch.Tensor], *how: Any) -> None:
            self.ends_in("reduction")
            reduce(transfers, tensors, *how)
            self.reduced += sum(tensor.numel() for tensor in tensors)
            if self.reduced == self.first.numel():
                self.reduced = 0
                self.ends_in("half")
                if self.step == self.cut:
                    self.fail_after_the_leader()

        Transfers._reduce = reduced  # type: ignore[method-assign]

    def fail_after_the_leader(self) -> None:
        """Fail in a reduction that has ended well for the leader."""
        its = self.optimizer._averaging.super_learner
        while its.survivors._rows[0, _REDUCED] <= its.mates.sets:
            time.sleep(1e-3)
        raise RuntimeError("a connection is cut")

    def ends_in(self, place: str) -> None:
        if place == self.place and self.step == self.end:
            os.kill(os.getpid(), signal.SIGKILL)

    def train(self) -> None:
        before = 0.0
        for self.step in itertools.count():
            if self.place == "exception" and self.step == self.end:
                raise ValueError("this learner ends")
            if self.place == "anytime" and self.step == self.end:
                threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self.ends_in("forward")
            self.optimizer.zero_grad()
            x = torch.randn(16, 64, generator=self.generator)
            loss = self.model(x, hvd.rank() + 1.0)
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            made = hvd.metrics()["exchanges"] if hvd.is_leader() else before + self.more
            if self.step == self.last + 1:
                before = made
            if self.step > self.last + 1 and self.step % TOGETHER == 0:
                done = made >= before + self.more
                if hvd.allreduce(torch.tensor(float(done)), op=hvd.Min):
                    break
        self.say_all()

    def say_all(self) -> None:
        if self.more:  # else it would start another super learner
            hvd.admit(self.model, self.optimizer)
            hvd.admit(self.model, self.optimizer, blocking=False)
        assert self.model.number.grad is not None
        grad = 100 * float(self.model.number.grad)
        with hvd.averaging_paused():
            mine = (hvd.is_leader(), self.parameters(), self.first + self.local)
            leaders = [its for its in hvd.allgather_object(mine) if its[0]]
            means = [torch.stack(each).mean(0) for each in list(zip(*leaders, strict=True))[1:]]
            state = self.optimizer.state_dict()["state"]
            tensors = [self.parameters(), *(v for s in state.values() for v in s.values())]
        say(
            rank=hvd.rank(),
            size=hvd.size(),
            failed=hvd.failed_ranks(),
            coordinator=hvd.is_coordinator(),
            iterations=self.step,
            steps=self.steps,
            finite=all(map(math.isfinite, self.losses)),
            grad=grad,
            drift=float((means[0] - means[1]).abs().max()),
            moved=float((means[0] - self.first).abs().max()),
            bits=hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest(),
        )


def say(**facts: Any) -> None:
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(("\n@learner " + json.dumps(facts) + "\n").encode())


if __name__ == "__main__":
    main()
