"""The clock of a learner, copies of its model at fixed times, and what disturbs it.

A thread copies the model at the same times under every scheme, so copies cost each scheme equally, and no
learner waits for them. A copy may hold parameters from before and after one step. It is evaluated after the
run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

START_S = 600.0  # longest wait for the start
LEFT_S = 120.0  # after the last copy a learner that a killed study has left behind ends itself
BACKWARD = 2.0  # time of a backward pass / time of a forward pass
POLL_S = 0.02


def copy_file(folder: Path, number: int, rank: int) -> Path:
    """Parameters of a learner at a time, float32, one after the other."""
    return folder / f"copy-{number}-{rank}"


def log_file(folder: Path, rank: int) -> Path:
    """A line of JSON for each copy of a learner that is complete."""
    return folder / f"copies-{rank}.jsonl"


def ready_file(folder: Path, rank: int) -> Path:
    """A file that exists when a learner is ready to train."""
    return folder / f"ready-{rank}"


def ended_file(folder: Path, rank: int) -> Path:
    """A file with the seconds after which the training of a learner has failed."""
    return folder / f"ended-{rank}"


def start_file(folder: Path) -> Path:
    """A file with the time, by the monotonic clock, at which all learners start."""
    return folder / "start"


class Recorder:
    """Copies a model at given times of a training.

    Args:
        folder: where copies are written.
        rank: of this learner.
        model: its model.
        times: seconds since the start, ascending.
        slow: this learner takes so many times as long for a step.
        killed_s: seconds after the start at which this learner is killed; None: never.

    Attributes:
        steps: steps of this learner so far.
    """

    def __init__(
        self, folder: Path, rank: int, model: nn.Module, times: Sequence[float], slow: float = 1.0,
        killed_s: float | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.rank, self.times, self.steps = folder, rank, times, 0
        self._parameters = list(model.parameters())
        self._slow, self._killed_s = slow, killed_s
        self._forward_s = self._began = 0.0
        self._over = False
        self._left = threading.Event()

    def start(self) -> None:
        """Tell that this learner is ready, and wait for the time at which all start."""
        ready_file(self.folder, self.rank).touch()
        ends = time.monotonic() + START_S
        while not start_file(self.folder).exists():
            if time.monotonic() > ends:
                raise TimeoutError(f"no {start_file(self.folder)} after {START_S:.0f} s")
            time.sleep(POLL_S)
        self._began = float(start_file(self.folder).read_text())
        time.sleep(max(0.0, self._began - time.monotonic()))
        self._forward_s = time.monotonic()
        threading.Thread(target=self._record, daemon=True).start()
        if self._killed_s is not None:
            threading.Thread(target=self._die, daemon=True).start()

    @contextlib.contextmanager
    def until_failure(self) -> Iterator[None]:
        """A context of the training. If it fails, no copy is made any more, and the time is noted."""
        try:
            yield
        except BaseException:
            self._over = True
            seconds = time.monotonic() - self._began
            ended_file(self.folder, self.rank).write_text(repr(seconds))
            raise

    def before_forward(self) -> None:
        """Note the time at which the forward pass begins."""
        self._forward_s = time.monotonic()

    def before_backward(self) -> None:
        """Let a slow learner sleep, before the gradients are sent, as if its passes had taken longer."""
        passes = (1 + BACKWARD) * (time.monotonic() - self._forward_s)
        time.sleep((self._slow - 1) * passes)

    def _record(self) -> None:
        for number, at in enumerate(self.times):
            self._sleep_until(at)
            if self._over:
                return
            steps = self.steps
            # data: PostLocalSGD gives parameters other memory at each mean
            whole = torch.cat([p.data.reshape(-1) for p in self._parameters])
            seconds = time.monotonic() - self._began
            whole.numpy().astype(np.float32, copy=False).tofile(
                copy_file(self.folder, number, self.rank)
            )
            with log_file(self.folder, self.rank).open("a") as log:
                log.write(json.dumps({"number": number, "seconds": seconds, "steps": steps}) + "\n")

        if not self._left.wait(LEFT_S):
            os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """Let this process live on when all copies are made."""
        self._left.set()

    def _die(self) -> None:
        self._sleep_until(self._killed_s or 0.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _sleep_until(self, at: float) -> None:
        time.sleep(max(0.0, self._began + at - time.monotonic()))


def copied(folder: Path, number: int, rank: int) -> dict[str, Any] | None:
    """Return seconds and steps of a complete copy of a learner; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        for line in log_file(folder, rank).read_text().splitlines(keepends=True):
            if line.endswith("\n") and (told := json.loads(line))["number"] == number:
                return dict(told)
    return None
