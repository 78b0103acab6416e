"""Trains a small model by NaturalGradientSGD with the averaging schemes given as arguments.

Says for each scheme: losses, whether the super learner's learners were identical after every step, whether
what Horovod averaged was the mean of each learner's own natural gradient, and how many different
estimates there are.
"""

import copy
import hashlib
import io
import math
import sys
from typing import Any

import torch
from learner import digest, generator, retired, same_inside, say, wrap
from torch import nn

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.optim.natural_gradient import LSTM

STEPS = 12


class Model(nn.Module):
    """A convolution, an LSTM, a norm that falls back, and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.lstm = nn.Conv1d(3, 6, 3, padding=1), LSTM(6, 5, bidirectional=True)
        self.norm, self.out = nn.LayerNorm(10), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).relu().permute(2, 0, 1)
        return self.out(self.norm(self.lstm(x)[0]))


def loss_of(model: nn.Module, *numbers: int) -> torch.Tensor:
    """Of a small regression that all learners share, on samples of their own."""
    x = torch.randn(8, 3, 5, generator=generator(*numbers))
    target = torch.stack([x[:, 0], x[:, 1] * x[:, 2]], -1).transpose(0, 1)
    return (model(x) - target).square().mean()


def heldout(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(loss_of(model, 10**6 + k).item() for k in range(20)) / 20


def natural(model: nn.Module, lr: float = 0.03) -> Any:
    return hvd.NaturalGradientSGD(model, lr, update_period=2)


def estimates(optimizer: Any) -> str:
    """Equal for bit-identical estimates, wherever they are."""
    file, host = io.BytesIO(), io.BytesIO()
    torch.save(optimizer.state_dict()["natural"], file)
    file.seek(0)
    torch.save(torch.load(file, map_location="cpu", weights_only=False), host)
    return hashlib.sha256(host.getvalue()).hexdigest()


def mean_in_node(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    every = worlds.current().inner.allgather(tensors)
    return [torch.stack(list(same)).mean(0) for same in zip(*every, strict=True)]


def train(case: str, averaging: str, passes: int) -> None:
    model = Model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    twin = copy.deepcopy(model)  # alone: what this learner's own gradient is
    alone = natural(twin, lr=0.0)
    how = {"averaging": averaging, "backward_passes_per_step": passes}
    plain = natural(model)
    optimizer = wrap(model, lambda _: plain, **how)
    first, same, error = heldout(model), [], 0.0
    with retired(optimizer):
        for step in range(STEPS):
            twin.load_state_dict(model.state_dict())
            for trained, owner in ((model, optimizer), (twin, alone)):
                owner.zero_grad()
                for part in range(passes):
                    loss_of(trained, step, part, hvd.rank()).backward()
            alone_grads = [p.grad for p in twin.parameters()]
            expected = mean_in_node(alone_grads)
            optimizer.synchronize()
            for p, mean in zip(model.parameters(), expected, strict=True):
                assert p.grad is not None
                error = max(error, float((p.grad - mean).norm() / mean.norm()))
            with optimizer.skip_synchronize():
                optimizer.step()
            alone.step()
            same.append(same_inside(model.parameters()))
        with hvd.averaged(model):  # when all have made their steps, whatever the order of exchanges
            last = heldout(model)
        own = estimates(optimizer)
        facts = {
            "first": first,
            "last": last,
            "same": same,
            "error": error,
            "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
            "estimates": own,
            "as_alone": own == estimates(alone),
            "is_instance": isinstance(optimizer, hvd.NaturalGradientSGD),
            "model": digest(model.parameters()),
        }
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        facts["broadcast"] = estimates(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        facts["loaded"] = estimates(optimizer) == facts["broadcast"]
    assert math.isfinite(first)
    say(case=case, **facts)


def main() -> None:
    hvd.init()
    for argument in sys.argv[1:]:
        spec, _, passes = argument.partition("*")
        train(argument, spec, int(passes or 1))
    hvd.shutdown()


if __name__ == "__main__":
    main()
