"""Trains on a Ray cluster: each super learner is a TorchTrainer which Ray starts again if it fails.

    python examples/ray_train.py --folder /shared/run7 --super-learners 4 --learners 8 --gpu

Super learner 0 begins the job, and the others join it through hvd.admit. So does one that Ray has started
again, on the same node or another, while the rest trains on. To end the job after an epoch: touch
/shared/run7/stop. The folder, shared by all nodes, has the mean of the models and the optimizer in last.pt,
from which the same command resumes. Needs hvd_adpsgd and ray[train] on all nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import os
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvd_adpsgd.torch as hvd


@ray.remote(num_cpus=0)
class Job:
    """The addresses at which super learners join the job."""

    def __init__(self) -> None:
        self._listeners: dict[int, str] = {}
        self._has_begun = asyncio.Event()

    async def tell(self, number: int, listener: str) -> None:
        """Record the address of a super learner that trains."""
        self._listeners[number] = listener
        self._has_begun.set()

    async def ask(self, number: int) -> str:
        """Return the addresses of the others, as HVD_ADPSGD_JOIN takes them; "" for the one that begins."""
        if number > 0:
            await self._has_begun.wait()
        return ",".join(at for other, at in self._listeners.items() if other != number)


def join_or_begin(job: Any, number: int, folder: Path) -> None:
    """Run hvd.init() in a worker of Ray Train."""
    here = ray.util.get_node_ip_address()
    interfaces = psutil.net_if_addrs().items()
    nic = next(name for name, known in interfaces if here in (a.address for a in known))
    os.environ.setdefault("HVD_ADPSGD_NICS", nic)
    os.environ["HVD_ADPSGD_JOIN_SECRET_FILE"] = str(folder / "secret")
    os.environ["HVD_ADPSGD_JOIN"] = ray.get(job.ask.remote(number))
    hvd.init()


def train(config: dict[str, Any]) -> None:
    """Train in a worker of Ray Train: a learner."""
    folder, number, job = Path(config["folder"]), config["number"], config["job"]
    join_or_begin(job, number, folder)
    print(f"learner {hvd.rank()}: super learner {hvd.super_rank()}, process {os.getpid()}")

    x = torch.randn(5000, 20, generator=torch.Generator().manual_seed(0))
    y = (x.square().sum(1) > 20).long()
    data, (x, y) = TensorDataset(x[:4000], y[:4000]), (x[4000:], y[4000:])
    sampler = hvd.DynamicSampler(data, batch_size=50)
    device = get_device()
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    ).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    first = 0
    if (folder / "last.pt").exists():
        saved = torch.load(folder / "last.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    epoch = hvd.admit(model, optimizer, state=None)
    if hvd.listener():  # of a leader
        ray.get(job.tell.remote(number, hvd.listener()))
    while epoch is None:  # until all have come
        time.sleep(0.1)
        is_complete = hvd.super_size() >= config["super_learners"]
        epoch = hvd.admit(model, optimizer, state=first if is_complete else None)
    while epoch < config["epochs"]:
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=50, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
        stops = hvd.allgather_object((folder / "stop").exists())
        with hvd.averaged(model), torch.no_grad():
            loss = cross_entropy(model(x.to(device)), y.to(device)).item()
            if hvd.is_coordinator():
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states | {"epoch": epoch}, folder / "new.pt")
                os.replace(folder / "new.pt", folder / "last.pt")
                print(f"epoch {epoch}: held-out loss {loss:.4f}, {len(stops)} learners")
        ray.train.report({"epoch": epoch, "loss": loss})
        epoch = hvd.admit(model, optimizer, state=config["epochs"] if any(stops) else epoch + 1)
    hvd.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--super-learners", type=int, default=2)
    parser.add_argument("--learners", type=int, default=2, help="of each")
    parser.add_argument("--gpu", action="store_true", help="one for each learner")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--max-failures", type=int, default=3, help="of each super learner")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "stop").unlink(missing_ok=True)
    ours = {name: os.environ[name] for name in os.environ if name.startswith("HVD_ADPSGD_")}
    ray.init(runtime_env={"env_vars": {"HVD_ADPSGD_INNER": "torch", **ours}})  # at RAY_ADDRESS
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    job = Job.options(scheduling_strategy=here).remote()

    def fit(number: int) -> str:
        trainer = TorchTrainer(
            train,
            train_loop_config={**vars(args), "number": number, "job": job},
            scaling_config=ScalingConfig(
                num_workers=args.learners, use_gpu=args.gpu, placement_strategy="STRICT_PACK"
            ),
            run_config=RunConfig(
                name=f"super_learner_{number}",
                storage_path=str(args.folder / "ray"),
                failure_config=FailureConfig(max_failures=args.max_failures),
            ),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            return f"with an error: {error}"
        return "well"

    with concurrent.futures.ThreadPoolExecutor(args.super_learners) as threads:
        ended = list(threads.map(fit, range(args.super_learners)))
    for number, how in enumerate(ended):
        print(f"super learner {number} ended {how}")
    if "well" not in ended:
        raise SystemExit("no super learner has trained to the end: start again, to resume")


if __name__ == "__main__":
    main()
