"""Counts the Python calls of the library's functions in each step, by module, on all threads of a learner."""

import sys
import threading
from collections import Counter
from statistics import median
from types import FrameType

WARM_UP, STEPS = 10, 20
calls: list[Counter[str]] = [Counter()]


def count(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and counts and "/hvd_adpsgd/" in frame.f_code.co_filename:
        calls[-1][frame.f_code.co_filename.rpartition("/hvd_adpsgd/")[2]] += 1


counts = False
threading.setprofile(count)  # before the library starts its threads

import torch  # noqa: E402
from learner import say  # noqa: E402

import hvd_adpsgd.torch as hvd  # noqa: E402

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
plain = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
sys.setprofile(count)
for step in range(WARM_UP + STEPS):
    counts = step >= WARM_UP
    calls.append(Counter())
    optimizer.zero_grad()
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()
counts = False
hvd.barrier()  # no super learner leaves before
steps = calls[1 + WARM_UP :]
# a wait takes calls, too: the step with fewest; what runs in fewer than every second step belongs to none
modules = {name: median(step[name] for step in steps) for name in set().union(*steps)}
modules = {name: number for name, number in modules.items() if number}
say(rank=hvd.rank(), calls=min(step.total() for step in steps), modules=modules)
