"""Exchanges between hosts some of whose links are slow: FOLDER. Each learner writes FOLDER/RANK.json."""

import json
import sys
import time
from pathlib import Path

import torch

import hvd_adpsgd.torch as hvd
from tests.sharing import Training

DEADLINE_S = 240.0
ENOUGH = 100  # exchanges of each learner


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    training = Training(500, 1000, idle_s=0.01, exchange_share=1.0)  # 2 MB
    ends, done = time.monotonic() + DEADLINE_S, False
    began = time.monotonic()
    while not done:
        for _ in range(20):
            training.step()
        assert time.monotonic() < ends, hvd.metrics()
        done = all(hvd.allgather_object(hvd.metrics()["exchanges"] >= ENOUGH))
    took_s = time.monotonic() - began
    with hvd.averaging_paused():
        drift = training.drift()
    facts = {
        "drift": drift,
        "met": training.met(),
        "exchanges_per_s": hvd.metrics()["exchanges"] / took_s,
    }
    (Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(facts))
    hvd.shutdown()


if __name__ == "__main__":
    main()
