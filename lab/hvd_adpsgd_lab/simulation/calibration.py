"""The cost of averaging on one machine, which `bench calibrate` measures and the planner uses."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.bounds import check_fields


@dataclass(frozen=True)
class Calibration:
    """Costs of averaging in seconds per byte of a float32 model; written to a file as a JSON object.

    Attributes:
        step_s_per_byte: time of the leader in a step: publish and apply the corrections, copy the model into
            the engine's copy of it (mirror).
        chunk_s_per_byte: time of the engine's thread in an exchange: copy the chunk that is sent (snapshot),
            and add the received chunk (merge).
        machine: the machine on which the costs were measured.
        model_nbytes, chunk_nbytes: bytes of the model, and of its chunks, with which the costs were measured.
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
        """Write the calibration to a file.

        Raises:
            ConfigError: if the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"calibration: {path} cannot be written ({error}). Pass a file in a folder that exists."
            ) from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read the calibration from a file.

        Raises:
            ConfigError: if the file cannot be read, or holds no calibration.
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
