"""One learner of the network benchmark, started by horovodrun on each host.

It trains an MLP to predict the class that a second MLP (the teacher, drawn from the seed) gives to random
points. Every sample is new; a learner's samples depend only on the seed, its rank and the step.

To measure speed, it trains blocks of steps in turn, with averaging off (the plain optimizer on a model of
its own, the engine idle) and on, for each kind of computation. With --curve-s it trains once and copies the
model on the way; the copies are evaluated after training, so that evaluation takes no time from training.
Learner 0 writes the results of all learners to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd import strategies
from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.presence import live

HELD_OUT = 512
TEACHER = 32  # hidden units of the teacher
REST_S = 120.0  # longest wait until no exchange runs, in seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--averaging", help="spec of the strategy; without it every learner trains alone")
    add("--wire-dtype")
    add("--exchange-share", help="a number, or auto")
    add("--sizes", type=int, nargs="+", required=True, help="sizes of the model's layers")
    add("--computations", nargs="+", required=True, metavar="BATCH:WAIT_S")
    add("--rate", type=float, required=True, help="learning rate")
    add("--momentum", type=float, required=True)
    add("--block-s", type=float, required=True, help="seconds per block with averaging off")
    add("--on-s", type=float, required=True, help="seconds per block with averaging on")
    add("--repetitions", type=int, required=True)
    add("--curve-s", type=float, help="train once for so many seconds, and record held-out loss")
    add("--seed", type=int, required=True)
    add("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    found = curve(options) if options.curve_s else speed(options)
    if hvd.rank() == 0:
        options.out.write_text(json.dumps({**found, "load": os.getloadavg()[0]}) + "\n")
    hvd.shutdown()


# ---- the task -----------------------------------------------------------------------------------


def mlp(sizes: list[int], seed: int) -> torch.nn.Sequential:
    """Return a new MLP, which is the same on every learner: its weights are drawn from `seed`."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class Task:
    """Random points with the class that the teacher MLP gives to each."""

    def __init__(self, inputs: int, classes: int, seed: int):
        self.inputs, self.seed = inputs, seed
        self.teacher = mlp([inputs, TEACHER, classes], seed + 1)
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():  # shift the outputs so that all classes are about equally frequent
            points = torch.randn(4096, inputs, generator=torch.Generator().manual_seed(seed + 2))
            self.teacher[-1].bias -= self.teacher(points).mean(0)
        self.held_out = self.samples(HELD_OUT, 0, 0)

    @torch.no_grad()
    def samples(self, count: int, who: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of learner `who` (1, 2, ...) at a step; `who` 0 gives held-out samples."""
        seed = (self.seed * 1009 + who) * 1_000_003 + step
        points = torch.randn(count, self.inputs, generator=torch.Generator().manual_seed(seed))
        return points, self.teacher(points).argmax(1)

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        """Return the model's held-out cross-entropy in nats per sample."""
        points, classes = self.held_out
        return float(torch.nn.functional.cross_entropy(model(points), classes))


# ---- training -----------------------------------------------------------------------------------


class Trainer:
    """A model with its optimizer: a DistributedOptimizer if `averaged`, else plain SGD."""

    def __init__(self, options: argparse.Namespace, task: Task, averaged: bool):
        self.model, self.task, self.steps = mlp(options.sizes, options.seed), task, 0
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options.rate, momentum=options.momentum
        )
        self.in_step = False
        if averaged:
            strategy = strategies.parse(options.averaging)
            self.in_step = strategy.averages == "nothing"
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer,
                named_parameters=self.model.named_parameters(),
                averaging=strategy,
                **exchanged(options),
            )
        self.phases = dict.fromkeys(("gradient_s", "wait_s", "step_s"), 0.0)

    def step(self, batch: int, wait_s: float) -> None:
        """Compute a gradient, sleep `wait_s` seconds in place of an accelerator, call optimizer.step()."""
        began = time.monotonic()
        points, classes = self.task.samples(batch, 1 + hvd.rank(), self.steps)
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(points), classes)
        self._count("gradient_s", began)
        began = time.monotonic()
        if wait_s:
            time.sleep(wait_s)
        self._count("wait_s", began)
        began = time.monotonic()
        loss.backward()
        self._count("gradient_s", began)
        began = time.monotonic()
        self.optimizer.step()
        self._count("step_s", began)
        self.steps += 1

    def _count(self, phase: str, began: float) -> None:
        self.phases[phase] += time.monotonic() - began


def exchanged(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of DistributedOptimizer that say what an exchange sends."""
    share = options.exchange_share
    found = {"wire_dtype": options.wire_dtype, "exchange_share": share}
    if share and share != "auto":
        found["exchange_share"] = float(share)
    return {name: value for name, value in found.items() if value}


# ---- speed --------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Train blocks with averaging off and on in turn; return the counts of each block."""
    task = Task(options.sizes[0], options.sizes[-1], options.seed)
    off, on = (Trainer(options, task, averaged) for averaged in (False, True))
    kinds = [(int(b), float(w)) for b, w in (c.split(":") for c in options.computations)]
    with resting():
        block(off, kinds[0], seconds=0.0)  # warm-up: touches memory
    first = block(on, kinds[0], seconds=0.0, steps=2 if on.in_step else None)
    rows: dict[str, list[Any]] = {computation: [] for computation in options.computations}
    for _ in range(options.repetitions):
        for computation, kind in zip(options.computations, kinds, strict=True):
            with resting():
                without = block(off, kind, options.block_s)
            steps = enough(first, kind, options.on_s) if on.in_step else None
            rows[computation].append({"off": without, "on": block(on, kind, options.on_s, steps)})
    parameters = sum(p.numel() for p in on.model.parameters())
    return {"parameters": parameters, "rows": rows, "first": first}


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """A context in which no exchange runs; all learners enter it together, after running exchanges ended."""
    engines = [averaging.engine for averaging in live()]
    comm = worlds.current().collectives.comm
    # Twice, because a paused engine still answers exchanges that a peer began before its own pause.
    for _ in range(2):
        for engine in engines:
            engine.pause(REST_S)
        wait(comm.Ibarrier())
    yield
    wait(comm.Ibarrier())
    for engine in engines:
        engine.resume()


def enough(first: list[dict[str, Any]], kind: tuple[int, float], seconds: float) -> int:
    """Return the number of steps that take about `seconds`, at least 2, the same on all learners."""
    slowest = max(told["seconds"] / told["steps"] for told in first)
    return max(2, math.ceil(seconds / (slowest + kind[1])))


def block(
    trainer: Trainer, kind: tuple[int, float], seconds: float, steps: int | None = None
) -> list[dict[str, Any]]:
    """Train for `seconds`, or `steps` steps if learners wait for each other; return counts, by rank."""
    comm = worlds.current().collectives.comm
    wait(comm.Ibarrier())
    before, began, done = counted(trainer), time.monotonic(), 0
    while done < steps if steps else (done < 2 or time.monotonic() - began < seconds):
        trainer.step(*kind)
        done += 1
    mine = {"steps": done, "seconds": time.monotonic() - began}
    mine |= {name: value - before[name] for name, value in counted(trainer).items()}
    if isinstance(trainer.optimizer, torch.optim.Optimizer) and live():
        mine["consensus_distance"] = hvd.metrics()["consensus_distance"]
    wait(comm.Ibarrier())
    return list(comm.allgather(mine))


def counted(trainer: Trainer) -> dict[str, float]:
    """Return monotonic counters of the trainer, the engine, the process and the host's interfaces."""
    metrics = hvd.metrics()
    names = ("exchanges", "bytes_sent", "engine_cpu_s", "optimizer_s", "collect_s", "offer_s")
    return {
        **trainer.phases,
        **{name: metrics[name] for name in names},
        "cpu_s": time.process_time(),
        "wire_bytes": wire_bytes(Path("/proc/net/dev").read_text()),
    }


def wire_bytes(text: str) -> int:
    """Return the bytes sent by all interfaces but the loopback, from the text of /proc/net/dev."""
    rows = [line.split(":") for line in text.splitlines() if ":" in line]
    return sum(int(values.split()[8]) for name, values in rows if name.strip() != "lo")


# ---- curve --------------------------------------------------------------------------------------


def curve(options: argparse.Namespace) -> dict[str, Any]:
    """Train once; return held-out loss and consensus distance during training, by steps and by seconds."""
    task = Task(options.sizes[0], options.sizes[-1], options.seed)
    trainer = Trainer(options, task, averaged=bool(options.averaging))
    batch, wait_s = options.computations[0].split(":")
    copies = train_and_copy(trainer, (int(batch), float(wait_s)), options.curve_s)
    if live():
        live()[0].engine.pause(REST_S)  # only the copies are evaluated from here on
    alone = not options.averaging
    told = [judged(trainer, *copy, alone=alone) for copy in match(copies)]
    return {"batch": int(batch), "wait_s": float(wait_s), "curve": told}


# A copied model: name, steps, seconds, parameters.
Copy = tuple[str, int, float, list[torch.Tensor]]


def train_and_copy(trainer: Trainer, kind: tuple[int, float], seconds: float) -> list[Copy]:
    """Train for `seconds`; return copies after 4, 8, 16, ... steps and at 1/4, 1/2 and all of the time."""
    comm, copies = worlds.current().collectives.comm, []
    parts = [(part, seconds * part) for part in (0.25, 0.5, 1.0)]
    wait(comm.Ibarrier())
    began, over = time.monotonic(), False
    while not over:
        trainer.step(*kind)
        now = time.monotonic() - began
        late = parts and now >= parts[0][1]
        if trainer.in_step:  # learner 0 decides, so that all learners copy at the same step
            late = bool(comm.bcast(late))
        if late:
            copies.append(_copy(trainer, f"time {parts.pop(0)[0]:g}", now))
            over = not parts
        if trainer.steps & (trainer.steps - 1) == 0 and trainer.steps >= 4:
            copies.append(_copy(trainer, f"steps {trainer.steps}", now))
    return copies


def _copy(trainer: Trainer, name: str, seconds: float) -> Copy:
    parameters = [p.detach().clone() for p in trainer.model.parameters()]
    return name, trainer.steps, seconds, parameters


def match(copies: list[Copy]) -> list[Copy]:
    """Return those copies that all learners have taken, in learner 0's order."""
    names = worlds.current().collectives.comm.allgather([name for name, *_ in copies])
    common = [name for name in names[0] if all(name in others for others in names)]
    by_name = {copy[0]: copy for copy in copies}
    return [by_name[name] for name in common]


@torch.no_grad()
def judged(
    trainer: Trainer, name: str, steps: int, seconds: float, parameters: list[torch.Tensor], *,
    alone: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the loss of each learner's copy and of the mean of all copies, and the distance from it."""
    comm = worlds.current().collectives.comm
    load(trainer.model, parameters)
    own = trainer.task.loss(trainer.model)
    if trainer.in_step:
        mean, square = own, 0.0
    else:
        square = to_the_mean(comm, parameters)
        load(trainer.model, parameters)
        mean = trainer.task.loss(trainer.model)
    told = comm.allgather((steps, seconds, own, square))
    losses = [one[2] for one in told]
    return {
        "at": name,
        "steps": [one[0] for one in told],
        "seconds": max(one[1] for one in told),
        "own_loss": sum(losses) / len(losses),
        "loss": sum(losses) / len(losses) if alone else mean,
        "consensus_distance": math.sqrt(sum(one[3] for one in told) / comm.size),
    }


def load(model: torch.nn.Module, parameters: list[torch.Tensor]) -> None:
    for parameter, values in zip(model.parameters(), parameters, strict=True):
        parameter.copy_(values)


def to_the_mean(comm: Any, parameters: list[torch.Tensor]) -> float:
    """Replace each parameter by its mean over learners; return this learner's squared distance from it."""
    square = 0.0
    for values in parameters:
        mean = torch.empty_like(values)
        wait(comm.Iallreduce(values.numpy(), mean.numpy()))
        mean /= comm.size
        square += float((values - mean).square().sum(dtype=torch.float64))
        values.copy_(mean)
    return square


if __name__ == "__main__":
    main()
