"""What a learner of `bench storm` needs from each library: to join, to heal, and to say who takes part."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_adpsgd_lab.bench.storm.notes import listener_file, published

# DiLoCo and its outer optimizer, time limits: those of the public run.
PERIOD, OUTER_RATE, OUTER_MOMENTUM, LEAST = 20, 0.7, 0.9, 2
TIMEOUT, QUORUM_TIMEOUT = timedelta(seconds=60), timedelta(seconds=120)
_HOST = "127.0.0.1"


class Scheme:
    """Interface of a library in `bench storm`.

    Args:
        settings: of the learner, see driver.settings.
    """

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.slot, self.folder = int(settings["slot"]), Path(settings["folder"])

    def start(self) -> None:
        """Import the library, and join the other learners."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to step."""
        return optimizer

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Receive the state of the job, or a checkpoint; return the number of steps made so far."""
        return 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context in which the steps are made."""
        yield

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Called after step number `steps`."""

    def shown(self) -> dict[str, Any]:
        """Return `exchanges` so far, and what else a line about a step has."""
        return {"exchanges": 0}

    def close(self) -> None:
        """End."""


class Adpsgd(Scheme):
    """hvd_adpsgd with its defaults: a super learner of one learner, which a supervisor replaces."""

    def start(self) -> None:
        self.hvd = importlib.import_module("hvd_adpsgd.torch")
        self.hvd.init()
        self._admit_s = 0.0

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        names = model.named_parameters()
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=names)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        steps = self.hvd.admit(model, optimizer, state=0, blocking=False)
        published(listener_file(self.folder, self.slot), self.hvd.listener())
        return int(steps)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        if steps % self.settings["admit_every"] == 0:
            began = time.monotonic()
            self.hvd.admit(model, optimizer, state=steps, blocking=False)
            self._admit_s += time.monotonic() - began

    def shown(self) -> dict[str, Any]:
        found = self.hvd.metrics()
        counts = {"exchanges": found["exchanges"], "sent": found["bytes_sent"]}
        return {**counts, "admit_s": round(self._admit_s, 4)}

    def close(self) -> None:
        self.hvd.shutdown()


def torchft_manager(
    model: nn.Module, optimizer: torch.optim.Optimizer, store: dist.TCPStore, lighthouse: str,
    name: str, host: str, least: int, timeout: timedelta, quorum_timeout: timedelta,
) -> Any:  # fmt: skip
    """Return torchft's Manager of a replica of one process, with a store of its own at `host`."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return importlib.import_module("torchft.manager").Manager(
        pg=importlib.import_module("torchft.process_group").ProcessGroupGloo(timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=least,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=quorum_timeout,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=host,
        init_sync=False,
    )


def torchft_diloco(
    manager: Any, model: nn.Module, optimizer: Any, period: int, rate: float, momentum: float
) -> Any:
    """Return torchft's DiLoCo; rate and momentum are those of the outer step, Nesterov's SGD."""
    step = torch.optim.SGD(model.parameters(), rate, momentum, nesterov=True)
    local = importlib.import_module("torchft.local_sgd")
    return local.DiLoCo(manager, [model], optimizer, step, period, use_bucketization=True)


class TorchFT(Scheme):
    """Base of torchft's schemes: a replica of one process; the Lighthouse is in the driver."""

    def start(self) -> None:
        for module in ("manager", "process_group"):
            importlib.import_module(f"torchft.{module}")
        self._local = importlib.import_module("torchft.local_sgd")
        self._syncs = self._committed = 0

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self.manager = torchft_manager(
            model, optimizer, self._store, self.settings["lighthouse"], f"slot_{self.slot}", _HOST,
            LEAST, TIMEOUT, QUORUM_TIMEOUT,
        )  # fmt: skip
        self._outer = self._made(model, optimizer)
        return optimizer

    def _made(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        raise NotImplementedError

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with self._outer:
            yield

    def shown(self) -> dict[str, Any]:
        # A replica that heals takes the number of steps of its peers, so each change is a sync.
        now, told = self.manager.current_step(), {}
        if now != self._committed:
            self._committed = now
            self._syncs += 1
            told = {"sync": now, "participants": self.manager.num_participants()}
        return {"exchanges": self._syncs, **told}

    def close(self) -> None:
        os._exit(0)  # its threads wait for a quorum


class TorchFTLocalSGD(TorchFT):
    """The mean of all models every PERIOD steps."""

    def _made(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return self._local.LocalSGD(self.manager, model, optimizer, PERIOD)


class TorchFTDiLoCo(TorchFT):
    """An outer step of Nesterov's SGD with the mean difference of all models, every PERIOD steps."""

    def _made(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return torchft_diloco(self.manager, model, optimizer, PERIOD, OUTER_RATE, OUTER_MOMENTUM)


class Horovod(Scheme):
    """Plain Horovod with a checkpoint every `checkpoint_every` steps, from which all start again."""

    def start(self) -> None:
        self.hvd = importlib.import_module("horovod.torch")
        self.hvd.init()
        self._steps = 0

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        names = model.named_parameters()
        return self.hvd.DistributedOptimizer(optimizer, named_parameters=names)

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        file = self.folder / "checkpoint.pt"
        if not file.exists():
            self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            return 0
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["steps"])

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._steps += 1
        if self.hvd.rank() == 0 and steps % self.settings["checkpoint_every"] == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"steps": steps}, self.folder / "checkpoint.new")
            os.replace(self.folder / "checkpoint.new", self.folder / "checkpoint.pt")

    def shown(self) -> dict[str, Any]:
        return {"exchanges": self._steps}

    def close(self) -> None:
        os._exit(0)  # others may wait for its next gradient


SCHEMES: dict[str, type[Scheme]] = {
    "hadpsgd": Adpsgd,
    "torchft_diloco": TorchFTDiLoCo,
    "torchft_local_sgd": TorchFTLocalSGD,
    "horovod": Horovod,
}
