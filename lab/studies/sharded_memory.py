"""Memory per learner and speed of a transformer: DistributedDataParallel beside fully_shard, both inside.

    python -m lab.studies.sharded_memory                      4 learners, 2 super learners; ten minutes
    python -m lab.studies.sharded_memory --layers 2 --width 64 --steps 3

Each way runs in a job of its own, in turns. A learner's peak is the resident memory (VmHWM) that training
adds to a process which has imported everything and is connected. Of it, after the last step: `tensors` are
parameters, gradients and the optimizer's state; `engine` is the memory of engines that the learner maps: its
own or its leader's, and that of a peer on this host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

LEARNERS, SIZE = 4, 2
WAYS = ("ddp", "fully_shard")
MARK = "@memory "
SIZES = ("peak", "tensors", "engine")
VOCABULARY, LENGTH, BATCH = 1000, 32, 2
MIB = 2**20


def transformer(layers: int, width: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, width),
        *(
            torch.nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        ),
        torch.nn.Linear(width, VOCABULARY),
    )


def resident(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def held(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and the optimizer's state that this learner has."""
    states = optimizer.state.items()
    values = [value for p, state in states for value in (p, p.grad, *state.values())]
    parts = (v.to_local() if isinstance(v, DTensor) else v for v in values)
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def train(options: argparse.Namespace) -> None:
    """One learner: train, and say what it has held."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import hvd_adpsgd.torch as hvd

    hvd.init()
    group = hvd.super_learner_group()
    torch.manual_seed(0)
    # the first fully_shard and DistributedDataParallel of a process import much
    fully_shard(torch.nn.Linear(1, 1))
    DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")

    module = transformer(options.layers, options.width)
    numbers = sum(p.numel() for p in module.parameters())
    model: torch.nn.Module = module
    if options.learner == "ddp":
        model = DistributedDataParallel(module, process_group=group)
    else:
        for layer in module[1:-1]:
            fully_shard(layer)
        fully_shard(module)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4), named_parameters=model.named_parameters()
    )
    data = torch.Generator().manual_seed(hvd.rank())
    began = 0.0
    for step in range(options.steps):
        words = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=data)
        optimizer.zero_grad()
        output = model(words)
        torch.nn.functional.cross_entropy(output.flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        if step == 1:  # the optimizer's state and the engine exist
            began = time.perf_counter()
    seconds = (time.perf_counter() - began) / (options.steps - 2)
    facts = {
        "rank": hvd.rank(),
        "numbers": numbers,
        "peak": resident("VmHWM") - before,
        "tensors": held(optimizer),
        "engine": resident("RssShmem"),
        "steps/s": 1 / seconds,
        "exchanges": hvd.metrics()["exchanges"],
    }
    everyone = hvd.allgather_object(facts)
    if hvd.rank() == 0:
        print(MARK + json.dumps(everyone), flush=True)


def job(way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each learner of one job says."""
    command = f"-m torch.distributed.run --nproc-per-node {LEARNERS} -m lab.studies.sharded_memory"
    command += f" --learner {way} --layers {options.layers} --width {options.width} --steps {options.steps}"
    env = {"OMP_NUM_THREADS": "1", **os.environ, "HVD_ADPSGD_INNER": "torch"}
    env["HVD_ADPSGD_SUPER_LEARNER_SIZE"] = str(SIZE)
    done = subprocess.run(
        [sys.executable, *command.split()], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    told: list[dict[str, Any]] = json.loads(line.removeprefix(MARK))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=16)
    add("--width", type=int, default=512)
    add("--steps", type=int, default=12)
    add("--rounds", type=int, default=2, help="jobs of each way")
    add("--learner", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learner:
        train(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run the jobs, and print the most memory and all speeds of each learner."""
    jobs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            jobs[way].append(job(way, options))
    numbers = jobs[WAYS[0]][0][0]["numbers"]
    print(
        f"{numbers / 1e6:.1f} M parameters, {4 * numbers / MIB:.0f} MiB; AdamW, {LEARNERS} learners"
    )
    print(
        "inside       learner " + "".join(f"{name:>9}" for name in SIZES) + "  steps/s   exchanges"
    )
    for way, learner in itertools.product(WAYS, range(LEARNERS)):
        mine = [told[learner] for told in jobs[way]]
        sizes = (max(facts[name] for facts in mine) // MIB for name in SIZES)
        speed = " to ".join(f"{rate:.2f}" for rate in sorted(facts["steps/s"] for facts in mine))
        exchanges = sum(facts["exchanges"] for facts in mine)
        columns = "".join(f"{size:9}" for size in sizes)
        print(f"{way:12} {learner:7} {columns}  {speed:13} {exchanges:5}")


if __name__ == "__main__":
    main()
