"""exchange_share="auto" on a link whose speed another process changes: FOLDER.

Each learner trains in three phases, and leaves FOLDER/PHASE.RANK when its share has risen or fallen. The
phase ends when FOLDER/PHASE.changed is there: the link has changed. At the end it writes FOLDER/RANK.json.
"""

import json
import sys
import time
from pathlib import Path

import torch

import hvd_adpsgd.torch as hvd

DEADLINE_S = 240.0
PHASES = ("fast", "slow", "fast")


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    folder = Path(sys.argv[1])
    model = torch.nn.Linear(2000, 1000, bias=False)  # 8 MB: 6.4 s at 10 Mb/s; a chunk 52 ms
    with torch.no_grad():
        model.weight.copy_(torch.randint(-1000, 1000, model.weight.shape) / 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=model.named_parameters(),
        exchange_share="auto",
    )
    before = hvd.allreduce(model.weight.detach().double(), op=hvd.Average)
    ends = time.monotonic() + DEADLINE_S
    seen: list[dict[str, float]] = []
    for number, phase in enumerate(PHASES):
        began, steps, is_over = time.monotonic(), 0, False
        while not (folder / f"{number}.changed").exists():
            assert time.monotonic() < ends, (phase, seen, hvd.metrics())
            optimizer.zero_grad()
            model(torch.ones(1, 2000)).sum().backward()
            time.sleep(0.08)  # the rest of a gradient
            optimizer.step()
            steps += 1
            share = hvd.metrics()["exchange_share"]
            if not is_over and (share > 1 / 4 if phase == "fast" else share < 1 / 24):
                is_over = True
                took_s = time.monotonic() - began
                seen.append({"number": number, "share": share, "steps": steps, "s": took_s})
                (folder / f"{number}.{hvd.rank()}").touch()
    with hvd.averaging_paused():
        now = hvd.allreduce(model.weight.detach().double(), op=hvd.Average)
    facts = {"seen": seen, "drift": (now - before).abs().max().item()}
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(facts))
    hvd.shutdown()


if __name__ == "__main__":
    main()
