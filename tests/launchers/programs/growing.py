"""Trains a float64 model until --size super learners are there and --after epochs more; others join.

The model of super learner k begins with k + 1 everywhere. Each learner says its facts: the exact means of the
models before and after each hvd.admit that lets somebody in, with no step between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch

import hvd_adpsgd.torch as hvd

STEPS = 5


def mean(model: torch.nn.Module) -> tuple[float, list[int]]:
    """Of the super learners' models, and the numbers of these."""
    with hvd.averaging_paused():
        mine = (hvd.super_rank(), float(model.weight.detach().mean()))
        means = dict(hvd.allgather_object(mine))
    return sum(means.values()) / len(means), sorted(means)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True, help="of super learners, in the end")
    parser.add_argument("--after", type=int, default=5)
    parser.add_argument("--averaging", default="random_pairs")
    parser.add_argument("--inputs", type=int, default=1000, help="of the model")
    parser.add_argument("--seconds", type=float, default=60.0, help="then all give up")
    args = parser.parse_args()
    hvd.init()
    ends = time.monotonic() + args.seconds
    model = torch.nn.Linear(args.inputs, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(hvd.super_rank() + 1.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        named_parameters=model.named_parameters(),
        averaging=args.averaging,
    )
    changes: list[tuple[int, ...]] = []
    hvd.on_membership_change(changes.append)
    state = hvd.admit(model, optimizer, {"epoch": 0, "after": 0, "before": None, "told": []})
    first = [float(model.weight.detach().min()), float(model.weight.detach().max())]
    while True:
        now = mean(model)
        before = state["before"]
        if before is not None and len(before[1]) < len(now[1]):
            state["told"].append((state["epoch"], before, now))
        state["after"] += hvd.super_size() >= args.size
        if any(hvd.allgather_object(state["after"] > args.after or time.monotonic() > ends)):
            break
        for _ in range(STEPS):
            optimizer.zero_grad()
            drift = torch.full((1, args.inputs), 0.01 * (hvd.super_rank() + 1))
            model(drift.double()).sum().backward()
            optimizer.step()
            time.sleep(0.01)  # of a step, for which a machine may have too few cores
        state["epoch"] += 1
        state["before"] = mean(model)
        state = hvd.admit(model, optimizer, state)
    facts = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "super_size": hvd.super_size(),
        "new": "HVD_ADPSGD_JOIN" in os.environ,
        "first": first,
        "epoch": state["epoch"],
        "told": state["told"],
        "changes": changes,
        "sum": hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item(),
        "averagings": hvd.metrics()["exchanges"] + hvd.metrics()["means"],
    }
    os.write(1, ("\n@learner " + json.dumps(facts) + "\n").encode())


main()
