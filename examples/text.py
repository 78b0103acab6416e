"""Trains a GPT that predicts the next byte of a text: AdamW, warm-up and cosine, clipping, accumulation.

    horovodrun -np 4 python examples/text.py                        # 0.5 M parameters, a minute on two cores
    horovodrun -np 4 python examples/text.py --width 320 --layers 8 --length 256      # 10 M parameters
    horovodrun -np 4 python examples/text.py --horovod              # plain Horovod, for comparison
    python examples/text.py --data my.txt other.txt                 # one learner, another text

Without --data the text is the source of Python's standard library. With HVD_ADPSGD_SUPER_LEARNER_SIZE=1 each
learner of one machine is a super learner. Needs torch and hvd_adpsgd only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HELD_OUT = 0.05  # last part of the text, for evaluation only
EVALUATED = 64  # sequences per evaluation


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", help="text files (default: Python's standard library)")
    add("--out", type=Path, default=Path("out/text"), help="folder (default: out/text)")
    add("--steps", type=int, default=300, help="of a learner, on average (default: 300)")
    add("--batch", type=int, default=8, help="sequences of a learner per pass (default: 8)")
    add("--passes", type=int, default=1, help="passes per step, whose gradients are summed")
    add("--length", type=int, default=64, help="bytes in a sequence (default: 64)")
    add("--width", type=int, default=128, help="a multiple of 32 (default: 128)")
    add("--layers", type=int, default=2)
    add("--rate", type=float, default=4e-3, help="highest learning rate (default: 4e-3)")
    add("--warm-up", type=int, default=50, help="steps (default: 50)")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient (default: 1)")
    add("--every", type=int, default=50, help="steps between evaluations (default: 50)")
    add("--seed", type=int, default=0)
    add("--horovod", action="store_true", help="plain Horovod in place of hvd_adpsgd")
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "passes", "length", "layers", "every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, allowed are numbers from 1")
    if options.steps % options.every:
        parser.error(
            f"--steps is {options.steps}, allowed are multiples of --every {options.every}"
        )
    if options.width < 1 or options.width % 32:
        parser.error(f"--width is {options.width}, allowed are multiples of 32: a head has 32")
    for path in options.data or ():
        if not path.is_file():
            parser.error(f"--data {path} is no file")
    return options


# ---- text ---------------------------------------------------------------------------------------


class Text:
    """Bytes of some files, of which sequences are drawn at random.

    Args:
        files: text files; None: the modules of Python's standard library.
        length: bytes in a sequence.
    """

    def __init__(self, files: list[Path] | None, length: int) -> None:
        files = files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        whole = torch.frombuffer(
            bytearray(b"\n".join(map(Path.read_bytes, files))), dtype=torch.uint8
        )
        cut = int((1 - HELD_OUT) * len(whole))
        if len(whole) - cut <= length + 1:
            raise SystemExit(
                f"error: {len(whole)} bytes are too few for sequences of {length} bytes"
            )
        self.train, self.held_out, self.length = whole[:cut], whole[cut:], length

    def batch(
        self, bytes_: torch.Tensor, n: int, random: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return n sequences of `bytes_`, and the same one byte later; each of shape (n, length)."""
        starts = torch.randint(len(bytes_) - self.length - 1, (n, 1), generator=random)
        found = bytes_[starts + torch.arange(self.length + 1)].long()
        return found[:, :-1], found[:, 1:]


# ---- model --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention, then two linear layers, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.inputs(self.norms[0](x)).view(n, length, 3, self.heads, 32)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.layers(self.norms[1](x))


class GPT(nn.Module):
    """Blocks between the embeddings of bytes and places, and the logits of the next byte."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, 256)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places.weight[: x.shape[1]]
        return self.logits(self.norm(self.blocks(self.bytes(x) + places)))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], cast: Any) -> torch.Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    inputs, labels = batch
    with cast:
        logits = model(inputs)
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


# ---- optimizer ----------------------------------------------------------------------------------


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW whose weight decay leaves out vectors: biases and the weights of norms."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def cosine(
    optimizer: torch.optim.Optimizer,
    warm_up: int,
    steps: int,
    job: Callable[[int], float] = float,
) -> torch.optim.lr_scheduler.LambdaLR:
    """A linear warm-up, then a cosine from the optimizer's rate to a tenth of it.

    `job` returns the steps of a learner of the job on average, by those of this one.
    """

    def factor(own: int) -> float:
        step = job(own)
        if step < warm_up:
            return (step + 1) / warm_up
        part = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * part))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def autocast(device: torch.device) -> Any:
    """bfloat16 where the device multiplies it fast, else float32; bfloat16 needs no GradScaler."""
    if device.type == "cpu":
        fast = (
            "bf16" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
        )
    else:
        fast = torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


# ---- training -----------------------------------------------------------------------------------


def train(hvd: ModuleType, options: argparse.Namespace) -> None:
    """Train, evaluate the mean model every --every steps, and save it."""
    began = time.perf_counter()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(options.seed)
    text = Text(options.data, options.length)
    model = GPT(options.width, options.layers, options.length).to(device)
    optimizer = hvd.DistributedOptimizer(
        adamw(model, options.rate),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=options.passes,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    per_step = options.batch * options.passes * hvd.size()  # sequences of all learners
    # what learners draw until the next evaluation: sizes count, not the indices
    drawn: Any = [range(options.batch)] * (options.every * options.passes)
    if not options.horovod:
        drawn = hvd.DynamicBatchSampler(options.every * per_step, batch_size=options.batch)
    job = float if options.horovod else lambda _: hvd.progress().samples / per_step
    scheduler = cosine(optimizer, options.warm_up, options.steps, job)
    cast = autocast(device)
    random = torch.Generator().manual_seed(options.seed * 100_003 + hvd.rank())
    coordinates = hvd.is_coordinator if hasattr(hvd, "is_coordinator") else lambda: hvd.rank() == 0
    if coordinates():
        count = sum(p.numel() for p in model.parameters())
        print(f"{hvd.size()} learners, {count:,} parameters", flush=True)

    for step in range(0, options.steps + 1, options.every):
        with averaged(hvd, model):
            evaluated = held_out(model, text, cast, device)
            if coordinates():
                seconds = time.perf_counter() - began
                tell(options.out, {"step": step, "seconds": seconds, "held_out": evaluated})
                if step == options.steps:
                    torch.save(model.state_dict(), options.out / "model.pt")
        if step == options.steps:
            break
        batches = iter(drawn)
        while passes := list(itertools.islice(batches, options.passes)):
            optimizer.zero_grad()
            for indices in passes:
                batch = text.batch(text.train, len(indices), random)
                loss = loss_of(model, tuple(part.to(device) for part in batch), cast)
                (loss / len(passes)).backward()
            optimizer.synchronize()  # averages where backward() has not: plain Horovod, a short step
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            with optimizer.skip_synchronize():
                optimizer.step()  # averages models between super learners
            scheduler.step()
            if hasattr(hvd, "log"):
                hvd.log(loss=loss, lr=scheduler.get_last_lr()[0])


def averaged(hvd: ModuleType, model: nn.Module) -> Any:
    """Inside, the model is the mean of all; under plain Horovod every model is that already."""
    return hvd.averaged(model) if hasattr(hvd, "averaged") else contextlib.nullcontext()


@torch.no_grad()
def held_out(model: nn.Module, text: Text, cast: Any, device: torch.device) -> float:
    """Return the loss on the same sequences of the held-out text each time."""
    batch = text.batch(text.held_out, EVALUATED, torch.Generator().manual_seed(7))
    return loss_of(model, tuple(part.to(device) for part in batch), cast).item()


def tell(folder: Path, entry: dict[str, float]) -> None:
    """Print an evaluation, and append it to heldout.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "heldout.jsonl").open("w" if entry["step"] == 0 else "a") as lines:
        lines.write(json.dumps(entry) + "\n")
    print(
        f"step {entry['step']:5}  held-out {entry['held_out']:.3f} nats per byte  "
        f"{entry['seconds']:.0f} s",
        flush=True,
    )


def main() -> None:
    options = arguments()
    hvd = importlib.import_module("horovod.torch" if options.horovod else "hvd_adpsgd.torch")
    hvd.init()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hvd.local_size()))
    train(hvd, options)
    hvd.shutdown()


if __name__ == "__main__":
    main()
