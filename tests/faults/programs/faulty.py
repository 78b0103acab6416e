"""Trains a small model, and lets the learners named --victims commit a fault at a scripted place.

A victim leaves RANK.fault in --folder just before its fault. Who reaches the end leaves RANK.json,
and, when everything has been left behind and only the end of the process remains, RANK.left.

Places: `before_init` (before hvd.init), `in_init` (MPI is up, the worlds are not yet agreed on),
`between_steps`, `asking` and `answering` (at --step or soon after, inside an exchange that this learner
asked for, or was asked for: chunks have been merged, others are to come), `inner_allreduce` (some
gradients of the step are with Horovod, others never come), `last_step`, `shutdown` (the victims go there
at --step, before the departure of their engine).
"""

import argparse
import atexit
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import bootstrap
from hvd_adpsgd.launch import world as worlds

RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
GRADIENT_S = 0.01  # the work of a step's gradient, for which the test machine has too few cores
PAUSE_S = 3.0
LONGEST_S = 60.0
HANGS_S = 150.0  # then every thread shows where it is


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--victims", type=lambda s: [int(x) for x in s.split(",")], required=True)
    parser.add_argument("--step", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--exchanges-per-step", type=float, default=1.0)
    return parser.parse_args()


def stop_and_continue() -> None:
    """A child wakes this process up again."""
    wake = f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("on purpose")


FAULTS = {
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": stop_and_continue,
    "exit1": lambda: sys.exit(1),
    "os_exit1": lambda: os._exit(1),
    "exception": fail,
    "segfault": lambda: ctypes.string_at(0),
}


class Script:
    """What this learner does when it comes to a place."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.mine = RANK in args.victims
        self.step = -1

    def here(self, place: str, **facts: Any) -> None:
        """Commit the fault, if it is this learner's turn and this is the place."""
        now = place in BEFORE_TRAINING or self.step == self.when()
        if self.mine and now and place == self.args.at:
            self.commit(self.step, **facts)

    def commit(self, step: int, **facts: Any) -> None:
        """The fault, now."""
        self.mine = False
        self.leave("fault", step=step, at=time.monotonic(), **facts)
        FAULTS[self.args.fault]()

    def leaves_early(self) -> bool:
        """Whether this learner goes to its shutdown now, while the others train on."""
        return self.mine and self.args.at == "shutdown" and self.step == self.when()

    def when(self) -> int:
        """The step of the fault."""
        return self.args.steps - 1 if self.args.at == "last_step" else self.args.step

    def leave(self, kind: str, **facts: Any) -> None:
        """A file of facts, which appears whole or not at all."""
        new = self.args.folder / f"{RANK}.new"
        new.write_text(json.dumps(facts))
        new.rename(self.args.folder / f"{RANK}.{kind}")


BEFORE_TRAINING = ("before_init", "in_init")
IN_EXCHANGE = ("asking", "answering")


def script_init(script: Script) -> None:
    """The fault inside init: when this learner is to tell the others of its placement."""
    answer = bootstrap._answer

    def told(*args: Any) -> Any:
        script.here("in_init")
        return answer(*args)

    bootstrap._answer = told


def script_exchange(script: Script, optimizer: Any) -> None:
    """Watch the engine from a thread, which acts in the middle of an exchange."""
    if not script.mine or script.args.at not in IN_EXCHANGE:
        return
    loop = optimizer._averaging.engine.loop
    asks = script.args.at == "asking"

    def watch() -> None:
        while True:
            if script.step >= script.args.step:
                for exchange in loop.under_way():
                    if exchange["asked"] == asks and 0 < exchange["done"] < exchange["chunks"] - 8:
                        script.commit(script.when(), **exchange)
                        return
            time.sleep(1e-4)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    faulthandler.dump_traceback_later(HANGS_S)
    args = parsed()
    script = Script(args)
    atexit.register(lambda: script.leave("left", at=time.monotonic()))  # the last to run
    script.here("before_init")
    script_init(script)
    hvd.init()
    facts = train(args, script)
    # before the engine's departure
    worlds.current().teardown.at_shutdown(lambda: script.here("shutdown"))
    script.leave("json", **facts)
    hvd.shutdown()


def train(args: argparse.Namespace, script: Script) -> dict[str, Any]:
    torch.manual_seed(hvd.super_rank())
    width = args.width
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr),
        named_parameters=model.named_parameters(),
        exchanges_per_step=args.exchanges_per_step,
    )
    script_exchange(script, optimizer)
    # the gradient of the last layer comes first, and is with Horovod by then
    model[0].weight.register_hook(lambda _: script.here("inner_allreduce"))

    def advance() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, width)).pow(2).mean().backward()
        time.sleep(GRADIENT_S)
        optimizer.step()

    for step in range(args.steps):
        script.step = step
        advance()
        script.here("between_steps")
        script.here("last_step")
        if script.leaves_early():
            break
    since = go_on(script, advance) if args.at == "between_steps" else {}
    return {"steps": step + 1, "since": since}


def go_on(script: Script, advance: Callable[[], None]) -> dict[int, int]:
    """Steps until each surviving super learner has exchanged twice with each other since it noticed the loss.

    They notice it at different moments, so a learner with enough exchanges trains on until all have enough.

    Returns the number of exchanges, by surviving super learner.
    """
    args = script.args
    lost = {rank // hvd.super_learner.size() for rank in args.victims}
    rest = [i for i in range(hvd.super_size()) if i not in lost and i != hvd.super_rank()]
    then, since, ends = None, dict.fromkeys(rest, 0), time.monotonic() + LONGEST_S
    while True:
        peers = hvd.metrics()["peers"]
        if then is None and lost <= {r // hvd.super_learner.size() for r in hvd.failed_ranks()}:
            then = peers
        if then is not None and hvd.is_leader():
            since = {i: peers[i] - then[i] for i in rest}
        if then is not None and hvd.is_leader() and min(since.values(), default=2) >= 2:
            script.leave("enough")
        all_have = len([*args.folder.glob("*.enough")]) > len(rest)
        mine = torch.tensor(float(all_have or time.monotonic() > ends))
        if hvd.allreduce(mine, op=hvd.Min, process_set=hvd.super_learner):
            return since
        advance()


if __name__ == "__main__":
    main()
