"""The mean without waiting while all train. Arguments: folder, what happens to the last super learner.

"late": it ends its step only once all others have made STEPS steps since the mean was asked for; "stopped":
by SIGSTOP, until the mean is there, and they have; "resumed": by SIGSTOP, until they have; "killed": as it
contributes; "joined": before, and another one joins when the mean has just been asked for.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path

import numpy as np
import torch
from learner import generator, say

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.joining import reconnect
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training import async_mean
from hvd_adpsgd.training.pause import paused
from hvd_adpsgd.training.presence import live
from tests.launcher import wait_for

STEPS = 20


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world, is_last = worlds.current(), hvd.super_rank() == hvd.super_size() - 1
    others = [r for group in world.groups[:-1] for r in group]
    original = async_mean.contributions

    def contributions(wants):
        if is_last and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        made = original(wants)
        if made is not None:
            np.savez(folder / f"{world.super_rank}.{made[0]}.npz", *made[1])
        return made

    async_mean.contributions = contributions
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    model.register_parameter("tied", model[0].bias)
    frozen = torch.nn.Parameter(torch.tensor([float(hvd.rank())]), requires_grad=False)
    model.register_parameter("frozen", frozen)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.AdamW([p for _, p in part], lr=0.01),
            named_parameters=part,
            buffers=[
                (n, b) for n, b in model.named_buffers() if b.is_floating_point() and part is rest
            ],
        )
        for rest in [named[2:]]
        for part in (named[:2], rest)
    ]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    asked, done = folder / "asked", folder / "done"
    handle, since, polled, rng = None, 0, 0, generator(world.rank)

    def ask() -> None:
        nonlocal handle
        handle = hvd.average_model_async(model, timeout=1 if what == "stopped" else None)
        asked.touch()

    def connect_anew(
        *args, **how
    ):  # all are here, so nobody contributes before the other one has joined
        if world.rank == 0 and handle is None:
            ask()
        return connect(*args, **how)

    connect, reconnect.connect_anew = reconnect.connect_anew, connect_anew

    def have_gone_on() -> bool:
        return all((folder / f"{rank}.on").exists() for rank in others)

    for step in count():
        if what == "joined":
            hvd.admit(model, optimizers, blocking=False)
        model.zero_grad()
        model(torch.randn(8, 7, generator=rng)).square().sum().backward()
        if is_last and step == 5:
            (folder / f"inside.{os.getpid()}").touch()
            if what == "late":
                wait_for(have_gone_on, "further steps of the others")
            elif what in ("stopped", "resumed"):
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "joined" and "HVD_ADPSGD_JOIN" not in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
        for optimizer in optimizers:
            optimizer.step()
        since += asked.exists()
        if since == STEPS:
            (folder / f"{world.rank}.on").touch()
        inside = list(folder.glob("inside.*"))
        if handle is None and world.rank == 0 and inside and what != "joined":
            ask()
        if handle is not None and not done.exists():
            if hvd.poll(handle):
                torch.save(hvd.synchronize(handle), folder / "state.pt")
                keys = list(model.state_dict())
                say(steps=handle.steps, left_out=handle.left_out, keys=keys, polled=polled)
                done.touch()
            polled += 1
        gone = what in ("killed", "joined") or have_gone_on()
        ends = gone and (done.exists() or what == "resumed")
        if handle is not None and what in ("stopped", "resumed") and ends:
            os.kill(int(inside[0].suffix[1:]), signal.SIGCONT)
        if hvd.allreduce(
            torch.tensor([float(done.exists() and gone)]), op=hvd.Min, process_set=hvd.super_learner
        ).item():
            break
    if what == "late":
        _compare(model)


def _compare(model: torch.nn.Module) -> None:
    """The mean of contributions, whose corrections are pending, is that of hvd.averaged."""
    world, averaging = worlds.current(), live()[0]
    with hvd.averaged(model):
        mean = model[0].weight.detach().clone()
    with paused(world, "compare", [averaging], keeping_pending=[averaging]):
        given = averaging.tensors.parameters.given
        place = next(i for i, t in enumerate(given) if t is model[0].weight)
        its = torch.zeros(5, 7)
        if world.is_leader:
            its = torch.from_numpy(async_mean.contribution(averaging, [place])[0])
        total = hvd.allreduce(its, op=hvd.Sum) / world.super_size
    say(wrong=float((total - mean).abs().max()))


if __name__ == "__main__":
    main()
