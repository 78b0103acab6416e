"""Trains by Ignite's Horovod backend, which imports horovod.torch itself."""

# ruff: noqa: E402
import torch
from learner import say

import hvd_adpsgd.torch as hvd

hvd.install()
hvd.install()  # does nothing

import horovod.torch
import ignite.distributed as idist
from horovod.torch.mpi_ops import allreduce
from ignite.engine import Engine, Events

torch.set_num_threads(1)
idist.initialize("horovod")
torch.manual_seed(idist.get_rank())  # models differ until auto_model broadcasts them
model = idist.auto_model(torch.nn.Linear(20, 5))
first = model.weight.detach().clone()
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))


def update(engine: Engine, batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(update)
losses = []


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine: Engine) -> None:
    with hvd.averaged(model):
        losses.append(idist.all_reduce(model(torch.ones(1, 20)).square().mean().item()))


trainer.run([torch.randn(8, 20) for _ in range(10)], max_epochs=3)
exchanged = hvd.metrics()["exchanges"] if hvd.is_leader() else None
begins_alike = bool((idist.all_gather(first[None]) == first).all())
hvd.average_model(model)
say(
    face=horovod.torch is hvd and allreduce is hvd.allreduce,
    rank=idist.get_rank(),
    size=idist.get_world_size(),
    backend=idist.backend(),
    begins_alike=begins_alike,
    losses=losses,
    exchanged=exchanged,
    weight=model.weight.sum().item(),
)
idist.finalize()
