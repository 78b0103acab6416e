"""Runs a learner's program, with its tensors on devices that lag behind the host.

on_devices.py PROGRAM ARGUMENT ...

TEST_DEVICES in the environment is the seed of what the devices do when.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_adpsgd.training import devices
from tests.lagging import Lagging, Scheduler

if __name__ == "__main__":
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    lagging = Lagging(Scheduler(1000 * int(os.environ["TEST_DEVICES"]) + rank))
    devices.KINDS["cpu"] = lambda device: lagging
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
