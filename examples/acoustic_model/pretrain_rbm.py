"""Pre-trains the hidden layers of a sigmoid DNN as a stack of restricted Boltzmann machines (RBMs).

    horovodrun -np 4 python -m examples.acoustic_model.pretrain_rbm   then
    horovodrun -np 4 python -m examples.acoustic_model.train --preset dnn --init out/rbm/stack.pt

It trains one RBM after another: the first with Gaussian visible units for the speech features, the others
with binary visible units for the outputs of the layer below. Each RBM is trained by contrastive divergence
(CD-1), data parallel with any --strategy of train.py. Written to --out: stack.pt, and per epoch a line of
monitor.jsonl with the squared error of reconstruction.

The recipe is Kaldi's (after Hinton's guide, 2010): momentum 0.9, rate LR x (1 - momentum), L2 penalty on
weights. If the standard deviation of reconstructed Gaussian units is more than twice that of the data, all
parameters are scaled down, the rate falls by a tenth, momentum is cleared and the minibatch is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: learners share the cores

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from examples.acoustic_model.speech import corpus, journal, strategy
from examples.acoustic_model.speech.model import PRESETS, Shape, windows
from examples.acoustic_model.speech.problem import Problem, new_parser, run, within
from examples.acoustic_model.speech.rbm import RBM, spread
from examples.acoustic_model.train import averaging, is_asynchronous, started

WATCHED = 64  # about so many segments give the mean activation from which visible biases start
# Ratio of standard deviations from which the guard acts; the factor by which it lowers the rate.
TOO_WIDE, SHRINK_RATE = 2.0, 0.9


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--strategy", default="random-pairs", metavar="NAME", help="as in train.py")
    add("--data", type=Path, default=Path("out/speech/easy"), help="folder of prepare_data.py")
    add("--out", type=Path, default=Path("out/rbm"), help="folder (default: out/rbm)")
    add("--seed", type=int, default=0)
    add("--layers", type=int, default=PRESETS["dnn"].layers)
    add("--hidden", type=int, default=PRESETS["dnn"].hidden)
    add("--batch", type=int, default=5, help="segments of 21 frames per learner (default: 5)")
    add("--first-epochs", type=int, default=2, help="epochs of the first machine (default: 2)")
    add("--epochs", type=int, default=1, help="epochs of each other machine (default: 1)")
    add("--first-lr", type=float, default=0.01, help="rate of the first machine (default: 0.01)")
    add("--lr", type=float, default=0.4, help="rate of the other machines (default: 0.4)")
    add("--momentum", type=float, default=0.9)
    add("--l2", type=float, default=2e-4, help="penalty on weights (default: 2e-4)")
    options = parser.parse_args(argv)
    for name, low, high in (("seed", 0, 2**31 - 1), ("layers", 1, 64), ("hidden", 1, 8192)):
        within(f"--{name}", getattr(options, name), low, high)
    for name in ("batch", "first_epochs", "epochs"):
        within(f"--{name.replace('_', '-')}", getattr(options, name), 1, 2**20)
    for name, high in (("first_lr", 1e3), ("lr", 1e3), ("momentum", 0.9999), ("l2", 1.0)):
        within(f"--{name.replace('_', '-')}", getattr(options, name), 0, high)
    strategy.check(options.strategy)
    return options


class Job(NamedTuple):
    """Data and options that the training of all RBMs shares.

    Attributes:
        hvd: the module that started() returns.
        options: options of the script.
        shape: shape of the DNN.
        train: training split.
        generator: random numbers for sampling hidden units, seeded by the learner's rank.
    """

    hvd: ModuleType
    options: argparse.Namespace
    shape: Shape
    train: corpus.Split
    generator: torch.Generator


class Machine:
    """The RBM of one layer, to be trained on the outputs of the finished RBMs `below`."""

    def __init__(self, job: Job, below: list[RBM]) -> None:
        self.job, self.below = job, below
        hvd, options = job.hvd, job.options
        first = not below
        visible = job.shape.window if first else job.shape.hidden
        mean = None if first else self.visible(_some(job.train)).mean(0)
        torch.manual_seed(options.seed + len(below))
        self.rbm = RBM(visible, job.shape.hidden, first, mean)
        rate = (options.first_lr if first else options.lr) * (1 - options.momentum)
        others = [self.rbm.bias, self.rbm.visible_bias]
        sgd = torch.optim.SGD(
            [{"params": [self.rbm.weight], "weight_decay": options.l2}, {"params": others}],
            lr=rate,
            momentum=options.momentum,
        )
        self.optimizer = hvd.DistributedOptimizer(
            sgd,
            named_parameters=self.rbm.named_parameters(),
            **averaging(hvd, options.strategy, options.seed),
        )
        hvd.broadcast_parameters(self.rbm.state_dict(), root_rank=0)

    @torch.no_grad()
    def visible(self, frames: torch.Tensor) -> torch.Tensor:
        """Return this RBM's visible units for segments: (batch, time, inputs) to (batch x time, units)."""
        v = windows(frames, self.job.shape).flatten(0, 1)
        for rbm in self.below:
            v = rbm(v)
        return v

    def epoch(self, batches: Iterator[torch.Tensor]) -> tuple[float, int]:
        """Train an epoch; return the squared reconstruction error per unit, and how often the guard acted."""
        total, steps, guarded = 0.0, 0, 0
        for frames in batches:
            self._require_finite(steps)
            v = self.visible(frames)
            reconstructed = self.rbm.reconstruct(v, self.job.generator)
            total += (v - reconstructed).square().mean().item()
            steps += 1
            self.optimizer.zero_grad()
            if self.rbm.gaussian and self._too_wide(v, reconstructed):
                guarded += 1
            else:
                self.rbm.contrastive(v, reconstructed).backward()
            self.optimizer.step()  # also without a gradient, because other learners may wait for this step
        return total / max(1, steps), guarded

    def _require_finite(self, steps: int) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self.rbm.parameters()):
            option = "--lr" if self.below else "--first-lr"
            raise Problem(
                f"layer {len(self.below) + 1} diverged: its parameters are not finite after {steps} "
                f"minibatches of this epoch; lower {option} or --momentum"
            )

    def _too_wide(self, v: torch.Tensor, reconstructed: torch.Tensor) -> bool:
        """Shrink the RBM if its reconstructions spread too widely; return whether it did.

        The decision is the same on all learners of a super learner.
        """
        data, model = self._mean_in_node(spread(v, reconstructed))
        if model <= TOO_WIDE * data:
            return False
        self.rbm.shrink(data / model)
        for group in self.optimizer.param_groups:
            group["lr"] *= SHRINK_RATE
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()
        return True

    def _mean_in_node(self, numbers: tuple[float, ...]) -> list[float]:
        """Return the mean of `numbers` over the learners whose gradients are averaged."""
        hvd, mine = self.job.hvd, torch.tensor(numbers)
        node = {"process_set": hvd.super_learner} if hasattr(hvd, "super_learner") else {}
        total = hvd.allreduce(mine, name="spread", op=hvd.Sum, **node)
        count = hvd.super_learner.size() if node else hvd.size()
        return (total / count).tolist()


def _some(split: corpus.Split) -> torch.Tensor:
    """Return the frames of evenly spaced segments of a split, the same on every learner."""
    step = max(1, len(split) // WATCHED)
    return torch.from_numpy(split[list(range(0, len(split), step))][0])


def pretrain(job: Job) -> list[RBM]:
    """Train all RBMs of the stack; write a line to monitor.jsonl per RBM and epoch."""
    lead = job.hvd.rank() == 0
    path = job.options.out / "monitor.jsonl"
    if lead:
        path.write_text("")
    done: list[RBM] = []
    for layer in range(job.shape.layers):
        machine = Machine(job, done)
        epochs = job.options.epochs if layer else job.options.first_epochs
        for epoch in range(epochs):
            began = time.perf_counter()
            error, guarded = machine.epoch(_batches(job, layer * 1000 + epoch))
            entry = {"layer": layer + 1, "epoch": epoch + 1, "error": error, "guarded": guarded}
            entry["seconds"] = time.perf_counter() - began
            if lead:
                _record(path, entry, epochs)
        if is_asynchronous(job.options.strategy):
            job.hvd.average_model(machine.rbm)
        done.append(machine.rbm)
    return done


def _batches(job: Job, epoch: int) -> Iterator[torch.Tensor]:
    hvd, options = job.hvd, job.options
    sampler = DistributedSampler(
        job.train, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
    )
    sampler.set_epoch(epoch)
    batches = BatchSampler(sampler, options.batch, drop_last=True)
    for frames, _ in DataLoader(job.train, sampler=batches, batch_size=None):
        yield frames


def _record(path: Path, entry: dict, epochs: int) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")
    guard = f"  guard {entry['guarded']} times" if entry["guarded"] else ""
    print(
        f"layer {entry['layer']}, epoch {entry['epoch']}/{epochs}  reconstruction "
        f"{entry['error']:.4f}  {entry['seconds']:.1f} s{guard}",
        flush=True,
    )


def main() -> None:
    """Import and initialise the chosen Horovod, pre-train, save the stack."""
    options = arguments()
    # Check the corpus before hvd.init(), so that a missing one raises a clear error at once.
    corpus.read_json(options.data / "states.json")
    hvd = started(options)
    shape = replace(PRESETS["dnn"], layers=options.layers, hidden=options.hidden)
    split = corpus.Split(options.data, "train", shape.context)
    if len(split) < options.batch * hvd.size():
        raise Problem(
            f"--batch {options.batch} x {hvd.size()} learners is more than the {len(split)} "
            f"segments in {options.data}"
        )
    generator = torch.Generator().manual_seed(options.seed * 1000 + hvd.rank())
    stack = pretrain(Job(hvd, options, shape, split, generator))
    if hvd.rank() == 0:
        layers = [{"weight": m.weight.detach(), "bias": m.bias.detach()} for m in stack]
        journal.save(options.out / "stack.pt", {"layers": layers, "seed": options.seed})
        print(f"{options.out / 'stack.pt'}: {len(layers)} layers", flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
