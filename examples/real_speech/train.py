"""Trains the recogniser of real speech with Horovod: asynchronously, synchronously, or with one learner.

    horovodrun -np 4 python -m examples.real_speech.train                     H-ADPSGD, random pairs
    horovodrun -np 4 python -m examples.real_speech.train --strategy ssgd     plain Horovod
    python -m examples.real_speech.train --strategy single                    one learner, no launcher
    horovodrun -np 4 python -m examples.real_speech.train --by-speaker        data sorted by speaker
    horovodrun -np 4 python -m examples.real_speech.train --cuts cuts_train.jsonl.gz      Lhotse's sampler

With HVD_ADPSGD_SUPER_LEARNER_SIZE=1 each learner of one machine is a super learner. AdamW with a warm-up and
a cosine, SpecAugment after the warm-up, clipping. --batch is that of one learner, --rate that of the job.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: learners share the cores

import torch

from examples.acoustic_model.speech import journal, strategy
from examples.acoustic_model.speech.problem import Problem, new_parser, run, within
from examples.acoustic_model.train import averaging, is_asynchronous, started
from examples.real_speech import corpus
from examples.real_speech.cuts import CutBatches, check
from examples.real_speech.model import Recogniser, Shape, augmented, greedy, loss


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--strategy", default="random-pairs", metavar="NAME", help="as in examples.acoustic_model")
    add("--data", type=Path, default=Path("out/real_speech/cs"), help="folder of prepare.py")
    add("--out", type=Path, help="folder (default: out/real_speech/runs/STRATEGY)")
    add("--seed", type=int, default=0)
    add("--epochs", type=int, default=30)
    add("--batch", type=int, help="utterances per learner (default: 2)")
    add("--rate", type=float, default=1e-3, help="highest learning rate (default: 1e-3)")
    add("--warm-up", type=float, default=2.0, metavar="EPOCHS")
    add("--clip", type=float, default=5.0, help="largest norm of the gradient (default: 5)")
    add(
        "--cuts", type=Path, nargs="+", help="Lhotse manifests to train on: one, or one per learner"
    )
    add("--seconds", type=float, default=40.0, help="with --cuts: most speech per minibatch")
    add(
        "--by-speaker",
        action="store_true",
        help="learners' parts of the data are sorted by speaker",
    )
    add("--layers", type=int, default=3)
    add("--cells", type=int, default=128)
    options = parser.parse_args(argv)
    if options.cuts and (options.batch or options.by_speaker):
        raise Problem(
            "--cuts with --batch or --by-speaker: its minibatches are by --seconds; leave them out"
        )
    options.batch = 2 if options.batch is None else options.batch
    for name, low, high in (
        ("seed", 0, 2**31 - 1),
        ("epochs", 1, 10_000),
        ("batch", 1, 1024),
        ("rate", 1e-9, 10),
        ("warm_up", 0, 1e4),
        ("clip", 1e-6, 1e6),
        ("layers", 1, 16),
        ("cells", 1, 4096),
        ("seconds", 1, 1e4),
    ):
        within(f"--{name.replace('_', '-')}", getattr(options, name), low, high)
    strategy.check(options.strategy)
    if len(options.cuts or ()) > 1 and strategy.waits(options.strategy):
        raise Problem(
            f"--cuts with {len(options.cuts)} manifests and --strategy {options.strategy}: its learners make "
            "equal numbers of steps; give one manifest"
        )
    name = strategy.folder_name(options.strategy)
    options.out = options.out or Path("out/real_speech/runs") / name
    return options


def factor(options: argparse.Namespace, epoch: float) -> float:
    """Return the learning rate at a (fractional) epoch as a part of the highest: a warm-up, then a cosine."""
    warmed = min(1.0, (epoch + 0.05) / options.warm_up) if options.warm_up else 1.0
    return warmed * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / options.epochs)))


class Trainer:
    """One learner, with its model, its optimizer and its part of the data."""

    def __init__(self, hvd: ModuleType, options: argparse.Namespace) -> None:
        self.hvd, self.options = hvd, options
        self.train = corpus.Split(options.data, "train")
        self.dev = corpus.Split(options.data, "dev")
        self.mine = corpus.part(
            self.train, hvd.rank(), hvd.size(), options.by_speaker, options.seed
        )
        if not options.cuts and len(self.mine) < options.batch:
            raise Problem(
                f"--batch {options.batch} x {hvd.size()} learners is more than the {len(self.train)} "
                f"utterances in {options.data}; lower --batch"
            )
        self.lengths = self.train.lengths()
        self.cuts, self.trained = None, 0
        if options.cuts:
            check(options.cuts, hvd.size())
            self.cuts = CutBatches(
                options.cuts, self.train, hvd.rank(), hvd.size(), options.seconds, options.seed
            )
        self.steps = self.cuts.steps if self.cuts else sum(1 for _ in self._minibatches(0))
        torch.manual_seed(options.seed)
        shape = Shape(len(self.train.letters), options.layers, options.cells)
        self.model = Recogniser(shape)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            **averaging(hvd, options.strategy, options.seed),
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        torch.manual_seed(options.seed * 1000 + hvd.rank())  # dropout differs between learners
        self.random = torch.Generator().manual_seed(options.seed * 1000 + hvd.rank())

    def _minibatches(self, epoch: int) -> Iterator[list[int]]:
        options = self.options
        return corpus.minibatches(self.mine, self.lengths, options.batch, options.seed, epoch)

    def _batches(self, epoch: int) -> Iterator[corpus.Batch]:
        if self.cuts:
            return self.cuts.epoch(epoch)
        return map(self.train.batch, self._minibatches(epoch))

    def epoch(self, epoch: int) -> float:
        """Train one epoch; return this learner's mean loss per letter."""
        self.model.train()
        total, letters = 0.0, 0
        for step, batch in enumerate(self._batches(epoch)):
            now = epoch + min(1.0, step / self.steps)
            rate = self.options.rate * factor(self.options, now)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad()
            if epoch >= self.options.warm_up:
                batch = augmented(batch, self.random)
            summed = loss(self.model, batch)
            count = max(1, int(batch.counts.sum()))
            (summed / count).backward()
            self._step()
            total, letters = total + float(summed.detach()), letters + count
            self.trained += len(batch.lengths)
        return total / max(1, letters)

    def _step(self) -> None:
        """Clip and step; plain Horovod averages gradients in synchronize(), one learner has none."""
        if not hasattr(self.optimizer, "synchronize"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
            self.optimizer.step()
            return
        self.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def heldout(self) -> tuple[float, float, int]:
        """Return the mean model's loss per letter, its letter error rate, and the utterances trained on.

        Each learner evaluates a part of dev.
        """
        hvd = self.hvd
        if is_asynchronous(self.options.strategy):
            with hvd.averaged(self.model):
                counted = self._counted()
        else:
            counted = self._counted()
        total = hvd.allreduce(counted, name="heldout", op=hvd.Sum)
        return float(total[0] / total[2]), float(total[1] / total[2]), int(total[3])

    @torch.no_grad()
    def _counted(self) -> torch.Tensor:
        """Return sums over a part of dev (loss, wrong letters, letters), and utterances trained on."""
        from examples.real_speech.scoring import letter_errors

        self.model.eval()
        total = torch.tensor([0, 0, 0, self.trained], dtype=torch.float64)
        mine = range(self.hvd.rank(), len(self.dev), self.hvd.size())
        for start in range(0, len(mine), 16):
            chosen = list(mine[start : start + 16])
            batch = self.dev.batch(chosen)
            scores = self.model(batch.frames, batch.lengths)
            heard = greedy(scores, batch.lengths, self.dev.letters)
            wrong, letters = letter_errors([self.dev.texts[i] for i in chosen], heard)
            total += torch.tensor([float(loss(self.model, batch)), wrong.sum(), letters.sum(), 0])
        return total


def train(hvd: ModuleType, options: argparse.Namespace) -> None:
    """Train, evaluate and record every epoch, and write model.pt at the end.

    Raises:
        Problem: on all learners, if the held-out loss is not finite.
    """
    trainer, seconds, lead = Trainer(hvd, options), 0.0, hvd.rank() == 0
    log = journal.Journal(options.out, -1) if lead else None
    if lead:
        count = sum(p.numel() for p in trainer.model.parameters())
        print(f"{options.strategy}: {hvd.size()} learners, {count:,} parameters", flush=True)
    for epoch in range(options.epochs):
        began = time.perf_counter()
        mean = trainer.epoch(epoch)
        seconds += time.perf_counter() - began
        held_out, errors, trained = trainer.heldout()
        if log:
            log.add(
                {
                    "epoch": epoch + 1,
                    "utterances": trained,
                    "seconds": seconds,
                    "heldout_loss": journal.number(held_out),
                    "heldout_cer": errors,
                    "train_loss": journal.number(mean),
                }
            )
            print(
                f"epoch {epoch + 1}/{options.epochs}  train {mean:.3f}  held-out {held_out:.3f} nats per "
                f"letter  letter errors {100 * errors:.1f} %  {seconds:.1f} s",
                flush=True,
            )
        if not math.isfinite(held_out):
            raise Problem(
                f"the held-out loss is {held_out} after epoch {epoch + 1}: training diverged; lower --rate"
            )
    if is_asynchronous(options.strategy):
        hvd.average_model(trainer.model)
    if lead:
        final = {
            "model": trainer.model.state_dict(),
            "shape": asdict(trainer.model.shape),
            "letters": trainer.train.letters,
        }
        journal.save(options.out / "model.pt", final)


def main() -> None:
    """Read the corpus before hvd.init(), so that a missing one is told at once; train."""
    options = arguments()
    corpus.read(options.data)
    train(started(options), options)


if __name__ == "__main__":
    run(main)
