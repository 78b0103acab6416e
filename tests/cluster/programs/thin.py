"""Two hosts and a link on which one exchange takes longer than anybody waits when it leaves: FOLDER.

The first learner ends in the middle of an exchange; the second one trains on until it has seen it go. Each
writes FOLDER/RANK.json: how often its engine looked while chunks went to and fro, how many it had merged by
then, and what it knows of losses.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.training.presence import live

LOOK_S = 2.0
AFTER = 6  # chunks, of 120
DEADLINE_S = 150.0


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(3840, 2048, bias=False)  # 30 MiB
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    engine = live()[0].engine
    loop: Any = engine.loop
    ends = time.monotonic() + DEADLINE_S

    def train(until: Any) -> None:
        while not until():
            assert time.monotonic() < ends, engine.view()
            optimizer.zero_grad()
            model(torch.randn(2, 3840)).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)  # the rest of a gradient

    train(lambda: loop.counters()["chunks"] >= AFTER)
    before, began = loop.counters()["turns"], time.monotonic()
    train(lambda: time.monotonic() > began + LOOK_S)
    facts = {"turns_per_s": (loop.counters()["turns"] - before) / (time.monotonic() - began)}
    facts["merged"] = loop.counters()["chunks"]
    if hvd.rank() == 1:
        train(lambda: state(loop) in ("left", "lost"))
        facts["state"] = state(loop)
    facts["lost"] = hvd.failed_ranks()
    Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(facts))
    hvd.shutdown()


def state(loop: Any) -> str:
    """Of the first super learner."""
    return str(loop.view()["peers"][0]["state"])


if __name__ == "__main__":
    main()
