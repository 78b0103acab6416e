"""Train with DynamicSampler; steps wait. Arguments: folder, epochs, seconds per step by rank, victims.
With SEEDS set, seeds differ. With SHARDS set, each index is the URL of a shard, for one step. INSIDE: ddp,
or fsdp2. SIZE: of the dataset. With SAVE set, a checkpoint of the mean is saved after each epoch. Rank BREAKS
leaves the loop of the last epoch when it holds positions that it has not taken, and enters the mean.

A learner leaves what it has trained with in a file: a line per step, with its epoch, indices and
hvd.progress(). A victim sends itself SIGNAL in its second epoch, once all others are known to be in theirs; a
stopped one is continued later.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from learner import DEADLINE_S, say
from torch.utils.data import DataLoader, TensorDataset

import hvd_adpsgd.torch as hvd

SIZE, BATCH = int(os.environ.get("SIZE", "403")), 4


def wait_for_leaving(sampler: Any, victims: set[int]) -> None:
    """Wait until these have said that they leave: the others must not be through before."""
    ends = time.monotonic() + DEADLINE_S
    while sampler._sharding.parts._departed != victims:
        if time.monotonic() > ends:
            raise TimeoutError(f"{victims} have not left")
        time.sleep(0.01)


def main() -> None:
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    pauses, victims = json.loads(sys.argv[3]), json.loads(sys.argv[4])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seed = 3 + hvd.rank() * ("SEEDS" in os.environ)
    dataset = TensorDataset(torch.arange(SIZE))
    sampler = hvd.DynamicSampler(dataset, batch_size=BATCH, seed=seed)
    loader: Any = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    if "SHARDS" in os.environ:
        sampler = loader = hvd.dynamic_shards([str(i) for i in range(SIZE)], seed=3)
    model: Any = torch.nn.Linear(1, 2)
    called = model
    if os.environ.get("INSIDE") == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        called = DistributedDataParallel(model, process_group=hvd.super_learner_group())
    elif os.environ.get("INSIDE") == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        hvd.super_learner_group()
        fully_shard(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-9), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()
    begun, steps, ends, averaged = time.monotonic(), [], [], []
    breaks, held = epochs - 1 if os.environ.get("BREAKS") == str(hvd.rank()) else None, None
    with (folder / f"{hvd.rank()}.steps").open("w", buffering=1) as out:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            (folder / f"{hvd.rank()}.{epoch}").touch()
            for step, given in enumerate(loader):
                batch = torch.tensor([int(given)]) if isinstance(given, str) else given[0]
                at = time.monotonic()
                if epoch == 1 and step == 3 and hvd.rank() in victims:
                    while not all((folder / f"{rank}.1").exists() for rank in range(hvd.size())):
                        time.sleep(0.01)
                    by = int(os.environ["SIGNAL"])
                    if not by:
                        raise RuntimeError("as SIGNAL is 0")
                    if by == signal.SIGSTOP:
                        subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
                    os.kill(os.getpid(), by)
                if epoch == 1 and step == 3 and os.environ.get("SIGNAL") == "0":
                    wait_for_leaving(sampler, set(victims))
                time.sleep(pauses[hvd.rank()])
                optimizer.zero_grad()
                called(batch.float().unsqueeze(1)).sum().backward()
                optimizer.step()
                out.write(json.dumps([epoch, batch.tolist(), hvd.progress().samples]) + "\n")
                steps.append(time.monotonic() - at)
                if epoch == breaks and (held := list(sampler._sharding.parts._ready)):
                    break
            ends.append(time.monotonic() - begun)
            with hvd.averaged(model):
                if "SAVE" in os.environ and hvd.is_coordinator():
                    state = {"model": model.state_dict(), "sampler": sampler.state_dict()}
                    torch.save(state, folder / "checkpoint")
            averaged.append(time.monotonic() - begun)
    state = sampler.state_dict()
    said = {
        "step_s": sum(steps) / len(steps),
        "steps": len(steps),
        "longest_s": max(steps),
        "ends": ends,
        "averaged": averaged,
        "held": held,
    }
    say(**said, length=len(loader), state=state)


if __name__ == "__main__":
    main()
