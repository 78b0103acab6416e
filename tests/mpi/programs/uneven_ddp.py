"""DDP over Lhotse manifests of different lengths: RANK FOLDER DATA MANIFEST0 MANIFEST1.

Prints the steps that this learner has made, and ends with an error if its peer's gradients do not come.
"""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from examples.real_speech import corpus
from examples.real_speech.cuts import CutBatches
from examples.real_speech.model import Recogniser, Shape, loss

PATIENCE = datetime.timedelta(seconds=30)


def main() -> None:
    rank, folder, data, *manifests = sys.argv[1:]
    place = f"file://{folder}/store"
    dist.init_process_group("gloo", place, PATIENCE, world_size=2, rank=int(rank))
    split = corpus.Split(Path(data), "train")
    batches = CutBatches([Path(path) for path in manifests], split, int(rank), 2, 0.7, 0)
    model = torch.nn.parallel.DistributedDataParallel(Recogniser(Shape(len(split.letters), 1, 8)))
    for steps, batch in enumerate(batches.epoch(1), 1):
        loss(model, batch).backward()
        print(f"{steps} steps", flush=True)
    dist.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
