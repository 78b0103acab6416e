"""Twenty steps with SGD and with Adam, under horovod.torch or hvd_adpsgd.torch (first argument).

Says every loss and the bits of the final parameters. Second argument: strategy, as an argument of
DistributedOptimizer. With TEST_INNER=torch no optimizer state is broadcast: Horovod's broadcast makes a step.
"""

import hashlib
import importlib
import json
import os
import sys

import torch

hvd = importlib.import_module(sys.argv[1])
arguments = {"averaging": getattr(hvd, sys.argv[2])()} if len(sys.argv) > 2 else {}

hvd.init()
for name, kind, options in (
    ("SGD", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    ("Adam", torch.optim.Adam, {"lr": 0.01}),
):
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
    facts = {
        "rank": hvd.rank(),
        f"{name} losses": [loss.hex() for loss in losses],
        f"{name} bits": hashlib.sha256(bits).hexdigest(),
    }
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(f"\n@learner {json.dumps(facts)}\n".encode())
