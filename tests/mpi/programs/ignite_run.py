"""Trains by Ignite's Horovod backend, which imports horovod.torch itself: the script of docs/frameworks.md.

Argument: a folder for its checkpoint.
"""

# ruff: noqa: E402
import os
import re
import sys
from pathlib import Path

import torch
from learner import say

torch.set_num_threads(1)
PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
os.chdir(sys.argv[1])

script = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())[0]
names: dict = {"__name__": "__main__", "accuracies": []}
noted = "        accuracies.append(accuracy)\n"  # of each epoch
script, places = re.subn(r"(?m)^        accuracy = .*\n", lambda line: line[0] + noted, script)
exec(compile(script, "script", "exec"), names)

import horovod.torch
import ignite.distributed as idist
from horovod.torch.mpi_ops import allreduce

import hvd_adpsgd.torch as hvd

hvd.install()  # does nothing the second time
apart = hvd.consensus_distance(names["model"])
torch.manual_seed(idist.get_rank())  # models differ until auto_model broadcasts them
other = idist.auto_model(torch.nn.Linear(20, 5)).weight.detach()
saved = torch.load("model.pt")  # of the last epoch, by the first learner
say(
    face=horovod.torch is hvd and allreduce is hvd.allreduce,
    rank=idist.get_rank(),
    size=idist.get_world_size(),
    backend=idist.backend(),
    begins_alike=bool((idist.all_gather(other[None]) == other).all()),
    places=places,
    accuracies=names["accuracies"],
    steps=names["trainer"].state.iteration,
    apart=apart,
    saved=all(torch.equal(saved[key], value) for key, value in names["model"].state_dict().items()),
)
idist.finalize()
