"""Averages on a ring through the engine, with and without A2CiD2; says at which rates disagreement decays.

Exchanges happen at the times of a Poisson process that all processes draw from one seed; each exchange is a
round of the engine between two super learners. Between its exchanges a super learner couples its model to its
second model (A2CiD2) for the elapsed time. Every exchange moves plain and accelerated columns, so that both
schemes see the same events.

Runs are short, and start with the disagreement that decays most slowly in expectation
(theory.gossip.slowest_disagreement). The mean of the squared disagreement at the end is exp(-rate x time) up
to the sampling error, which gives the rate of the expectation.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from hvd_adpsgd_lab.bench.driven import Driven
from learner import say

from hvd_adpsgd.collectives.of_communicator import allgather_object, wait
from hvd_adpsgd.strategies.plan import DURING, NOBODY, Plan, Rounds
from hvd_adpsgd.theory import gossip as theory
from hvd_adpsgd.theory import topology

Matrix = npt.NDArray[np.float64]
Event = tuple[float, int, int]  # an exchange: its time, and the ranks of two neighbours

# length of a run, in units of 1 / r: the distance of the models decays as exp(-r t) with A2CiD2
SHORT = 2.0


def main() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    constants = theory.acceleration(comm.size, topology.ring_edges(comm.size))
    say(**decay(comm, constants, int(sys.argv[1])))


def draw(rng: np.random.Generator, n: int, rate: float, seconds: float) -> list[Event]:
    """Return random exchanges of a ring in [0, seconds]; each super learner has `rate` per unit of time."""
    edges = topology.ring_edges(n)
    count = rng.poisson(rate * n / 2 * seconds)
    times = np.sort(rng.uniform(0, seconds, count))
    return [(float(t), *edges[e]) for t, e in zip(times, rng.integers(0, n, count), strict=True)]


class Gossip:
    """The model of one super learner, which its engine averages at the events of given sequences.

    The first `plain` columns have no second model; the others are averaged by A2CiD2.

    Args:
        comm: communicator of all super learners.
        constants: constants of A2CiD2.
        plain: number of columns without A2CiD2.
        accelerated: number of columns with A2CiD2.
        sequences: all sequences of events that will be used, in order.
    """

    def __init__(
        self,
        comm: Any,
        constants: theory.Acceleration,
        plain: int,
        accelerated: int,
        sequences: list[list[Event]],
    ):
        self.comm, self.events = comm, [event for events in sequences for event in events]
        self.next = 0
        self.model = np.zeros(plain + accelerated)
        self.distance = np.zeros(accelerated)  # second model minus model (xt - x)
        self._fast = self.model[plain:]
        self._eta, self._share = constants.eta, 2 * constants.alpha_tilde - 1
        self._coupled = 0.0  # time up to which the coupling of both models has been applied
        plan = Plan.nobody(Rounds(1, DURING, self._partners()), weight=1 / 2)
        self.driven = Driven(comm, self.model, plan, chunk_kib=64)

    def _partners(self) -> npt.NDArray[np.int32]:
        """Return a row per exchange: the peer that this super learner asks, and the peer that asks it."""
        table = np.full((max(1, len(self.events)), 2), NOBODY, dtype=np.int32)
        for k, (_, i, j) in enumerate(self.events):
            if self.comm.rank in (i, j):
                table[k] = (j, NOBODY) if self.comm.rank == i else (NOBODY, i)
        return table

    def start(self, model: Matrix, distance: Matrix) -> None:
        """Set the model and, as its distance from the model, the second model, at time 0."""
        self.model[:], self.distance[:] = model, distance
        self._coupled = 0.0

    def until(self, time: float, last: int) -> None:
        """Perform all exchanges before number `last`, and couple model and second model up to `time`."""
        for k in range(self.next, last):
            if self.comm.rank in self.events[k][1:]:
                self.couple(self.events[k][0])
                self._exchange(k)
        self.next = last
        self.couple(time)

    def couple(self, time: float) -> None:
        """Couple models x and x + h up to `time`: x += h (1 - exp(-2 eta dt)) / 2, h *= exp(-2 eta dt)."""
        left = math.exp(-2 * self._eta * (time - self._coupled))
        self._fast += self.distance * ((1 - left) / 2)
        self.distance *= left
        self._coupled = time

    def _exchange(self, k: int) -> None:
        """Perform exchange k: x becomes the pair's mean, and h grows by (2 alpha_tilde - 1) x change of x."""
        before = self._fast.copy()
        self.driven.round(k, lambda: self.driven.average(k))
        self.distance += self._share * (self._fast - before)

    def squares(self) -> Matrix:
        """Return the squared distance from the mean model, summed over super learners, by column."""
        mean = self._sum(self.model) / self.comm.size
        return self._sum((self.model - mean) ** 2)

    def _sum(self, values: Matrix) -> Matrix:
        total = np.empty_like(values)
        wait(self.comm.Iallreduce(values, total))
        return total


def decay(comm: Any, constants: theory.Acceleration, runs: int) -> dict[str, Any]:
    """Return the decay rates of the squared disagreement, and the engine's largest error."""
    n = comm.size
    seconds = SHORT / theory.gossip_decay(n, topology.ring_edges(n), constants)
    rng = np.random.default_rng([0, 1])
    sequences = [draw(rng, n, 1.0, seconds) for _ in range(runs)]
    start = Start(n, constants)
    gossip = Gossip(comm, constants, *start.columns, sequences)
    factors, from_law = [], 0.0
    for events in sequences:
        gossip.start(*start.of(comm.rank))
        gossip.until(seconds, gossip.next + len(events))
        factors.append(by_scheme(gossip.squares(), n))
        models = np.array(allgather_object(comm, gossip.model))
        from_law = max(from_law, float(np.abs(models - start.after(events, seconds)).max()))
    gossip.driven.engine.stop()
    plain, fast = -np.log(np.mean(factors, axis=0)) / seconds
    return {"rank": comm.rank, "from_law": from_law, "plain": plain, "a2cid2": fast}


def by_scheme(squares: Matrix, n: int) -> tuple[float, float]:
    """Return the squared disagreement of plain and of accelerated columns, each 1 at the start."""
    return float(squares[:n].sum() / n), float(squares[n:].sum() / n)


class Start:
    """Initial models whose second moments over 3 n columns are exactly theory.gossip.slowest_disagreement.

    Attributes:
        model: models of all super learners, shape (n, 3 n); the first n columns are for plain gossip.
        shadow: second models of the other columns, shape (n, 2 n).
        constants: constants of A2CiD2.
        columns: numbers of plain and of accelerated columns.
    """

    def __init__(self, n: int, constants: theory.Acceleration):
        edges = topology.ring_edges(n)
        plain = square_root(theory.slowest_disagreement(n, edges))
        fast = square_root(theory.slowest_disagreement(n, edges, constants))
        self.model = np.hstack([plain, fast[:n]])
        self.shadow = fast[n:]
        self.constants, self.columns = constants, (n, 2 * n)

    def of(self, rank: int) -> tuple[Matrix, Matrix]:
        """Return the model of super learner `rank`, and the distance of the second model from the model."""
        n = len(self.model)
        return self.model[rank], self.shadow[rank] - self.model[rank, n:]

    def after(self, events: list[Event], length: float) -> Matrix:
        """Return the models of all super learners at time `length`, computed without an engine."""
        n = len(self.model)
        eta, weight = self.constants.eta, self.constants.alpha_tilde
        x, xt = self.model.copy(), self.shadow.copy()
        now = 0.0
        for time, i, j in [*events, (length, 0, 0)]:
            mean, half = (x[:, n:] + xt) / 2, (x[:, n:] - xt) / 2
            half *= math.exp(-2 * eta * (time - now))
            x[:, n:], xt, now = mean + half, mean - half, time
            gap = x[i] - x[j]
            x[i], x[j] = x[i] - gap / 2, x[j] + gap / 2
            xt[i], xt[j] = xt[i] - weight * gap[n:], xt[j] + weight * gap[n:]
        return x


def square_root(moments: Matrix) -> Matrix:
    """Return R with R R^T = M, where M is `moments` as one matrix, shape (copies n, copies n)."""
    copies, _, n, _ = moments.shape
    values, vectors = np.linalg.eigh(moments.transpose(0, 2, 1, 3).reshape(copies * n, copies * n))
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0)))


if __name__ == "__main__":
    main()
