"""Trains text or speech under one of five schemes; `python -m lab.studies.claim` starts its learners.

The loop has no end: when each learner has written its last copy, the study ends them all. So no scheme needs
a message by which its learners agree on the last step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: learners share the cores

import torch

from examples.acoustic_model.speech.problem import new_parser, run, within
from lab.studies.claim import tasks
from lab.studies.claim.recorder import Recorder
from lab.studies.claim.schemes import SCHEMES


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a learner."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--task", choices=tasks.NAMES, required=True)
    add("--scheme", choices=tuple(SCHEMES), required=True)
    add("--seed", type=int, required=True)
    add("--speech", type=Path, required=True, help="folder of the prepared speech")
    add("--quick", action="store_true", help="a tiny model")
    add("--times", type=float, nargs="+", required=True, help="seconds at which models are copied")
    add("--slow", type=float, default=1.0, help="how many times as long the last learner computes")
    add("--kill", type=float, help="seconds after which the last learner is killed")
    add("--folder", type=Path, required=True, help="where copies are written")
    options = parser.parse_args(argv)
    within("--slow", options.slow, 1, 1e6)
    return options


def main() -> None:
    """Train without end."""
    options = arguments()
    torch.set_num_threads(1)
    task = tasks.named(options.task, options.quick, options.speech)
    scheme = SCHEMES[options.scheme](task.outer)
    rank, size = scheme.start()
    torch.manual_seed(options.seed)  # the same first model on all learners
    model = task.model()
    inner = task.optimizer(model.parameters())
    rate = inner.param_groups[0]["lr"]
    batches = task.batches(rank, size, options.seed)
    task.loss(model, next(batches)).backward()  # the first passes allocate memory, and take longer
    inner.zero_grad()
    called, optimizer = scheme.wrap(model, inner)
    last = rank == size - 1
    recorder = Recorder(
        options.folder, rank, model, options.times, options.slow if last else 1.0,
        options.kill if last else None,
    )  # fmt: skip
    recorder.start()
    with recorder.until_failure(), scheme.training():
        for batch in batches:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (recorder.steps + 1) / tasks.WARM_UP)
            optimizer.zero_grad()
            recorder.before_forward()
            loss = task.loss(called, batch)
            recorder.before_backward()
            loss.backward()
            optimizer.step()
            recorder.steps += 1


if __name__ == "__main__":
    run(main)
