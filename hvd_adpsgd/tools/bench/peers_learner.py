"""One learner of `bench peers`, which trains the same model, data and batch with any of the libraries.

The work is an MLP of 9.5 M parameters (512-2048-2048-2048-10), batch 32, SGD with momentum, one thread.
Labels come from a fixed linear classifier; no two learners see the same sample. The result is the held-out
loss of the mean of all learners' models.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_adpsgd.tools.bench import MARK, settings

__all__ = ["PERIOD", "SCHEMES"]

SIZES = (512, 2048, 2048, 2048, 10)
HELD_OUT = 2048
RATE, MOMENTUM = 0.05, 0.9
PERIOD = 4  # steps between means, for libraries that average models
# Steps between checks of the time limit, for libraries whose learners must stop at one step.
LOOK = 5
# Seconds of hivemind's matchmaking; steps between means, so many that none waits for matchmaking.
HIVEMIND_S, HIVEMIND_PERIOD = 1.0, 50


class Scheme:
    """Interface of a library in `bench peers`; this base class uses torch.distributed without averaging.

    Args:
        batch: samples per step of a learner.
        host: host name by which other learners reach this one.
        first, port: host name and port of the TCPStore of learner 0.

    Attributes:
        together: whether learners wait for each other, and so must make equally many steps.
    """

    together = True

    def __init__(self, batch: int, host: str, first: str, port: int):
        self.batch, self.host, self.first, self.port = batch, host, first, port

    def start(self) -> tuple[int, int]:
        """Join all learners; return rank and size, from horovodrun's environment variables (MPI or Gloo)."""
        rank, size = (
            int(os.environ.get(f"OMPI_COMM_WORLD_{what}") or os.environ[f"HOROVOD_{what}"])
            for what in ("RANK", "SIZE")
        )
        self.store = dist.TCPStore(
            self.first, self.port, is_master=rank == 0, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        return rank, size

    def wrap(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        """Return the model and the optimizer, wrapped by the library for training."""
        return model, optimizer

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        yield

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any learner; all learners must call it."""
        found = torch.tensor([float(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def average(self, model: torch.nn.Module) -> None:
        """Replace the model by the mean of all learners' models; all learners must call it."""
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class DataParallel(Scheme):
    def wrap(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        return torch.nn.parallel.DistributedDataParallel(model), optimizer


class PostLocalSGD(Scheme):
    """torch's post-local SGD: averages gradients in the first two steps, then models every PERIOD steps."""

    def wrap(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        state = hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=2)
        return wrapped, PostLocalSGDOptimizer(optimizer, averager)


class TorchFT(Scheme):
    """LocalSGD of torchft, with one replica group per learner."""

    def wrap(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        from torchft._torchft import LighthouseServer
        from torchft.local_sgd import LocalSGD
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        rank, size = dist.get_rank(), dist.get_world_size()
        self.lighthouse = LighthouseServer("[::]:0", size) if rank == 0 else None
        address = self.gather(self.lighthouse and self.lighthouse.address())[0]
        self.group_store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timedelta(seconds=60)),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=size,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=self.host,
            store_port=self.group_store.port,
            lighthouse_addr=address,
            replica_id=f"learner_{rank}",
            init_sync=False,
        )
        self.local = LocalSGD(self.manager, model, optimizer, PERIOD)
        return model, optimizer

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with self.local:
            yield

    def close(self) -> None:
        dist.barrier()
        self.manager.shutdown()
        super().close()


class Hivemind(Scheme):
    """hivemind's Optimizer with local updates, which averages models in the background.

    Models are averaged each time that the learners together have made HIVEMIND_PERIOD steps per learner.
    """

    together = False

    def wrap(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        import hivemind

        rank, size = dist.get_rank(), dist.get_world_size()
        listen = [f"/ip4/{socket.gethostbyname(self.host)}/tcp/0"]
        first = hivemind.DHT(host_maddrs=listen, start=True) if rank == 0 else None
        peers = self.gather(first and [str(at) for at in first.get_visible_maddrs()])[0]
        self.dht = first or hivemind.DHT(peers, start=True, host_maddrs=listen)
        return model, hivemind.Optimizer(
            dht=self.dht,
            run_id="bench",
            params=model.parameters(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, RATE, momentum=MOMENTUM),
            batch_size_per_step=self.batch,
            target_batch_size=self.batch * HIVEMIND_PERIOD * size,
            use_local_updates=True,
            delay_state_averaging=True,
            matchmaking_time=HIVEMIND_S,
            averaging_timeout=10 * HIVEMIND_S,
        )


class Horovod(Scheme):
    """Plain Horovod, which averages gradients in every step."""

    library = "horovod.torch"

    def start(self) -> tuple[int, int]:
        self.hvd = importlib.import_module(self.library)
        self.hvd.init()
        return self.hvd.rank(), self.hvd.size()

    def wrap(self, model: torch.nn.Module, optimizer: Any) -> tuple[torch.nn.Module, Any]:
        names = model.named_parameters()
        return model, self.hvd.DistributedOptimizer(optimizer, named_parameters=names)

    def any(self, flag: bool) -> bool:
        return bool(self.hvd.allreduce(torch.tensor([float(flag)]), op=self.hvd.Sum))

    def average(self, model: torch.nn.Module) -> None:
        for p in model.parameters():
            p.data.copy_(self.hvd.allreduce(p.data))

    def gather(self, value: Any) -> list[Any]:
        return list(self.hvd.allgather_object(value))

    def close(self) -> None:
        self.hvd.shutdown()


class Adpsgd(Horovod):
    """hvd_adpsgd with its default strategy, and super learners of one learner."""

    library = "hvd_adpsgd.torch"
    together = False

    def average(self, model: torch.nn.Module) -> None:
        self.hvd.average_model(model)


SCHEMES: dict[str, type[Scheme]] = {
    "random_pairs": Adpsgd,
    "horovod": Horovod,
    "ddp": DataParallel,
    "post_local_sgd": PostLocalSGD,
    "torchft": TorchFT,
    "hivemind": Hivemind,
}


def network(sizes: tuple[int, ...], seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class Data:
    """Random inputs with the labels that a fixed linear classifier gives them."""

    def __init__(self, seed: int):
        self.teacher = network((SIZES[0], SIZES[-1]), 2**20)
        self.held_out = self.batch(torch.Generator().manual_seed(2**21), HELD_OUT)
        self.own = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def batch(self, chance: torch.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, SIZES[0], generator=chance)
        return x, self.teacher(x).argmax(dim=1)

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        x, y = self.held_out
        return float(torch.nn.functional.cross_entropy(model(x), y))


def main() -> None:
    args = settings()
    torch.set_num_threads(1)
    host = socket.gethostname() if args.hosts else "localhost"
    first = args.hosts.split(",")[0].split(":")[0] or host
    scheme = SCHEMES[args.scheme](args.batch, host, first, args.port)
    rank, size = scheme.start()
    data = Data(1000 * args.seed + rank)
    model = network(SIZES, args.seed)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    called, stepped = scheme.wrap(model, optimizer)
    slow_s = args.slow_s if rank == size - 1 else 0.0

    def step() -> None:
        x, y = data.batch(data.own, args.batch)
        stepped.zero_grad()
        torch.nn.functional.cross_entropy(called(x), y).backward()
        stepped.step()
        time.sleep(slow_s)  # stands for the work of a slow learner

    with scheme.training():
        for _ in range(args.warm_up):
            step()
        scheme.any(False)  # a barrier: all learners start the clock together
        began, cpu, steps = time.monotonic(), time.process_time(), 0
        ends = began + args.seconds if args.seconds else math.inf
        while steps < (args.steps or math.inf):
            late = time.monotonic() > ends
            if late if not scheme.together else steps % LOOK == 0 and scheme.any(late):
                break
            step()
            steps += 1
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    scheme.any(False)
    scheme.average(model)
    told = scheme.gather({"steps": steps, "seconds": seconds, "cpu_ms": 1e3 * cpu / steps})
    if rank == 0:
        found = {"loss": data.loss(model), "learners": told}
        with open(1, "wb", closefd=False) as out:  # os.write may write a part only
            out.write((MARK + json.dumps(found) + "\n").encode())
    scheme.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
