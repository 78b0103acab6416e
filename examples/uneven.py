"""One learner is slow: how many steps a job keeps with DDP, with equal shares, and with hvd.DynamicSampler.

    export HVD_ADPSGD_SUPER_LEARNER_SIZE=1
    torchrun --nproc-per-node 4 examples/uneven.py ddp --slower 3
    torchrun --nproc-per-node 4 examples/uneven.py equal --slower 3        # hvd_adpsgd, DistributedSampler
    torchrun --nproc-per-node 4 examples/uneven.py dynamic --slower 3      # hvd_adpsgd, hvd.DynamicSampler

A step waits 50 ms in place of a GPU; those of learner 0 take --slower times as long. There are three epochs,
after each of which hvd_adpsgd takes the mean of all models.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvd_adpsgd.torch as hvd

STEP_S, EPOCHS, BATCH = 0.05, 3, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scheme", choices=("ddp", "equal", "dynamic"))
    parser.add_argument("--slower", type=float, default=3, help="how often (default: 3)")
    parser.add_argument("--steps", type=int, default=200, help="of an even learner per epoch")
    options = parser.parse_args()
    by_ddp = options.scheme == "ddp"
    job = dist if by_ddp else hvd
    dist.init_process_group("gloo") if by_ddp else hvd.init()
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if by_ddp else (hvd.rank(), hvd.size())

    data = TensorDataset(torch.randn(options.steps * size * BATCH, 100))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    if options.scheme == "dynamic":
        sampler = hvd.DynamicSampler(data, batch_size=BATCH)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    called = torch.nn.parallel.DistributedDataParallel(model) if by_ddp else model
    if not by_ddp:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    job.barrier()
    began = time.monotonic()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            loss = called(x).square().mean()
            time.sleep(STEP_S * (options.slower if rank == 0 else 1))
            loss.backward()
            optimizer.step()
        if not by_ddp:
            with hvd.averaged(model):
                pass
    job.barrier()
    kept = EPOCHS * options.steps * STEP_S / (time.monotonic() - began)
    best = (size - 1 + 1 / options.slower) / size
    if rank == 0:
        print(f"{options.scheme}: keeps {kept:.0%} of even learners' steps; at best {best:.0%}")


if __name__ == "__main__":
    main()
