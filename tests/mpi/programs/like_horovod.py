"""Twenty steps with SGD and with Adam, under horovod.torch or hvd_adpsgd.torch.

Arguments: ways to train, one after the other. A way is a module, variables for its init(), and a strategy for
DistributedOptimizer. Says every loss and the bits of the final parameters.
With TEST_INNER=torch no optimizer state is broadcast: Horovod's broadcast makes a step.
"""

import hashlib
import importlib
import os
import sys
from typing import Any

import torch
from learner import say


def train(way: str) -> None:
    module, *words = way.split()
    hvd = importlib.import_module(module)
    os.environ.update(word.split("=") for word in words if "=" in word)
    strategy = [getattr(hvd, word)() for word in words if "=" not in word]
    hvd.init()
    if hvd.rank() == 0:
        print("way", way, file=sys.stderr, flush=True)
    for name, kind, options in (
        ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        ("Adam", torch.optim.Adam, {"lr": 0.01}),
    ):
        arguments = {"averaging": strategy[0]} if strategy else {}
        say(case=way, rank=hvd.rank(), name=name, **steps(hvd, kind, options, arguments))
    hvd.shutdown()
    for word in words:
        os.environ.pop(word.partition("=")[0], None)


def steps(hvd: Any, kind: Any, options: dict[str, float], arguments: dict[str, Any]) -> Any:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(9, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    )
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters(), **options), named_parameters=model.named_parameters(), **arguments
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if os.environ.get("TEST_INNER") != "torch":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.Generator().manual_seed(17 + hvd.rank())
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        x = torch.randn(8, 9, generator=data)
        loss = torch.nn.functional.cross_entropy(model(x), (x[:, :4] ** 2).argmax(dim=1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return {"losses": [loss.hex() for loss in losses], "bits": hashlib.sha256(bits).hexdigest()}


for way in sys.argv[1:]:
    train(way)
