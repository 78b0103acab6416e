"""Trains a small model until the test sends SIGTERM to some learners; the others train on.

The gradient of a super learner is constant, so its model moves by DRIFT in each step, and by averaging. Each
learner is the child of a process that leaves its status, RANK.status in --folder. A learner leaves RANK.pid
after some steps and an exchange, and waits before its last steps until the test has left "preempted". It
leaves RANK.json and its model RANK.npy at its end; RANK.left, and RANK.left.npy, its model with all that is
owed to it, when it has left. SIGTERM comes to learners inside hvd.shutdown() too, where it changes nothing.
"""

import argparse
import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

# -1: imported by the test
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", -1))
BEGUN, LAST = 5, 50  # steps: the first, and the last ones
GRADIENT_S = 0.01
CHUNKS, DRIFT = 8, 0.01
LONG_S = 60.0
PR_SET_PDEATHSIG = 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--sleeps", type=int, help="this learner sleeps after some steps")
    return parser.parse_args()


def leave(folder: Path, kind: str, **facts: Any) -> None:
    """A file of facts, which appears whole or not at all."""
    new = folder / f"{RANK}.new"
    new.write_text(json.dumps(facts))
    new.rename(folder / f"{RANK}.{kind}")


def watch_child(folder: Path) -> None:
    """Fork; returns in the child. The parent leaves the child's status, and ends as it ends."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    leave(folder, "status", status=status, at=time.monotonic())
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    args = parsed()
    watch_child(args.folder)
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.launch import world as worlds

    hvd.init()
    model, drift = drawn(args.seed, hvd.super_rank())
    if hvd.size() == hvd.super_size():
        departure = worlds.current().departure
        departure.at_leave(lambda: save(args.folder, optimizer))  # after the engine's departure
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([model], lr=1.0), named_parameters=[("model", model)], exchanges_per_step=4
    )
    train(args, model, drift, optimizer)
    total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()
    with hvd.averaging_paused():
        np.save(args.folder / f"{RANK}.npy", model.detach().cpu().numpy())
    leave(args.folder, "json", steps=args.steps, total=total, failed=hvd.failed_ranks())
    stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    worlds.current().teardown.at_shutdown(stop)  # too late: it changes nothing
    hvd.shutdown()


def drawn(seed: int, super_rank: int) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """The first model of a super learner, and what it adds in each step."""
    generator = torch.Generator().manual_seed(seed + super_rank)
    model, drift = torch.randn(2, CHUNKS, 2**16, generator=generator)
    return torch.nn.Parameter(model), DRIFT * drift


def train(
    args: argparse.Namespace, model: torch.nn.Parameter, drift: torch.Tensor, optimizer: Any
) -> None:
    torch.set_num_threads(1)
    begun = False
    for step in range(args.steps):
        if not begun and (step == args.steps - LAST or (step >= BEGUN and has_averaged(optimizer))):
            begun = True
            leave(args.folder, "pid", pid=os.getpid())
            if args.sleeps == RANK:
                time.sleep(LONG_S)
        while step == args.steps - LAST and not (args.folder / "preempted").exists():
            time.sleep(1e-3)
        optimizer.zero_grad()
        (-drift * model).sum().backward()
        time.sleep(GRADIENT_S)
        optimizer.step()


def has_averaged(optimizer: Any) -> bool:
    """Whether an exchange or a mean of this learner is over, if it is a leader."""
    engine = optimizer._averaging.engine
    if engine.loop is None:
        return True
    numbers = engine.metrics()
    return bool(numbers["exchanges"] + numbers["means"])


def save(folder: Path, optimizer: Any) -> None:
    """The model of a learner that is alone in its super learner, and its corrections."""
    wait_for_trainer()
    memory = optimizer._averaging.engine.memory.own
    [(shared, mirror, _)] = memory.areas
    i = memory._publications % memory._nslots  # the open slot
    slot, flags = shared.slots[i].view(np.float32), shared.flags[i]
    model = mirror.view(np.float32).astype(np.float64)
    model += slot * np.repeat(flags != 0, model.size // flags.size)
    np.save(folder / f"{RANK}.left.npy", model)
    leave(folder, "left", steps=optimizer._averaging.step)


def wait_for_trainer() -> None:
    """Until it is held: it may take in the last corrections before that."""
    ends = time.monotonic() + LONG_S
    while time.monotonic() < ends:
        frame = sys._current_frames()[threading.main_thread().ident]
        if frame.f_code.co_name == "block_if_leaving":
            return
        time.sleep(1e-3)
    raise AssertionError("the trainer goes on without its engine")


if __name__ == "__main__":
    main()
