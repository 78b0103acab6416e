"""Benchmark of averaging on a ring through the engine, with and without A2CiD2, against theory.

Run by `python -m hvd_adpsgd bench gossip`, one process per super learner. Exchanges happen at the times of a
Poisson process that all processes draw from one seed; each exchange is a round of the engine between two
super learners. Between its exchanges a super learner couples its model to its second model (A2CiD2) for the
elapsed time. Every exchange moves plain and accelerated columns, so that both schemes see the same events.

--windows R: R short runs, which start with the disagreement that decays most slowly in expectation
(theory.gossip.slowest_disagreement). The mean of the squared disagreement at the end is exp(-rate x time) up
to the sampling error, which gives the rate of the expectation. Long runs give the rate of a typical run, from
the mean of the logarithm; it is higher, because few unlucky runs dominate the expectation. It has no closed
form; instead --simulated S runs compute the exact updates without engines.

--steps K: K further steps, with an update after every unit of time, and one group of columns per kind of
update: white noise, noise through momentum 0.9, a constant drift that differs between super learners. The
remaining disagreement is compared with that of plain gossip, also at twice the rate of exchanges.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.collectives.of_communicator import allgather_object, wait
from hvd_adpsgd.strategies.plan import DURING, NOBODY, Plan, Rounds
from hvd_adpsgd.theory import gossip as theory
from hvd_adpsgd.theory import topology
from hvd_adpsgd.tools.bench import report, settings
from hvd_adpsgd.tools.bench.driven import Driven

Matrix = npt.NDArray[np.float64]
Event = tuple[float, int, int]  # an exchange: its time, and the ranks of two neighbours

UPDATES = ("white", "momentum", "drift")
MOMENTUM = 0.9
# Lengths of a measured window and of a long run, in units of 1 / r: the distance of the models decays as
# exp(-r t) with A2CiD2.
SHORT, LONG = 2.0, 40.0
LONG_RUNS = 8
BURN_IN = 12  # length of the burn-in, in units of chi1, the decay time of the expected model's slowest mode


def main() -> None:
    args = settings()

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    constants = theory.acceleration(comm.size, topology.ring_edges(comm.size))
    result: dict[str, Any] = {"super_learners": comm.size, "seeds": args.seeds}
    result |= {"eta": constants.eta, "alpha_tilde": constants.alpha_tilde}
    if args.windows:
        result["decay"] = decay(comm, constants, args)
    if args.steps:
        result["left"] = spread(comm, args)
        result["left"]["drift"]["theory"] = 1 / theory.drift_gain(constants)
    report(comm.rank, result)


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


# ---- decay --------------------------------------------------------------------------------------


def decay(comm: Any, constants: theory.Acceleration, args: argparse.Namespace) -> dict[str, Any]:
    """Return the decay rates of the squared disagreement, measured and in theory."""
    n = comm.size
    edges = topology.ring_edges(n)
    plain, fast = theory.gossip_decay(n, edges), theory.gossip_decay(n, edges, constants)
    short, long = SHORT / fast, LONG / fast
    windows = draw_all([args.seeds, 1], args.windows, n, short)
    longer = draw_all([args.seeds, 2], LONG_RUNS, n, long)
    start = Start(n, constants)
    few, from_law = window_factors(comm, start, windows, short)
    typical = typical_rates(comm, start, longer, long)
    simulated = simulate(start, draw_all([args.seeds, 5], args.simulated, n, long), long)
    mean, error = few.mean(axis=0), few.std(axis=0, ddof=1) / math.sqrt(len(few))
    found: dict[str, Any] = {"windows": len(windows), "long_runs": len(longer)}
    found |= {"window": short, "long": long, "from_law": from_law}
    for column, (name, rate) in enumerate((("plain", plain), ("a2cid2", fast))):
        found[name] = {
            "theory": rate,
            "measured": -math.log(mean[column]) / short,
            "error": float(error[column] / mean[column] / short),
            "typical": float(typical[column]),
            "typical_simulated": float(simulated[column]),
        }
    kinds = ("theory", "measured", "typical", "typical_simulated")
    return found | {"gain": {key: found["a2cid2"][key] / found["plain"][key] for key in kinds}}


def window_factors(
    comm: Any, start: Start, windows: list[list[Event]], length: float
) -> tuple[Matrix, float]:
    """Return the squared disagreement after each window by scheme, and the engine's largest error."""
    gossip, factors, from_law = Gossip(comm, start.constants, *start.columns, windows), [], 0.0
    for events in windows:
        gossip.start(*start.of(comm.rank))
        gossip.until(length, gossip.next + len(events))
        factors.append(by_scheme(gossip.squares(), comm.size))
        models = np.array(allgather_object(comm, gossip.model))
        from_law = max(from_law, float(np.abs(models - start.after(events, length)).max()))
    gossip.driven.engine.stop()
    return np.array(factors), from_law


def typical_rates(comm: Any, start: Start, runs: list[list[Event]], length: float) -> Matrix:
    """Return the mean decay rate of disagreement over the second half of each run, by scheme."""
    gossip, rates = Gossip(comm, start.constants, *start.columns, runs), []
    for events in runs:
        gossip.start(*start.of(comm.rank))
        ends = []
        for until, part in halves(events, length):
            gossip.until(until, gossip.next + len(part))
            ends.append(np.log(by_scheme(gossip.squares(), comm.size)))
        rates.append((ends[0] - ends[1]) / (length / 2))
    gossip.driven.engine.stop()
    return np.asarray(np.mean(rates, axis=0))


def draw_all(seeds: Any, count: int, n: int, length: float) -> list[list[Event]]:
    """Return `count` random sequences of exchanges per seed; `seeds` is (seeds, number of this use)."""
    each = [np.random.default_rng([seed, seeds[1]]) for seed in seeds[0]]
    return [draw(rng, n, 1.0, length) for rng in each for _ in range(count)]


def halves(events: list[Event], length: float) -> list[tuple[float, list[Event]]]:
    """Split a run's exchanges at half of its `length`; return (end time, exchanges) of both halves."""
    cut = sum(time < length / 2 for time, _, _ in events)
    return [(length / 2, events[:cut]), (length, events[cut:])]


def by_scheme(squares: Matrix, n: int) -> tuple[float, float]:
    """Return the squared disagreement of plain and of accelerated columns, each 1 at the start."""
    return float(squares[:n].sum() / n), float(squares[n:].sum() / n)


def simulate(start: Start, sequences: list[list[Event]], length: float) -> Matrix:
    """Return the mean decay rates of the models' disagreement in these runs, computed without engines.

    NaN if `sequences` is empty.
    """
    n = len(start.model)
    rates = []
    for events in sequences:
        (middle, first), _ = halves(events, length)
        ends = [
            np.log(by_scheme(((x - x.mean(axis=0)) ** 2).sum(axis=0), n))
            for x in (start.after(first, middle), start.after(events, length))
        ]
        rates.append((ends[0] - ends[1]) / (length - middle))
    return np.asarray(np.mean(rates, axis=0)) if rates else np.full(2, np.nan)


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


# ---- disagreement under updates -----------------------------------------------------------------


def spread(comm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the squared disagreement of A2CiD2, and of twice the exchanges, as ratios to plain gossip's."""
    found: dict[str, Any] = {}
    rows = [(left(comm, 1.0, s, args), left(comm, 2.0, s, args)) for s in args.seeds]
    for kind, name in enumerate(UPDATES):
        plain = [one[0, kind] for one, _ in rows]
        found[name] = {"plain": float(np.mean(plain))}
        for scheme, values in (
            ("a2cid2", [one[1, kind] for one, _ in rows]),
            ("double", [two[0, kind] for _, two in rows]),
        ):
            ratios = np.array(values) / plain
            found[name][scheme] = float(ratios.mean())
            found[name][f"{scheme}_min"] = float(ratios.min())
            found[name][f"{scheme}_max"] = float(ratios.max())
    return found


def left(comm: Any, rate: float, seed: int, args: argparse.Namespace) -> Matrix:
    """Return the mean squared distance from the mean model per element, by scheme and kind of update."""
    n, width = comm.size, args.columns
    constants = theory.acceleration(n, topology.ring_edges(n), rate)
    burn_in = math.ceil(BURN_IN * constants.chi1)
    events = draw(np.random.default_rng([seed, 3]), n, rate, burn_in + args.steps)
    times = np.array([time for time, _, _ in events])
    half = len(UPDATES) * width
    gossip = Gossip(comm, constants, half, half, [events])
    rng = np.random.default_rng([seed, 4, comm.rank])
    drift, moving = rng.standard_normal(width), np.zeros(width)
    total, looks = np.zeros(2 * half), 0
    for step in range(1, burn_in + args.steps + 1):
        gossip.until(step, int(np.searchsorted(times, step)))
        white, noise = rng.standard_normal((2, width))
        moving = MOMENTUM * moving + noise
        gossip.model -= np.tile(np.concatenate([white, moving, drift]), 2)
        if step > burn_in and step % 5 == 0:
            total += gossip.squares()
            looks += 1
    gossip.driven.engine.stop()
    return total.reshape(2, len(UPDATES), width).mean(axis=2) / (looks * n)


if __name__ == "__main__":
    main()
