"""The five schemes: what a training script needs from each library."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import metadata
from typing import Any, NamedTuple

import torch.distributed as dist
from hvd_adpsgd_lab.bench.storm.schemes import torchft_diloco, torchft_manager
from torch import nn
from torch.optim import Optimizer

POST_LOCAL_PERIOD, DILOCO_PERIOD = 4, 20  # steps between two means of the models
TIMEOUT = timedelta(seconds=120)
JOIN_MS = (
    60_000  # for which a quorum of torchft waits for a learner that answers, however slow it is
)

TITLES = {
    "horovod": "plain Horovod",
    "ddp": "DDP",
    "post_local_sgd": "PostLocalSGD",
    "diloco": "torchft DiLoCo",
    "hadpsgd": "H-ADPSGD",
}


def missing(name: str) -> str | None:
    """Return why a scheme cannot run on this machine; None if it can."""
    needs = {"horovod": "horovod", "hadpsgd": "hvd_adpsgd", "diloco": "torchft"}.get(name)
    if needs and importlib.util.find_spec(needs) is None:
        return "not installed: pip install torchft" if needs == "torchft" else "run make venv"
    return None


def torchft() -> str:
    """Return the version of torchft."""
    try:
        return metadata.version("torchft")
    except metadata.PackageNotFoundError:
        return "not installed"


class Outer(NamedTuple):
    """Rate and momentum of DiLoCo's outer step, Nesterov's SGD on the mean of the models."""

    rate: float
    momentum: float


def settings(name: str, outer: Outer) -> dict[str, float]:
    """Return what a scheme's outcome depends on, besides the task's settings."""
    if name == "diloco":
        return {
            "period": DILOCO_PERIOD,
            "outer_rate": outer.rate,
            "outer_momentum": outer.momentum,
        }
    return {"period": POST_LOCAL_PERIOD} if name == "post_local_sgd" else {}


class Scheme:
    """A library. This base class joins learners by torch.distributed, with torchrun's variables.

    Args:
        outer: of DiLoCo's outer step.
    """

    def __init__(self, outer: Outer):
        self.outer_step = outer

    def start(self) -> tuple[int, int]:
        """Join the other learners; return rank, and number of learners."""
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        """Return the model to call and the optimizer to step."""
        raise NotImplementedError

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context in which the steps are made."""
        yield


class DataParallel(Scheme):
    """torch's DistributedDataParallel."""

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        return nn.parallel.DistributedDataParallel(model), optimizer


class PostLocalSGD(Scheme):
    """torch's post-local SGD: means of models every POST_LOCAL_PERIOD steps."""

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        wrapped = nn.parallel.DistributedDataParallel(model)
        state = hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=POST_LOCAL_PERIOD, warmup_steps=2)
        return wrapped, PostLocalSGDOptimizer(optimizer, averager)


class DiLoCo(Scheme):
    """torchft's DiLoCo, a replica group for each learner; the first learner runs the Lighthouse."""

    def start(self) -> tuple[int, int]:
        # Not a process group of torch: that one would fail with its first learner.
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=self.rank == 0,
            wait_for_workers=False,
        )  # fmt: skip
        return self.rank, self.size

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        host = os.environ["LEARNER_HOST"]
        self.own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.manager = torchft_manager(
            model,
            optimizer,
            self.own,
            self._lighthouse(),
            f"learner_{self.rank}",
            host,
            1,
            TIMEOUT,
            TIMEOUT,
        )
        self.outer = torchft_diloco(self.manager, model, optimizer, DILOCO_PERIOD, *self.outer_step)
        return model, optimizer

    def _lighthouse(self) -> str:
        from torchft._torchft import LighthouseServer

        if self.rank == 0:
            # the first quorum is one of all; later ones may be of fewer
            self.lighthouse = LighthouseServer("[::]:0", 1, join_timeout_ms=JOIN_MS)
            port = self.lighthouse.address().rpartition(":")[2]
            self.store.set("lighthouse", f"http://{os.environ['LEARNER_HOST']}:{port}")
        return self.store.get("lighthouse").decode()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with self.outer:
            yield


class Horovod(Scheme):
    """Plain Horovod."""

    library = "horovod.torch"

    def start(self) -> tuple[int, int]:
        self.hvd = importlib.import_module(self.library)
        self.hvd.init()
        return self.hvd.rank(), self.hvd.size()

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        names = model.named_parameters()
        return model, self.hvd.DistributedOptimizer(optimizer, named_parameters=names)


class Adpsgd(Horovod):
    """hvd_adpsgd with its defaults; each learner is a super learner."""

    library = "hvd_adpsgd.torch"


SCHEMES: dict[str, type[Scheme]] = {
    "horovod": Horovod,
    "ddp": DataParallel,
    "post_local_sgd": PostLocalSGD,
    "diloco": DiLoCo,
    "hadpsgd": Adpsgd,
}
