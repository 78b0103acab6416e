"""The held-out loss of the mean model over time, after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_adpsgd_lab.bench.storm import model as work
from hvd_adpsgd_lab.bench.storm.notes import mean_file


@torch.no_grad()
def losses(settings: dict[str, Any], seconds: float) -> list[tuple[float, float]]:
    """Return (seconds since the begin, loss in nats) for each time of the run's means.

    Args:
        settings: see driver.perform.
        seconds: length of the run.
    """
    torch.manual_seed(settings["seed"])
    model = work.GPT(settings["width"], settings["layers"], settings["length"])
    batch = work.Text(settings["length"]).held_out()
    found = []
    for number in range(1, int(seconds / settings["every_s"]) + 1):
        file = mean_file(Path(settings["folder"]), number)
        if file.exists():
            work.load(model, np.load(file))
            found.append((number * settings["every_s"], work.loss_of(model, batch).item()))
    return found
