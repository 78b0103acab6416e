"""The script makes a mesh of super learners x learners, whose inner dimension it hands over.

Argument: "first" if the mesh is made before hvd.init(), else "after".
"""

import sys
from typing import Any

import torch
from inner import outcome
from learner import same_inside, say, until_all
from sharded import law
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_adpsgd.torch as hvd


def made() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def with_ddp(group: Any) -> dict[str, Any]:
    """Different data on each learner; super learners start apart, and only exchanges move them together."""
    torch.manual_seed(hvd.super_rank())
    model = torch.nn.Linear(5, 1).double()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    apart, same = hvd.consensus_distance(model), []
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in until_all(lambda: hvd.consensus_distance(model) < apart / 4, 10):
        optimizer.zero_grad()
        ddp(torch.randn(8, 5, generator=data, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        same.append(same_inside(model.parameters()))
    hooks = len(optimizer._reducer.hooks)
    optimizer.close()
    return {"same": all(same), "hooks": hooks, "start": apart}


def ddp_across(group: Any) -> str:
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    return outcome(lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def shard_across(mesh: DeviceMesh) -> str:
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=mesh)
    return outcome(lambda: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def main() -> None:
    first = sys.argv[1] == "first"
    mesh = made() if first else None
    hvd.init()
    mesh = mesh or made()
    inner, outer = mesh["inner"], mesh["outer"]
    say(case="ddp", **with_ddp(inner.get_group()))
    say(case="fully_shard", **law("AdamW", mesh=inner))
    say(case="ddp across", error=ddp_across(outer.get_group()))
    say(case="ddp over all", error=ddp_across(None))
    say(case="fully_shard across", error=shard_across(outer))
    say(case="HSDP", error=shard_across(mesh))


if __name__ == "__main__":
    main()
