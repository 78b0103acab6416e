"""Writes and reads the records of a training: a line of JSON per epoch, TensorBoard curves, checkpoints.

torch is imported inside functions, because demo.py only reads lines, and importing torch takes a second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from .problem import Problem


def scalars(tree: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all finite numbers of nested dictionaries, as (path, value)."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)


def number(value: float | None) -> float | None:
    """Return the value if it is finite, else None, because JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


class Journal:
    """Writer of a run's heldout.jsonl and TensorBoard events; only rank 0 has one."""

    def __init__(self, folder: Path, last_epoch: int) -> None:
        """Remove the entries after `last_epoch` (-1: all), to continue from that epoch."""
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "heldout.jsonl"
        kept = [entry for entry in read(self._path) if entry["epoch"] <= last_epoch]
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=last_epoch + 1)

    def add(self, entry: dict) -> None:
        """Append the entry of an epoch."""
        with self._path.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        for name, value in scalars(entry):
            self._board.add_scalar(name, value, entry["epoch"])
        self._board.flush()


def read(path: Path) -> list[dict]:
    """Return all entries of a heldout.jsonl, without a last line that is only partly written."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text().split("\n")[:-1] if line]
    return [json.loads(line) for line in whole]


def save(path: Path, content: dict) -> None:
    """Write a checkpoint atomically: if interrupted, the previous checkpoint stays."""
    import torch

    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path) -> dict:
    """Return the content of a checkpoint or model file.

    Raises:
        Problem: if the file is missing or unreadable.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Problem(f"no {path}; train first") from None
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ...
        raise Problem(f"{path} is no checkpoint ({type(error).__name__}); delete it") from error
