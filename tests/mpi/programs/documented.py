"""Runs the Python blocks of a page, a JSON file, each with the names that its reader has by then."""

import importlib.util
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
    """A SummaryWriter, a run of wandb, and mlflow."""

    def __init__(self, *_, **__):
        pass

    def add_scalar(self, tag, value, step):
        pass

    def log_metrics(self, numbers, step):
        pass


class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


class Brain:
    """Of speechbrain, where that is not installed."""


def evaluate(model, *_):
    with torch.no_grad():
        return (1, 2) if _ else model(torch.zeros(4, 6)).mean()


def two_networks() -> dict[str, object]:
    """Those of a GAN, with what its losses need."""
    generator, discriminator = torch.nn.Linear(2, 6), torch.nn.Linear(6, 1)
    wrapped = {}
    for name, model in (("optimizer_d", discriminator), ("optimizer_g", generator)):
        named = [(f"{name}.{key}", p) for key, p in model.named_parameters()]
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped[name] = hvd.DistributedOptimizer(plain, named_parameters=named)
    criterion, ones = torch.nn.BCEWithLogitsLoss(), torch.ones(4, 1)
    fake = generator(torch.randn(4, 2))
    return {
        **wrapped, "criterion": criterion, "discriminator": discriminator, "fake": fake, "ones": ones,
        "loss_real": criterion(discriminator(torch.randn(4, 6)), ones),
        "loss_fake": criterion(discriminator(fake.detach()), 1 - ones),
    }  # fmt: skip


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
        "scaler": torch.amp.GradScaler("cpu"), "train": lambda *_, **__: None, "SummaryWriter": Board,
        "wandb": types.SimpleNamespace(init=Board), "mlflow": Board(),
        **({"sampler": hvd.DynamicSampler(data)} if 'saved["sampler"]' in block else {}),
        **(two_networks() if "optimizer_d" in block else {}),
    }  # fmt: skip


def main() -> None:
    with open(sys.argv[1]) as file:
        blocks = json.load(file)
    os.chdir(os.path.dirname(sys.argv[1]))  # blocks save checkpoints where they run
    hvd.init()
    rank = hvd.rank()
    if importlib.util.find_spec("speechbrain") is None:
        sys.modules["speechbrain"] = types.SimpleNamespace(Brain=Brain)
    for number, block in enumerate(blocks):
        for pattern, replacement in STANDS_FOR.items():
            block = re.sub(pattern, replacement, block)
        mine = names(block)
        exec(compile(block, f"block {number}", "exec"), mine)
        for held in list(mine.values()):
            if isinstance(held, torch.optim.Optimizer) and hasattr(held, "close"):
                held.close()
    if rank == 0:
        print("blocks run:", len(blocks), flush=True)


main()
