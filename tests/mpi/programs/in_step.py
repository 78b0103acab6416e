"""Averaging in step without gradients, or with noise in their place, through the real engine.

The order of a step is that of the optimizer: take the round in, offer the model, begin the next.

--lockstep K: K rounds. The models before and after, to be compared with the mixing matrices.

--factors K: the factor by which each of K rounds shrinks the squared disagreement, from --start
fourier (the slowest mode of the fixed ring) on, or from fresh models each time (normal).

--kappa K: W' = T W - N, N of variance 1 per entry. The mean over K steps, after --burn-in, of the
squared distance to the mean per super learner and number: kappa. Also that of the mean from the
sum of all noise, relative.

Learner 0 says what is given, per strategy. Several runs, one after the other: --then between them.
"""

import argparse
from typing import Any

import numpy as np
from engines import Driven, runs, say
from mpi4py import MPI

from hvd_adpsgd.collectives.of_communicator import wait


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True, nargs="+")
    for name in ("lockstep", "factors", "kappa"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--burn-in", type=int, default=60)
    parser.add_argument("--start", choices=("normal", "fourier"), default="normal")
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    for number, words in runs():
        args = parser.parse_args(words)
        result: dict[str, Any] = {}
        for spec in args.strategy:
            run = Run(MPI.COMM_WORLD, spec, args.size, args.seed)
            if args.lockstep:
                result[spec] = run.lockstep(args.lockstep)
            elif args.factors:
                result[spec] = run.factors(args.factors, args.start)
            else:
                result[spec] = run.kappa(args.kappa, args.burn_in)
            run.driven.engine.stop()
        if MPI.COMM_WORLD.rank == 0:
            say(MPI.COMM_WORLD, case=number, **result)


class Run:
    """One engine on a model of `size` float64 numbers."""

    def __init__(self, comm: MPI.Comm, spec: str, size: int, seed: int):
        self.comm, self.rng = comm, np.random.default_rng([seed, comm.rank])
        self.model = np.zeros(size)
        self.driven = Driven(comm, spec, self.model, chunk_kib=64)

    def begin(self) -> None:
        """Take in what is published, offer the model, and begin a round."""
        self.driven.offer()
        self.driven.engine.rounds.begin(self.driven.step)
        self.driven.step += 1

    def finish(self) -> None:
        """End the round under way, and publish what it owes."""
        self.driven.engine.publish(self.driven.step)

    def lockstep(self, rounds: int) -> dict[str, Any]:
        self.model[:] = self.rng.standard_normal(self.model.size)
        models = [self.comm.allgather(self.model.tolist())]
        for _ in range(rounds):
            self.begin()
            self.finish()
        self.driven.absorb()
        models.append(self.comm.allgather(self.model.tolist()))
        return dict(zip(("before", "after"), models, strict=True))

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
            self.driven.absorb()
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
        self.driven.absorb()
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
        return float(self.mean(square)[0]) * self.comm.size


if __name__ == "__main__":
    main()
