"""A task for training in virtual time: a network learns what another one, with noise, has labelled.

    python -m hvd_adpsgd simulate --train examples/virtual_time.py --super-learners 16 --steps 300 \
        --step 50ms --network 1Gb/s,50us --slow 1x5 --compare synchronous --figure virtual_time.png

A super learner that is five times slower slows synchronous training by as much, and random_pairs hardly.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

CLASSES, INPUTS, BATCH = 10, 32, 32


def model() -> nn.Module:
    """The same start on every super learner."""
    return network(128)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch, to minimise."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def batches(super_learner: int, n: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of one super learner, other ones than those of the others; without end here."""
    random = torch.Generator().manual_seed(seed * n + super_learner)
    while True:
        yield labelled(BATCH, random)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Each super learner has its own."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Optional: it steps after each step."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)


def evaluate(model: nn.Module) -> dict[str, float]:
    """Optional: numbers of the mean model."""
    inputs, labels = labelled(4000, torch.Generator().manual_seed(2**40))
    right = (model(inputs).argmax(1) == labels).double().mean().item()
    return {"accuracy": right}


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, CLASSES),
    )


def labelled(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, with the teacher's labels."""
    inputs = torch.randn(count, INPUTS, generator=random)
    with torch.no_grad():
        logits = 40 * TEACHER(inputs) + torch.randn(count, CLASSES, generator=random)
    return inputs, logits.argmax(1)


torch.manual_seed(0)
TEACHER = network(32)
