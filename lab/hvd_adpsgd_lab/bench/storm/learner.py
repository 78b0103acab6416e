"""A learner of `bench storm`: a process of one slot, which the driver starts and ends.

It imports torch only after its first line is written, so that the time of imports is known.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from hvd_adpsgd_lab.bench.storm.notes import Notes


def notes_file(folder: Path, slot: int, pid: int) -> Path:
    """The lines of a learner."""
    return folder / f"learner-{slot}-{pid}.jsonl"


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    slot = settings.get("slot")
    if slot is None:  # horovodrun starts all learners by one command
        slot = int(os.environ["HOROVOD_RANK"])
    settings["slot"] = slot
    notes = Notes(notes_file(Path(settings["folder"]), slot, os.getpid()), slot=slot)
    notes.add("started", pid=os.getpid())
    importlib.import_module("hvd_adpsgd_lab.bench.storm.training").train(settings, notes)


if __name__ == "__main__":
    main()
