"""H-ADPSGD on a quadratic with noisy gradients: no learner waits for a slow one.

    HVD_ADPSGD_SUPER_LEARNER_SIZE=1 horovodrun -np 4 python examples/quadratic.py
    HVD_ADPSGD_SUPER_LEARNER_SIZE=2 horovodrun -np 4 python examples/quadratic.py

All learners minimise ||x - p||^2 / 2 from gradients with noise of standard deviation s. A learner without
averaging stays at a distance of s sqrt(lr / (2 - lr)) per coordinate from p. Averaging models keeps the
learners together and reduces the noise. Learner 0 sleeps in every step; the others do not wait for it.
"""

import argparse
import math
import time

import torch

import hvd_adpsgd.torch as hvd

DIMENSION = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument(
        "--slow", type=float, default=0.005, help="seconds that learner 0 sleeps per step"
    )
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    point = torch.randn(DIMENSION)
    torch.manual_seed(2 + hvd.rank())
    model = torch.nn.Linear(DIMENSION, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    began = time.monotonic()
    for _ in range(args.steps):
        optimizer.zero_grad()
        target = point + args.noise * torch.randn(DIMENSION)
        (0.5 * (model.weight[0] - target).square().sum()).backward()
        optimizer.step()
        if hvd.rank() == 0:
            time.sleep(args.slow)
    rate = args.steps / (time.monotonic() - began)

    hvd.average_model(model)
    error = (model.weight[0].detach() - point).square().mean().sqrt()
    rates = hvd.allgather_object(rate)
    if hvd.rank() == 0:
        alone = args.noise * math.sqrt(args.lr / (2 - args.lr))
        print(f"{hvd.size()} learners, super learners: {hvd.super_size()}, steps: {args.steps}")
        print(f"distance from the minimum  averaged model {error:.4f}, a learner alone {alone:.4f}")
        print("steps/s by learner        ", *(f"{r:.0f}" for r in rates))
    hvd.shutdown()


if __name__ == "__main__":
    main()
