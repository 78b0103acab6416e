"""Trains a float64 model until --size super learners are there and --after epochs more; others join.

The model of super learner k begins with k + 1 everywhere. Each learner says its facts: the exact means of the
models before and after each hvd.admit that lets somebody in, with no step between the two.
"""

import argparse
import contextlib
import functools
import os
import signal
import time
from typing import Any

import torch

import hvd_adpsgd
import hvd_adpsgd.torch as hvd
from hvd_adpsgd.engine.handshake import Hello
from hvd_adpsgd.joining import admission, joining, listener, reconnect
from hvd_adpsgd.joining.join_state import JoinState
from tests.mpi.programs.learner import say

STEPS = 5


def mean(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, list[int], float]:
    """Of the super learners' models, the numbers of these, and the mean of their shared moments."""
    with hvd.averaging_paused():
        moment = optimizer.state.get(model.weight, {}).get("exp_avg", torch.zeros(1))
        mine = (hvd.super_rank(), (float(model.weight.detach().mean()), float(moment.mean())))
        means = dict(hvd.allgather_object(mine))
    sums = [sum(values) for values in zip(*means.values(), strict=True)]
    return sums[0] / len(means), sorted(means), sums[1] / len(means)


def averages() -> bool:
    """Whether this learner, if it is a leader, has averaged with others."""
    numbers = hvd.metrics()
    return not hvd.is_leader() or numbers["exchanges"] + numbers["means"] > 0


def epolls() -> int:
    """Sets of connections that are watched: descriptors of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            count += "eventpoll" in os.readlink(f"/proc/self/fd/{name}")
    return count


def unpicklable() -> Any:
    return lambda: None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_around(owner: Any, name: str, before: bool) -> None:
    """This process dies when it comes to a function of the library, or behind it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def dying(*args: Any, **kwargs: Any) -> Any:
        if not before:
            function(*args, **kwargs)
        die()

    setattr(owner, name, dying)


def die_at(moment: str) -> None:
    """Of coming in, one after the other."""
    if moment == "start":
        die()
    places = {
        "connected": (Hello, "answer", True),  # the listener waits for the proof
        "requested": (listener.Conversation, "send", False),  # its first word
        "invited": (listener.Conversation, "receive", False),
        "wrapped": (hvd, "on_membership_change", True),
        "ready": (joining.JoiningLearner, "ready", False),
        "reconnect": (reconnect, "connect_anew", True),
        "met": (reconnect, "connect_anew", False),
        "engines": (joining, "prepare", False),  # all have met, and know it
        "agreed": (joining.JoiningLearner, "verdict", True),
        "received": (JoinState, "give", True),
    }
    if moment in places:
        dies_around(*places[moment])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True, help="of super learners, in the end")
    parser.add_argument("--after", type=int, default=5)
    parser.add_argument("--averaging", default="random_pairs")
    parser.add_argument("--adamw", action="store_true", help="in place of SGD")
    parser.add_argument("--inputs", type=int, default=1000, help="of the model")
    parser.add_argument("--seconds", type=float, default=200.0, help="then all give up")
    parser.add_argument("--dies", default="", help="when: see die_at")
    parser.add_argument(
        "--dies-if-new", default="", help="the same, where this learner joins a job"
    )
    parser.add_argument(
        "--adds", action="store_true", help="a parameter group, before the first step"
    )
    parser.add_argument("--frozen", action="store_true", help="one more parameter, not trained")
    parser.add_argument("--reconnect-s", type=float, default=reconnect.RECONNECT_S)
    args = parser.parse_args()
    admission.RECONNECT_S = joining.RECONNECT_S = args.reconnect_s
    die_at(args.dies)
    if "HVD_ADPSGD_JOIN" in os.environ:
        die_at(args.dies_if_new)
    hvd.init()
    ends = time.monotonic() + args.seconds
    model = torch.nn.Linear(args.inputs, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(hvd.super_rank() + 1.0)
    if args.frozen:
        model.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if args.adamw
        else torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        named_parameters=model.named_parameters(),
        averaging=args.averaging,
    )
    if args.adds:
        bias = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer.add_param_group({"params": [bias]})
        bias.grad = torch.zeros_like(bias)
    changes: list[tuple[int, ...]] = []
    hvd.on_membership_change(changes.append)
    refused = ""
    if "HVD_ADPSGD_JOIN" not in os.environ:
        try:  # on one learner only
            hvd.admit(model, optimizer, os.getpid if hvd.rank() else unpicklable())
        except hvd_adpsgd.ConfigError as error:
            refused = str(error)
    state = hvd.admit(model, optimizer, {"epoch": 0, "after": 0, "before": None, "told": []})
    slowest_s, watched = 0.0, epolls()
    first = [float(model.weight.detach().min()), float(model.weight.detach().max())]
    while True:
        now = mean(model, optimizer)
        before = state["before"]
        if before is not None and len(before[1]) < len(now[1]):
            state["told"].append((state["epoch"], before, now))
        state["after"] += hvd.super_size() >= args.size
        late = time.monotonic() > ends
        told = hvd.allgather_object((state["after"] > args.after and averages(), late))
        if all(enough for enough, _ in told) or any(late for _, late in told):
            break
        for _ in range(STEPS):
            optimizer.zero_grad()
            drift = torch.full((1, args.inputs), 0.01 * (hvd.super_rank() + 1))
            model(drift.double()).sum().backward()
            optimizer.step()
            time.sleep(0.01)  # of a step, for which a machine may have too few cores
        state["epoch"] += 1
        state["before"] = mean(model, optimizer)
        began = time.monotonic()
        state = hvd.admit(model, optimizer, state)
        slowest_s = max(slowest_s, time.monotonic() - began)
    facts = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "super_size": hvd.super_size(),
        "new": "HVD_ADPSGD_JOIN" in os.environ,
        "first": first,
        "epoch": state["epoch"],
        "told": state["told"],
        "changes": changes,
        "refused": refused,
        "sum": hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item(),
        "slowest_s": slowest_s,
        "epolls": (watched, epolls()),
        "listener": hvd.listener(),
        "averagings": hvd.metrics()["exchanges"] + hvd.metrics()["means"],
    }
    say(**facts)


main()
