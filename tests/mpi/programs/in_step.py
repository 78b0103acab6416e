"""Schemes in step, without gradients or with noise in their place, through the real engine.

The order of a step is that of the optimizer: take the round in, offer the model, begin the next.

--factors K: the factor by which each of K rounds shrinks the squared disagreement, from --start
fourier (the slowest mode of the fixed ring) on, or from fresh models each time (normal).

--kappa K: W' = T W - N, N of variance 1 per entry. The mean over K steps, after --burn-in, of the
squared distance to the mean per super learner and number: kappa. Also that of the mean from the
sum of all noise, relative.

Prints one JSON object: what is given, per strategy.
"""

import argparse
import json

import numpy as np
from mpi4py import MPI

from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import Strategy, parse


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True, nargs="+")
    parser.add_argument("--factors", type=int, default=0)
    parser.add_argument("--kappa", type=int, default=0)
    parser.add_argument("--burn-in", type=int, default=60)
    parser.add_argument("--start", choices=("normal", "fourier"), default="normal")
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = {}
    for spec in args.strategy:
        run = Run(MPI.COMM_WORLD, parse(spec), args.size, args.seed)
        if args.factors:
            result[spec] = run.factors(args.factors, args.start)
        else:
            result[spec] = run.kappa(args.kappa, args.burn_in)
        run.engine.stop()
    if MPI.COMM_WORLD.rank == 0:
        with open(1, "wb", closefd=False) as out:  # os.write may write a part only
            out.write((json.dumps(result) + "\n").encode())


class Run:
    """One engine on a model of `size` float64 numbers."""

    def __init__(self, comm: MPI.Comm, strategy: Strategy, size: int, seed: int):
        self.comm = comm
        self.rng = np.random.default_rng([seed, comm.rank])
        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        plan = strategy.plan(comm.rank, comm.size)
        config = Config(deadline_s=30.0, chunk_kib=64)
        self.engine = Engine(inner=None, outer=outer, plan=plan, config=config)
        self.engine.memory.extend([TensorSpec("model", (size,), "float64")])
        self.engine.start()
        self.model = np.zeros(size)
        self.addresses = np.array([self.model.ctypes.data], dtype=np.uintp)
        self.step = 0

    def begin(self) -> None:
        """Take in what is published, offer the model, and begin a round."""
        self.engine.memory.absorb(self.addresses, self.step)
        self.engine.offer(self.step)
        self.engine.rounds.begin(self.step)
        self.step += 1

    def finish(self) -> None:
        """End the round under way, and publish what it owes."""
        self.engine.publish(self.step)

    def factors(self, rounds: int, start: str) -> list[float]:
        self.model[:] = self.rng.standard_normal(self.model.size)
        if start == "fourier":
            self.model[:] = np.cos(2 * np.pi * self.comm.rank / self.comm.size)
            self.model *= np.random.default_rng(7).standard_normal(self.model.size)
        before = self.disagreement()
        factors = []
        self.begin()
        for _ in range(rounds):
            self.finish()
            self.engine.memory.absorb(self.addresses, self.step)
            factors.append(self.disagreement() / before)
            before *= factors[-1]
            if start == "normal":
                self.model[:] = self.rng.standard_normal(self.model.size)
                before = self.disagreement()
            self.begin()
        self.finish()
        return factors

    def kappa(self, steps: int, burn_in: int) -> dict[str, float]:
        self.begin()
        total, moved = 0.0, np.zeros_like(self.model)
        for step in range(burn_in + steps):
            noise = self.rng.standard_normal(self.model.size)
            self.finish()
            self.model -= noise
            moved -= noise
            self.begin()
            if step >= burn_in:
                total += self.disagreement()
        self.finish()
        self.engine.memory.absorb(self.addresses, self.step)
        mean, expected = self.mean(self.model), self.mean(moved)
        return {
            "kappa": total / steps / self.comm.size / self.model.size,
            "mean_error": float(np.linalg.norm(mean - expected) / np.linalg.norm(expected)),
        }

    def mean(self, values: np.ndarray) -> np.ndarray:
        total = np.empty_like(values)
        wait(self.comm.Iallreduce(values, total))
        return total / self.comm.size

    def disagreement(self) -> float:
        square = np.array([((self.model - self.mean(self.model)) ** 2).sum()])
        total = np.empty_like(square)
        wait(self.comm.Iallreduce(square, total))
        return float(total[0])


if __name__ == "__main__":
    main()
