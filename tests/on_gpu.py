"""Runs a learner's program, with its tensors on a GPU where it names no device.

on_gpu.py PROGRAM ARGUMENT ...

TEST_GPU in the environment is the number of that GPU. With TEST_NCCL learners that share it use NCCL, which
takes each for a host of its own.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

GPU = torch.device("cuda", int(os.environ["TEST_GPU"]))


class Generator(torch.Generator):
    """On that GPU by default: numbers drawn there need one there."""

    def __new__(cls, device: Any = GPU) -> "Generator":
        return super().__new__(cls, device=device)


if __name__ == "__main__":
    if "TEST_NCCL" in os.environ:
        os.environ["NCCL_HOSTID"] = str(os.getpid())
    torch.set_default_device(GPU)
    torch.Generator = Generator  # type: ignore[misc]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
