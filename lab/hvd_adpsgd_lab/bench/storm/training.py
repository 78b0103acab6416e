"""The loop of a learner: a step computes once, and sleeps until its time is over.

Many learners share few cores, so that most of a step's time is sleep, under all schemes alike. It lies
between the backward pass and the optimizer, where gradients or models may be on their way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_adpsgd_lab.bench.storm import model as work
from hvd_adpsgd_lab.bench.storm.notes import (
    Notes,
    began_file,
    copy_file,
    fault_file,
    over_file,
)
from hvd_adpsgd_lab.bench.storm.schemes import SCHEMES

_HELD_EVERY_S = 5.0  # between two lines about memory and descriptors
_LATE_S = 1.0  # a copy that is later belongs to no time: the learner was stopped
_POLL_S = 0.05


def train(settings: dict[str, Any], notes: Notes) -> None:
    """Train until the driver says that all is over.

    Args:
        settings: see driver.settings.
        notes: gets a line for each event.
    """
    torch.set_num_threads(1)
    scheme = SCHEMES[settings["scheme"]](settings)
    notes.add("imported")
    scheme.start()
    notes.add("entered")
    torch.manual_seed(settings["seed"])  # the same first model in all slots
    model = work.GPT(settings["width"], settings["layers"], settings["length"])
    optimizer = scheme.wrap(model, work.adamw(list(model.parameters()), settings["rate"]))
    steps = scheme.begin(model, optimizer)
    notes.add("joined", steps=steps)
    Copies(settings, model).start()
    over = over_file(Path(settings["folder"]))
    loop = Loop(settings, model, optimizer)
    held_s = 0.0
    with scheme.training():
        while not over.exists():
            loss = loop.step()
            steps += 1
            scheme.after_step(model, optimizer, steps)
            now = time.monotonic()
            notes.add("step", n=steps, loss=round(loss, 4), **scheme.shown())
            if now - held_s > _HELD_EVERY_S:
                held_s = now
                notes.add("held", rss=_resident(), descriptors=len(os.listdir("/proc/self/fd")))
        notes.add("over", steps=steps)
    scheme.close()
    notes.add("closed")


class Loop:
    """Makes steps.

    Args:
        settings: of the learner.
        model, optimizer: what is trained.
    """

    def __init__(self, settings: dict[str, Any], model: nn.Module, optimizer: Any):
        self._model, self._optimizer = model, optimizer
        self._text, self._batch = work.Text(settings["length"]), settings["batch"]
        # a replacement draws other sequences than the learner before it
        seed = settings["seed"] * 1_000_003 + settings["slot"] * 10_007 + os.getpid()
        self._chance = torch.Generator().manual_seed(seed)
        self._step_s = settings["step_s"]
        self._fault = fault_file(Path(settings["folder"]), settings["slot"])

    def step(self) -> float:
        """Make a step; return its loss."""
        ends = time.monotonic() + self._step_s * self._factor()
        self._optimizer.zero_grad()
        loss = work.loss_of(self._model, self._text.batch(self._batch, self._chance))
        loss.backward()
        time.sleep(max(0.0, ends - time.monotonic()))  # stands for the rest of the computation
        self._optimizer.step()
        return loss.item()

    def _factor(self) -> float:
        with contextlib.suppress(FileNotFoundError):
            factor, until = map(float, self._fault.read_text().split())
            return factor if time.monotonic() < until else 1.0
        return 1.0


class Copies(threading.Thread):
    """Copies the model at times that all learners share, without a word between them.

    A copy may hold parameters from before and after one step.
    """

    def __init__(self, settings: dict[str, Any], model: nn.Module):
        super().__init__(daemon=True, name="copies")
        self._folder, self._slot = Path(settings["folder"]), settings["slot"]
        self._every_s, self._model = settings["every_s"], model

    def run(self) -> None:
        """Write a copy at each time."""
        began = began_file(self._folder)
        while not began.exists():
            time.sleep(_POLL_S)
        zero = float(began.read_text())
        while True:
            number = max(0, int((time.monotonic() - zero) // self._every_s) + 1)
            due = zero + number * self._every_s
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() < due + _LATE_S:
                self._write(number)

    def _write(self, number: int) -> None:
        with torch.no_grad():
            whole = torch.cat([p.detach().reshape(-1) for p in self._model.parameters()])
        file = copy_file(self._folder, number, self._slot)
        new = file.with_suffix(".new")
        whole.numpy().tofile(new)
        new.replace(file)


def _resident() -> int:
    """Return the resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
