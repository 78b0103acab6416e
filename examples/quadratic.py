"""H-ADPSGD in one screen: every learner pulls towards its own point, averaging finds the middle.

    horovodrun -np 4 python examples/quadratic.py
    HVD_ADPSGD_SUPER_LEARNER_SIZE=2 horovodrun -np 4 python examples/quadratic.py

Learner l minimises ||x - p_l||^2 / 2 from noisy gradients. Alone it would end at p_l. Averaged, all
learners end near the mean of the points, which no learner knows. Learner 0 takes a pause of 10 ms in
every step; the others do not wait for it.
"""

import argparse
import time

import torch

import hvd_adpsgd.torch as hvd

DIMENSION = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--slow", type=float, default=0.01, help="seconds learner 0 loses per step")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    point = torch.randn(DIMENSION)
    model = torch.nn.Linear(DIMENSION, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    began = time.monotonic()
    for _ in range(args.steps):
        optimizer.zero_grad()
        x = model.weight[0]
        loss = 0.5 * (x - point + args.noise * torch.randn(DIMENSION)).square().sum()
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0:
            time.sleep(args.slow)
    rate = args.steps / (time.monotonic() - began)

    middle = hvd.allreduce(point, name="middle")
    alone = hvd.allreduce((point - middle).square().mean(), name="alone").sqrt()
    hvd.average_model(model)
    error = (model.weight[0].detach() - middle).square().mean().sqrt()
    rates = hvd.allgather_object(rate)
    if hvd.rank() == 0:
        print(f"{hvd.size()} learners in {hvd.super_size()} super learners, {args.steps} steps")
        print(f"distance of the averaged model from the middle  {error:.4f}")
        print(f"distance of the learners' own points            {alone:.4f}")
        print("steps/s by learner                              ", *(f"{r:.0f}" for r in rates))
    hvd.shutdown()


if __name__ == "__main__":
    main()
