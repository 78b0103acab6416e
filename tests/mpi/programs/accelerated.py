"""Trains with A2CiD2 on gradients that are known beforehand; says what became of the mean.

Every 10th step all stop and take in what is pending; then the mean of (x + xt) / 2 is
compared with the mean of plain optimizers, each with the gradients of its super learner. At the end also
average_model.
"""

import torch
from learner import SEED, digest, generator, pauses, say, until_all

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.reports import metrics_of

STEPS, SIZE, CHECK = 30, 1000, 10
MOVED = 1e-3  # of the second model: an exchange was added to both


def sgd(parameter: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=0.05, momentum=0.9)


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=generator(step, rank), dtype=torch.float64)


def main() -> None:
    hvd.init()
    world = worlds.current()
    model = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    ideal = torch.nn.Parameter(model.detach().clone())  # of the plain optimizer
    optimizer = hvd.DistributedOptimizer(
        sgd(model), named_parameters=[("model", model)], averaging="a2cid2+fixed_ring"
    )
    plain = sgd(ideal)
    averaging = optimizer._averaging  # type: ignore[attr-defined]
    (distance,) = averaging.rule.tensors()["distance"]
    # learners of a super learner have consecutive ranks
    first = world.super_rank * world.inner_size
    digests, worst, moved, pause = [], 0.0, [0.0], pauses(3e-3)
    for step in until_all(lambda: max(moved) > MOVED, STEPS, CHECK):
        optimizer.zero_grad()
        (model * gradient(step, hvd.rank())).sum().backward()
        optimizer.step()
        node = [gradient(step, first + i) for i in range(world.inner_size)]
        ideal.grad = torch.stack(node).mean(dim=0)
        plain.step()
        digests.append(digest([model, distance]))
        moved.append(float(distance.norm()))
        next(pause)
        if (step + 1) % CHECK == 0:
            apart = hvd.consensus_distance(Holder(model))
            with hvd.averaging_paused():  # the model is the middle of both
                worst = max(worst, error(model, ideal))
    holder = Holder(model)
    hvd.average_model(holder)
    expected = mean(ideal)
    say(
        seed=SEED,
        super_rank=hvd.super_rank(),
        digests=digests,
        mean_error=worst,
        mean_model_error=float((model.detach() - expected).norm() / expected.norm()),
        apart=apart,
        distance=max(moved),
        exchanges=metrics_of(averaging)["exchanges"] or 0,
    )
    hvd.shutdown()


class Holder(torch.nn.Module):
    """A module of one parameter."""

    def __init__(self, parameter: torch.nn.Parameter):
        super().__init__()
        self.parameter = parameter


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Over all learners, so over super learners, which are of one size."""
    return hvd.allreduce(tensor.detach().clone())


def error(model: torch.Tensor, ideal: torch.Tensor) -> float:
    expected = mean(ideal)
    return float((mean(model) - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
