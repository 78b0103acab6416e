"""exchange_share="auto" on a link whose speed another process changes: FOLDER.

Each learner trains in three phases, and leaves FOLDER/PHASE.RANK when its share has risen or fallen. The
phase ends when FOLDER/PHASE.changed is there: the link has changed. At the end it writes FOLDER/RANK.json.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import hvd_adpsgd.torch as hvd
from tests.sharing import Training

DEADLINE_S = 240.0
PHASES = ("fast", "slow", "fast")
CHOOSES_BITS = os.environ.get("HVD_ADPSGD_WIRE_DTYPE") == "auto"


def has_settled(phase: str, share: float, bits: int) -> bool:
    """Whether share and bits are those of the link."""
    if phase == "fast":
        return share > 1 / 4 and bits == 0
    return bits == 4 if CHOOSES_BITS else share < 1 / 24


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    # 8 MB: 6.4 s at 10 Mb/s; a chunk 52 ms
    training = Training(1000, 2000, idle_s=0.08, exchange_share="auto")
    ends = time.monotonic() + DEADLINE_S
    seen: list[dict[str, float]] = []
    for number, phase in enumerate(PHASES):
        began, steps, is_over = time.monotonic(), 0, False
        while not (folder / f"{number}.changed").exists():
            assert time.monotonic() < ends, (phase, seen, hvd.metrics())
            training.step()
            steps += 1
            metrics = hvd.metrics()
            share, bits = metrics["exchange_share"], metrics["exchange_bits"]
            if not is_over and has_settled(phase, share, bits):
                is_over = True
                took_s = time.monotonic() - began
                seen.append({"number": number, "share": share, "steps": steps, "s": took_s})
                (folder / f"{number}.{hvd.rank()}").touch()
    with hvd.averaging_paused():
        drift = training.drift()
    facts = {"seen": seen, "drift": drift}
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(facts))
    hvd.shutdown()


if __name__ == "__main__":
    main()
