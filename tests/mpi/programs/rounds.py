"""Pure averaging, no gradients, through the real engine.

--lockstep K: K rounds in step. Every super learner offers, then the exchanges of the round
run, all from the offered models. Gives the models before and after, to be compared with the mixing
matrices.

--factors K: lock step again. Gives the factor by which each round shrank the squared disagreement,
from fresh models each round or, with --start fourier, on from the slowest mode of the fixed ring.

Prints one JSON object: what is given, per strategy.
"""

import argparse
import json

import numpy as np
from mpi4py import MPI

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.strategies import Strategy, SynchronousGossip, parse
from hvd_adpsgd.strategies.plan import AFTER

DEADLINE_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True, nargs="+")
    parser.add_argument("--lockstep", type=int, default=0)
    parser.add_argument("--factors", type=int, default=0)
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", choices=("normal", "fourier"), default="normal")
    args = parser.parse_args()
    result = {}
    for spec in args.strategy:
        run = Run(MPI.COMM_WORLD, parse(spec), args.size)
        rng = np.random.default_rng([args.seed, run.comm.rank])
        if args.lockstep:
            result[spec] = run.lockstep(rng, args.lockstep)
        else:
            result[spec] = run.factors(rng, args.factors, args.start)
        run.engine.stop()
    if MPI.COMM_WORLD.rank == 0:
        with open(1, "wb", closefd=False) as out:  # os.write may write a part only
            out.write((json.dumps(result) + "\n").encode())


class Run:
    """One engine on a model of `size` float64 numbers."""

    def __init__(self, comm: MPI.Comm, strategy: Strategy, size: int):
        self.comm = comm
        outer = comm.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
        config = Config(deadline_s=DEADLINE_S)
        plan = SynchronousGossip(AFTER, strategy).plan(comm.rank, comm.size)
        self.engine = Engine(inner=None, outer=outer, plan=plan, config=config)
        self.engine.memory.extend([TensorSpec("model", (size,), "float64")])
        self.engine.start()
        self.model = np.zeros(size)
        self.addresses = np.array([self.model.ctypes.data], dtype=np.uintp)
        self.step = 0

    def turn(self) -> None:
        """A trainer's step without a gradient."""
        self.engine.publish(self.step)
        self.engine.memory.absorb(self.addresses, self.step)
        self.engine.offer(self.step)
        self.step += 1

    def lockstep(self, rng: np.random.Generator, rounds: int) -> dict:
        self.model[:] = rng.standard_normal(self.model.size)
        before = self.comm.gather(self.model.copy())
        self.turn()
        for k in range(rounds):
            self.round(k)
        after = self.comm.gather(self.model.copy())
        if self.comm.rank:
            return {}
        return {"before": np.array(before).tolist(), "after": np.array(after).tolist()}

    def round(self, k: int) -> None:
        """All exchanges of one round, from the offered models, and what they owe taken in."""
        self.engine.rounds.begin(k)
        self.turn()

    def factors(self, rng: np.random.Generator, rounds: int, start: str) -> list[float]:
        if start == "fourier":
            self.model[:] = np.random.default_rng(7).standard_normal(self.model.size)
            self.model *= np.cos(2 * np.pi * self.comm.rank / self.comm.size)
        factors = []
        before = self.disagreement()
        for k in range(rounds):
            if start == "normal":
                self.model[:] = rng.standard_normal(self.model.size)
                before = self.disagreement()
            self.engine.memory.absorb(self.addresses, self.step)
            self.engine.offer(self.step)
            self.round(k)
            factors.append(self.disagreement() / before)
            before *= factors[-1]
        return factors

    def disagreement(self) -> float:
        models = np.array(self.comm.allgather(self.model))
        return float(((models - models.mean(axis=0)) ** 2).sum())


if __name__ == "__main__":
    main()
