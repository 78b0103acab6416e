"""Trains the acoustic model with Horovod: asynchronously, synchronously, or with one learner.

    horovodrun -np 4 python -m examples.acoustic_model.train   H-ADPSGD, random pairs
    horovodrun -np 4 python -m examples.acoustic_model.train --strategy ssgd   plain Horovod
    python -m examples.acoustic_model.train --strategy single   one learner, no launcher
    horovodrun -np 4 python -m examples.acoustic_model.train --strategy random_ring:seed=3   any spec

With HVD_ADPSGD_SUPER_LEARNER_SIZE=2 four learners form two super learners.
All strategies see the same number of samples; under the library a slow learner takes fewer of them, unless
its strategy waits.
--batch and --lr are those of one learner; the rate is multiplied by the number of learners (or by --scale)
after a linear warm-up, so that `single` is the baseline with the batch and rate of one learner. `--schedule
papers` warms up over 5/8 of the epochs, as the papers did over 10 of 16; then the rate falls by 1/sqrt(2) per
epoch. `--schedule exponential` is Kaldi's: the rate starts at LR x SCALE and falls to a tenth of that, by the
same factor in every step.
--slow 3:5 and --kill 3:1.5 disturb a learner, to see what the others do.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: learners share the cores

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from examples.acoustic_model.speech import corpus, journal, strategy
from examples.acoustic_model.speech.model import ACTIVATIONS, PRESETS, Shape, make, preset
from examples.acoustic_model.speech.problem import Problem, new_parser, require, run, within

COMBINATIONS = ("plain", "weighted")  # kinds of mean of all models for the final model
SCHEDULES = ("short", "papers", "exponential")
OPTIMIZERS = ("sgd", "natural")
BACKWARD = 2.0  # time of a backward pass / time of a forward pass
SHOWN = ("staleness_mean", "consensus_distance", "exchanges")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--strategy",
        default="random-pairs",
        metavar="NAME",
        help=f"{', '.join(strategy.NAMES)}, or an averaging spec (default: random-pairs)",
    )
    add("--data", type=Path, default=Path("out/speech/easy"), help="folder written by prepare_data")
    add("--out", type=Path, help="folder (default: out/runs/STRATEGY)")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--seed", type=int, default=0)
    add("--epochs", type=int, default=8)
    add("--batch", type=int, default=32, help="segments of 21 frames per learner (default: 32)")
    add("--lr", type=float, default=0.1, help="rate of one learner; times SCALE (default: 0.1)")
    add("--scale", type=float, help="rate after warm-up / LR (default: number of learners)")
    add("--momentum", type=float, default=0.9)
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="natural: hvd.NaturalGradientSGD")
    add("--combine", choices=COMBINATIONS, default="plain", help="weighted: by 1 / held-out loss")
    add("--schedule", choices=SCHEDULES, default="short", help="warm-up: 1 epoch, 5/8 of all, none")
    add("--warmup", type=float, help="warm-up epochs, LR to LR x SCALE (default: by schedule)")
    add("--anneal", type=int, help="from this epoch on, rate x 1/sqrt(2) per epoch (default: 5/8)")
    add("--preset", choices=tuple(PRESETS), default="small")
    add("--layers", type=int, help="bidirectional LSTM or DNN layers (default: by preset)")
    add("--hidden", type=int, help="cells per direction, or width of a layer")
    add("--activation", choices=tuple(ACTIVATIONS), help="activation of a DNN (default: sigmoid)")
    add("--init", type=Path, metavar="FILE", help="hidden layers of a DNN, written by pretrain_rbm")
    add(
        "--slow",
        type=disturbance,
        metavar="RANK:FACTOR",
        help="steps of RANK take FACTOR x as long",
    )
    add(
        "--kill",
        type=disturbance,
        metavar="RANK:EPOCHS",
        help="SIGKILL RANK after EPOCHS",
    )
    add("--projection", type=int, help="width of the linear layer before the outputs, 0 for none")
    options = parser.parse_args(argv)
    for name, low, high in (("seed", 0, 2**31 - 1), ("epochs", 1, 10_000), ("batch", 1, 2**20)):
        within(f"--{name}", getattr(options, name), low, high)
    if options.slow:
        within("FACTOR of --slow", options.slow[1], 1, 1e6)
    _require_no_plateau(options)
    held = max(1, options.epochs * 5 // 8)  # epochs before the rate falls
    options.anneal = held if options.anneal is None else options.anneal
    if options.warmup is None:
        options.warmup = float(held) if options.schedule == "papers" else 1.0
    for name, low, high in (("lr", 1e-9, 1e3), ("momentum", 0, 0.9999), ("warmup", 0, 1e4)):
        within(f"--{name}", getattr(options, name), low, high)
    if options.scale is not None:
        within("--scale", options.scale, 1e-3, 1e6)
    strategy.check(options.strategy)
    if options.combine != "plain" and not is_asynchronous(options.strategy):
        raise Problem(
            f"--combine {options.combine} with --strategy {options.strategy}: there is one model only; "
            "leave --combine out"
        )
    options.out = options.out or Path("out/runs") / strategy.folder_name(options.strategy)
    return options


def disturbance(text: str) -> tuple[int, float]:
    """Return the rank and the number of RANK:NUMBER, the value of an option."""
    rank, _, number = text.partition(":")
    try:
        if rank.isdecimal() and 0 < float(number) < 1e6:
            return int(rank), float(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not RANK:NUMBER, for instance 3:5")


def _require_no_plateau(options: argparse.Namespace) -> None:
    """Raise Problem for --warmup or --anneal with the exponential schedule, which has neither."""
    for name in ("warmup", "anneal"):
        given = getattr(options, name)
        if options.schedule == "exponential" and given is not None:
            raise Problem(
                f"--{name} {given:g} with --schedule exponential: its rate falls from the first step to "
                f"the last; leave --{name} out, or take --schedule short or papers"
            )


def horovod_for(name: str) -> ModuleType:
    """Import the module that this script uses as `hvd`: hvd_adpsgd.torch, horovod.torch, or alone.py.

    It is the only difference between the strategies.
    """
    others = {"ssgd": "horovod.torch", "single": "examples.acoustic_model.speech.alone"}
    module = others.get(name, "hvd_adpsgd.torch")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Problem(f"--strategy {name} needs {module}, which did not import: {error}") from error


def averaging(hvd: ModuleType, name: str, seed: int) -> dict:
    """Return the arguments of hvd_adpsgd's DistributedOptimizer that Horovod's does not have."""
    if not is_asynchronous(name):
        return {}
    make = {
        "random-pairs": lambda: hvd.RandomPairs(seed),
        "fixed-ring": lambda: hvd.FixedRing(),
        "random-ring": lambda: hvd.RandomRing(seed),
    }
    return {"averaging": make[name]() if name in make else name}


def is_asynchronous(name: str) -> bool:
    """Return whether super learners have different models; otherwise every model is the mean already."""
    return name not in ("ssgd", "single")


def shape_of(options: argparse.Namespace, data: Path) -> Shape:
    """Return the preset with the options applied; the numbers of outputs and inputs come from the data.

    Raises:
        Problem: if a size is out of range, or the preset's kind of model does not have an option.
    """
    states = len(corpus.read_json(data / "states.json"))
    shape = asdict(preset(options.preset, states))
    # The papers' 260 inputs and 32,000 outputs belong to their features and speech; this corpus has fewer.
    shape["outputs"] = states
    if shape["kind"] == "blstm":
        shape["inputs"] = Shape.inputs
    unknown = "projection" if shape["kind"] == "dnn" else "activation"
    if getattr(options, unknown) is not None:
        raise Problem(
            f"--{unknown} {getattr(options, unknown)}: --preset {options.preset} has none; leave it out"
        )
    for name in ("layers", "hidden", "projection"):
        given = getattr(options, name)
        if given is not None:
            within(f"--{name}", given, 0 if name == "projection" else 1, 8192)
            shape[name] = given
    if options.activation:
        shape["activation"] = options.activation
    return Shape(**shape)


def start_from(path: Path, model: torch.nn.Module) -> None:
    """Copy the hidden layers of a pre-trained stack into the model.

    Raises:
        Problem: if the file does not exist, or its layers do not fit the model.
    """
    if not path.exists():
        raise Problem(
            f"--init: there is no {path}; make it first: python -m examples.acoustic_model.pretrain_rbm"
        )
    stack = journal.load(path)
    layers = stack.get("layers", [])
    shapes = [tuple(layer.weight.shape) for layer in getattr(model, "hidden", [])]
    found = [tuple(layer["weight"].shape) for layer in layers]
    if not shapes or found != shapes:
        raise Problem(
            f"--init {path}: its layers are {found}, the model's {shapes}; use --preset dnn with the "
            "--layers and --hidden of pretrain_rbm.py"
        )
    with torch.no_grad():
        for mine, theirs in zip(model.hidden, layers, strict=True):
            mine.weight.copy_(theirs["weight"])
            mine.bias.copy_(theirs["bias"])


def optimizer_for(
    name: str, model: torch.nn.Module, lr: float, momentum: float
) -> torch.optim.Optimizer:
    """Return a new optimizer, one of OPTIMIZERS, not yet wrapped by DistributedOptimizer.

    Raises:
        Problem: if `name` is "natural" and hvd_adpsgd cannot be imported.
    """
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    try:
        natural = importlib.import_module("hvd_adpsgd.optim.natural_gradient")
    except ImportError as error:
        raise Problem(
            f"--optimizer {name} needs hvd_adpsgd, which did not import: {error}"
        ) from error
    return natural.NaturalGradientSGD(model, lr, momentum)


def exponential(start: float, part: float) -> float:
    """Return the exponential schedule's rate at `part` (0 to 1) of a run: from `start` to a tenth of it."""
    return start * 0.1**part


def rate(options: argparse.Namespace, learners: int, epoch: float) -> float:
    """Return the learning rate at a (fractional) epoch: warm-up to LR x scale, then 1/sqrt(2) per epoch.

    With the exponential schedule it falls from LR x scale to a tenth of that over all epochs.
    """
    scale = learners if options.scale is None else options.scale
    if options.schedule == "exponential":
        return exponential(options.lr * scale, epoch / options.epochs)
    warmed = min(1.0, epoch / options.warmup) if options.warmup else 1.0
    annealed = max(0, int(epoch) - options.anneal + 1)
    return options.lr * (1 + (scale - 1) * warmed) * 0.5 ** (annealed / 2)


class Trainer:
    """One learner, with its model, its optimizer and its part of the data."""

    def __init__(self, hvd: ModuleType, options: argparse.Namespace) -> None:
        self.hvd, self.options = hvd, options
        shape = shape_of(options, options.data)
        self.train = corpus.Split(options.data, "train", shape.context)
        self.dev = corpus.Split(options.data, "dev", shape.context)
        if len(self.train) < options.batch * hvd.size():
            raise Problem(
                f"--batch {options.batch} x {hvd.size()} learners is more than the "
                f"{len(self.train)} segments in {options.data}"
            )
        self.slowdown = self._chosen(options.slow, 1.0)
        self.lifetime = self._chosen(options.kill, math.inf)
        self.is_divided = hasattr(hvd, "DynamicBatchSampler")  # by speed; plain Horovod has none
        if self.is_divided:
            batches = self.sampler = hvd.DynamicBatchSampler(
                self.train, batch_size=options.batch, seed=options.seed
            )
        else:
            self.sampler = DistributedSampler(
                self.train, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
            )
            batches = BatchSampler(self.sampler, options.batch, drop_last=True)
        self.loader = DataLoader(self.train, sampler=batches, batch_size=None)
        torch.manual_seed(options.seed)
        self.model = make(shape)
        if options.init:
            start_from(options.init, self.model)
        optimizer = optimizer_for(options.optimizer, self.model, options.lr, options.momentum)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            **averaging(hvd, options.strategy, options.seed),
        )
        self.progress = {"epoch": 0, "samples": 0, "seconds": 0.0}
        self._restore()

    def _chosen(self, given: tuple[int, float] | None, otherwise: float) -> float:
        """Return the number of an option RANK:NUMBER if this learner has that rank.

        Raises:
            Problem: if no learner has that rank.
        """
        if given and given[0] >= self.hvd.size():
            raise Problem(f"--slow or --kill of learner {given[0]}: there are {self.hvd.size()}")
        return given[1] if given and given[0] == self.hvd.rank() else otherwise

    def _restore(self) -> None:
        """Broadcast rank 0's model, optimizer and progress, which are new or from the checkpoint.

        Call it after the optimizer is wrapped, because Horovod's wrapper does not take over momentum.
        """
        hvd, options = self.hvd, self.options
        if options.resume and hvd.rank() == 0:
            saved = journal.load(options.out / "checkpoint.pt")
            _compare(saved["settings"], self.settings(), options.out)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.progress = saved["progress"]
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.progress = hvd.broadcast_object(self.progress, root_rank=0)

    def settings(self) -> dict:
        """Return the settings in which a checkpoint must agree with this run to be continued."""
        run = ("strategy", "seed", "epochs", "batch", "optimizer")
        rates = ("lr", "scale", "momentum", "schedule", "warmup", "anneal")
        chosen = {name: getattr(self.options, name) for name in (*run, *rates)}
        chosen["init"] = str(self.options.init)
        chosen |= {"learners": self.hvd.size()}
        return chosen | asdict(self.model.shape)

    def epoch(self, epoch: int) -> float | None:
        """Train one epoch; return this learner's mean loss per frame, None if it had no minibatch."""
        self.sampler.set_epoch(epoch)
        self.model.train()
        steps, total, done, began = len(self.loader), 0.0, 0, time.perf_counter()
        with _bar(self.hvd, steps, epoch) as bar:
            for done, (frames, labels) in enumerate(self.loader, start=1):
                now = epoch + (done - 1) / steps
                if self.is_divided:  # what others did is known up to a second later
                    now = max(epoch, self.hvd.progress(self.sampler).epochs)
                if now >= self.lifetime:
                    self._die(now, time.perf_counter() - began)
                self._set_rate(now)
                total += self._step(frames, labels)
                bar.update()
        return total / done if done else None

    def _die(self, epochs: float, seconds: float) -> None:
        """Write killed.json, then end as a process that is killed."""
        died = {"epochs": epochs, "seconds": self.progress["seconds"] + seconds}
        (self.options.out / "killed.json").write_text(json.dumps(died) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def _step(self, frames: torch.Tensor, labels: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        began = time.perf_counter()
        loss = _loss(self.model(frames), labels) / max(1, int((labels >= 0).sum()))
        if self.slowdown > 1:  # before backward(), in which Horovod begins to send gradients
            passes = (1 + BACKWARD) * (time.perf_counter() - began)
            time.sleep((self.slowdown - 1) * passes)
        loss.backward()
        self.optimizer.step()
        if hasattr(self.hvd, "log"):  # plain Horovod has no hvd.log()
            self.hvd.log(loss=loss, lr=self.optimizer.param_groups[0]["lr"])
        return loss.item()

    def _set_rate(self, epoch: float) -> None:
        """Set the rate at an epoch of the job: a slow learner has the rate of the others."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.options, self.hvd.size(), epoch)

    def consensus(self) -> torch.nn.Module:
        """Return the mean of all super learners' models as a copy, so that training is not disturbed."""
        mean = copy.deepcopy(self.model)
        if is_asynchronous(self.options.strategy):
            self.hvd.average_model(mean)
        return mean

    def heldout(self, model: torch.nn.Module) -> tuple[float, float]:
        """Return cross-entropy and error rate per held-out frame; each learner evaluates a part of them."""
        mine = range(self.hvd.rank(), len(self.dev), self.hvd.size())
        total = self.hvd.allreduce(self._counted(model, mine), name="heldout", op=self.hvd.Sum)
        return float(total[0] / total[2]), float(total[1] / total[2])

    def combine(self) -> None:
        """Replace the model by the mean of all, with --combine weighted by 1 / each one's held-out loss."""
        weight = 1.0
        if self.options.combine == "weighted":
            total = self._counted(self.model, range(len(self.dev)))
            weight = float(total[2] / total[0])
        self.hvd.average_model(self.model, weight=weight)

    def _counted(self, model: torch.nn.Module, segments: range) -> torch.Tensor:
        """Return the sums of tally() over held-out segments: cross-entropy, wrong frames, known frames."""
        model.eval()
        total = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for chosen in BatchSampler(segments, 256, drop_last=False):
                frames, labels = (torch.from_numpy(part) for part in self.dev[chosen])
                total += tally(model(frames), labels)
        return total

    def checkpoint(self, mean: torch.nn.Module) -> None:
        """Write checkpoint.pt (on rank 0): the mean model, and the state needed to resume from it."""
        optimizer = self.optimizer.state_dict()
        # the model is the mean; tensors of a strategy may belong to this learner's own model
        if "averaging" in optimizer:
            optimizer["averaging"]["of_mean"] = True
        content = {
            "model": mean.state_dict(),
            "optimizer": optimizer,
            "progress": self.progress,
            "settings": self.settings(),
        }
        journal.save(self.options.out / "checkpoint.pt", content)


def tally(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return cross-entropy in nats, wrong frames, and frames of a known state, each a sum; shape (3,)."""
    known = labels >= 0
    wrong = (scores.argmax(-1) != labels) & known
    counts = [float(_loss(scores, labels)), float(wrong.sum()), float(known.sum())]
    return torch.tensor(counts, dtype=torch.float64)


def _loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of cross-entropy over frames; frames without a known state do not count."""
    return torch.nn.functional.cross_entropy(
        scores.flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="sum"
    )


def _bar(hvd: ModuleType, steps: int, epoch: int):
    """Return a progress bar of an epoch, shown by rank 0 and on a terminal only."""
    tqdm = require("tqdm", "tqdm").tqdm
    hidden = hvd.rank() != 0 or not sys.stderr.isatty()
    return tqdm(total=steps, desc=f"epoch {epoch + 1}", disable=hidden, leave=False)


def _compare(saved: dict, wanted: dict, folder: Path) -> None:
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise Problem(
                f"--resume: {folder}/checkpoint.pt has {name} {saved.get(name)}, this run has "
                f"{value}; give the same options, or start anew without --resume"
            )


def library_metrics(hvd: ModuleType) -> dict:
    """Return the finite numbers of hvd.metrics(), by path; an empty dictionary with plain Horovod.

    Others are left out, because JSON has no NaN, which for instance a mean over no exchanges is.
    """
    return dict(journal.scalars(hvd.metrics())) if hasattr(hvd, "metrics") else {}


def describe(entry: dict, epochs: int) -> str:
    """Return the line that describes an epoch's entry."""
    line = (
        f"epoch {entry['epoch']}/{epochs}  held-out {entry['heldout_loss']:.3f}  "
        f"frame errors {100 * entry['heldout_fer']:.1f} %  lr {entry['lr']:.3g}  "
        f"{entry['seconds']:.1f} s"
    )
    numbers = {path.rsplit("/", 1)[-1]: v for path, v in journal.scalars(entry["metrics"])}
    return line + "".join(f"  {name} {numbers[name]:.3g}" for name in SHOWN if name in numbers)


def train(hvd: ModuleType, options: argparse.Namespace) -> None:
    """Train, evaluate and record every epoch, and write model.pt at the end.

    Raises:
        Problem: on all learners, if the held-out loss is not finite.
    """
    began = time.perf_counter()
    trainer = Trainer(hvd, options)
    lead = hvd.rank() == 0
    done = trainer.progress["epoch"]
    log = journal.Journal(options.out, done if options.resume else -1) if lead else None
    if lead:
        count = sum(p.numel() for p in trainer.model.parameters())
        print(f"{options.strategy}: {hvd.size()} learners, {count:,} parameters", flush=True)
    for epoch in range(done if options.resume else -1, options.epochs):
        loss = _timed_epoch(trainer, epoch) if epoch >= 0 else None
        mean = trainer.consensus()
        heldout, errors = trainer.heldout(mean)
        if lead:
            entry = {
                **trainer.progress,
                "wall_seconds": time.perf_counter() - began,
                "heldout_loss": journal.number(heldout),
                "heldout_fer": errors,
                "train_loss": journal.number(loss),
                "lr": rate(options, hvd.size(), max(epoch, 0)),
                "metrics": library_metrics(hvd),
            }
            log.add(entry)
        _require_number(heldout, epoch + 1)
        if lead:
            trainer.checkpoint(mean)
            print(describe(entry, options.epochs), flush=True)
    if is_asynchronous(options.strategy):
        trainer.combine()
    if lead:
        final = {"model": trainer.model.state_dict(), "shape": asdict(trainer.model.shape)}
        journal.save(options.out / "model.pt", final)


def _require_number(heldout: float, epoch: int) -> None:
    if not math.isfinite(heldout):
        raise Problem(
            f"the held-out loss is {heldout} after epoch {epoch}: training diverged; lower --lr or "
            "--scale, or warm up longer"
        )


def _timed_epoch(trainer: Trainer, epoch: int) -> float | None:
    """Train an epoch, and update trainer.progress, whose seconds do not include evaluation."""
    start = time.perf_counter()
    loss = trainer.epoch(epoch)
    done, learners = trainer.progress, trainer.hvd.size()
    trainer.progress = {
        "epoch": epoch + 1,
        "samples": done["samples"] + len(trainer.loader) * trainer.options.batch * learners,
        "seconds": done["seconds"] + time.perf_counter() - start,
    }
    return loss


def started(options: argparse.Namespace) -> ModuleType:
    """Import and initialise the chosen Horovod, and make the folder of the run; return the module."""
    hvd = horovod_for(options.strategy)
    torch.set_num_threads(1)
    hvd.init()
    options.out.mkdir(parents=True, exist_ok=True)
    return hvd


def main() -> None:
    """Check the corpus before hvd.init(), so that a missing one raises a clear error at once; train."""
    options = arguments()
    corpus.read_json(options.data / "states.json")
    train(started(options), options)


if __name__ == "__main__":
    run(main)
