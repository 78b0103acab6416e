"""What averaging costs on one machine, as `bench calibrate` measures it and the planner uses it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.simulation.bounds import check_fields

__all__ = ["Calibration"]


@dataclass(frozen=True)
class Calibration:
    """Costs in seconds per byte of a float32 model; a file of it is a JSON object.

    Attributes:
        step_s_per_byte: of the leader in a step: publish, apply the corrections, fill the mirror.
        chunk_s_per_byte: of the engine's thread in an exchange: a snapshot, and a merge.
        machine: where it was measured.
        model_nbytes, chunk_nbytes: with which it was measured.
    """

    step_s_per_byte: float
    chunk_s_per_byte: float
    machine: str = ""
    model_nbytes: int = 0
    chunk_nbytes: int = 0

    def __post_init__(self) -> None:
        for name in ("step_s_per_byte", "chunk_s_per_byte"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"calibration: {name} is {value!r}, needed is a number of seconds per byte, 0 or more. "
                    "Write the file with `python -m hvd_adpsgd bench calibrate --out FILE`."
                )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            ConfigError: if it cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"calibration: {path} cannot be written ({error}). Pass a file in a folder that exists."
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """The calibration in a file.

        Raises:
            ConfigError: if there is none.
        """
        cure = "Write one with `python -m hvd_adpsgd bench calibrate --out FILE`."
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"calibration: {path} is no calibration file ({error}). {cure}"
            ) from error
        check_fields(f"calibration: {path}", values, cls, cure)
        return cls(**values)
