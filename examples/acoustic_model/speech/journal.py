"""What a run leaves behind: a line of JSON per epoch, TensorBoard curves, checkpoints.

torch is imported where it is needed: demo.py only reads lines, and should not wait a second for it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from .problem import Problem


def scalars(tree: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    """All finite numbers of nested dictionaries, as (path, value)."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)


def number(value: float | None) -> float | None:
    """The value if it is finite; None, which JSON knows, if it is not."""
    return value if value is not None and math.isfinite(value) else None


class Journal:
    """heldout.jsonl and TensorBoard events of one run; rank 0 has one, others have none."""

    def __init__(self, folder: Path, last_epoch: int) -> None:
        """Continue after `last_epoch`, or begin anew with -1: later lines are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / "heldout.jsonl"
        kept = [entry for entry in read(self._path) if entry["epoch"] <= last_epoch]
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=last_epoch + 1)

    def add(self, entry: dict) -> None:
        """Append one epoch."""
        with self._path.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        for name, value in scalars(entry):
            self._board.add_scalar(name, value, entry["epoch"])
        self._board.flush()


def read(path: Path) -> list[dict]:
    """All epochs of a heldout.jsonl; a last line that was cut short is left out."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text().split("\n")[:-1] if line]
    return [json.loads(line) for line in whole]


def save(path: Path, content: dict) -> None:
    """Write a checkpoint: the whole of it or, if interrupted, the previous one."""
    import torch

    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path) -> dict:
    """Read a checkpoint or model.

    Raises:
        Problem: if it is missing or unreadable.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise Problem(f"no {path}; train first: python -m examples.acoustic_model.train") from None
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ...
        raise Problem(f"{path} is no checkpoint ({type(error).__name__}); delete it") from error
