"""Runs the Python blocks of a page, a JSON file, each with the names that its reader has by then."""

import json
import os
import re
import sys
import types

import torch

import hvd_adpsgd.torch as hvd

# What stands for the reader's own: no GPU, one epoch, a model that is there.
STANDS_FOR = {
    r"\.cuda\(\)": "",
    r"torch\.cuda\.set_device\(.*\)": "pass",
    r"range\(90\)": "range(1)",
    r"/shared/run7/": "",
    r"(?m)^model = \.\.\.$": "pass",
}


class Board:
    """A SummaryWriter, and a run of wandb."""

    def __init__(self, *_, **__):
        pass

    def add_scalar(self, tag, value, step):
        pass


class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def evaluate(model, *_):
    with torch.no_grad():
        return (1, 2) if _ else model(torch.zeros(4, 6)).mean()


def names(block: str) -> dict[str, object]:
    """The reader's names; the optimizer is wrapped unless the block wraps it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "DistributedOptimizer(" not in block:
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    loss = model(torch.randn(4, 6)).square().mean()
    return {
        "__name__": "__main__", "torch": torch, "hvd": hvd, "Net": Net, "evaluate": evaluate, "data": data,
        "model": model, "optimizer": optimizer, "loader": data, "loss": loss, "epoch": 0, "epochs": 1,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "train_one_epoch": lambda *_: None,
        "scaler": torch.amp.GradScaler("cpu"), "train": lambda **_: None, "SummaryWriter": Board,
        "wandb": types.SimpleNamespace(init=Board),
    }  # fmt: skip


def main() -> None:
    with open(sys.argv[1]) as file:
        blocks = json.load(file)
    os.chdir(os.path.dirname(sys.argv[1]))  # blocks save checkpoints where they run
    hvd.init()
    for number, block in enumerate(blocks):
        for pattern, replacement in STANDS_FOR.items():
            block = re.sub(pattern, replacement, block)
        mine = names(block)
        exec(compile(block, f"block {number}", "exec"), mine)
        close = getattr(mine["optimizer"], "close", None)
        if close:
            close()
    if hvd.rank() == 0:
        print("blocks run:", len(blocks), flush=True)


main()
