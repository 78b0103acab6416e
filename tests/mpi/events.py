"""The schemes that run freely, at events drawn from a seed: who does what next, and the law in numpy.

A run of theirs depends on timing. Here the times are given: each super learner makes steps of uneven
length, at a pace of its own, and asks the next peer of its plan at the times of a Poisson process.
Exchanges come while gradients are computed; what they owe a model is added at the end of its step.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from hvd_adpsgd.strategies import GASLoC, GossipPGA, Strategy, parse
from tests.mpi.simulation import Array, Setting, gradient

FREE = (
    "random_pairs:seed=1",
    "fixed_ring",
    "random_ring:seed=2",
    "gossip_pga:period=5+random_pairs:seed=1",
    "a2cid2+fixed_ring",
    "gasloc:period=4,rate=0.8,momentum=0.6+random_pairs:seed=1",
)
STEPS = 14
PACES = (1.0, 1.4, 0.7, 0.5)  # steps per unit of time
ASKS = 0.5  # per unit of time
SEED = 5
WEIGHTS = {"random_pairs": 1 / 2, "fixed_ring": 1 / 3, "random_ring": 1 / 3, "a2cid2": 1 / 2}

Event = tuple[int, int | None]  # this one steps, or asks that one


def events(spec: str) -> Iterator[Event]:
    """In the order of time, for one super learner per pace. All make STEPS steps."""
    strategy, rng, n = parse(spec), np.random.default_rng(SEED), len(PACES)
    peers = [_partners(strategy, i, n) for i in range(n)]
    period = strategy.period if isinstance(strategy, GossipPGA) else STEPS
    for first in range(0, STEPS, period):
        count = min(period, STEPS - first)
        steps = [np.cumsum(rng.exponential(1 / pace, count)) for pace in PACES]
        end = max(times[-1] for times in steps)
        # before its first step a super learner has offered nothing; before a mean of all it waits
        since = [times[0] if first == 0 else 0.0 for times in steps]
        until = [times[-1] if period < STEPS else end for times in steps]
        asks = [rng.uniform(0, end, rng.poisson(ASKS * end)) for _ in range(n)]
        happens = [(t, i, False) for i in range(n) for t in steps[i]]
        happens += [(t, i, True) for i in range(n) for t in asks[i] if since[i] < t < until[i]]
        for time, i, asking in sorted(happens):
            others = [j for j in range(n) if j != i and since[j] < time < until[j]]
            if not asking:
                yield i, None
            elif set(peers[i][1]) & set(others):
                yield i, next(j for j in peers[i][0] if j in others)


def _partners(strategy: Strategy, i: int, n: int) -> tuple[Iterator[int], set[int]]:
    """Whom it asks, one after the other for ever, and who all they are."""
    schedule = strategy.plan(i, n).schedule.ravel().tolist()
    return itertools.cycle(schedule), set(schedule)


class FreeRun:
    """The law, for all super learners.

    Attributes:
        W: models, shape (n, elements). Others see W + owed.
        owed: what exchanges owe the models, until the end of their step.
        H: distance of the second models of a2cid2.
        theta, moved, before: of gasloc, the models at the start of the block, what exchanges have added since
            then, and u of the block before.
    """

    def __init__(self, setting: Setting, index: Array):
        self.setting, self.index, self.n = setting, index, len(PACES)
        self.W, self.velocity, self.owed, self.H = np.zeros((4, self.n, index.size))
        self.theta, self.moved, self.before = np.zeros((3, self.n, index.size))
        self.made = [0] * self.n  # steps
        self.strategy = parse(setting.spec)
        self.weight = WEIGHTS[getattr(self.strategy, "base", self.strategy).name]
        self.accelerated = self.strategy.name == "a2cid2"
        if self.accelerated:  # on the ring of n: chi1 = 1 / (1 - cos(2 pi / n)), chi2 = 1 - 1/n
            self.weight = WEIGHTS["a2cid2"]
            chi1, chi2 = 1 / (1 - math.cos(2 * math.pi / self.n)), 1 - 1 / self.n
            self.decay = math.exp(-1 / math.sqrt(chi1 * chi2))  # of H in a step: exp(-2 eta)
            self.share = math.sqrt(chi1 / chi2) - 1  # 2 alpha_tilde - 1

    def run(self) -> Array:
        """Models after each one's steps, then without anything owed, shape (STEPS + 1, n, elements)."""
        models = np.empty((STEPS + 1, *self.W.shape))
        for i, j in events(self.setting.spec):
            if j is None:
                self.step(i)
                models[self.made[i] - 1, i] = self.W[i]
                if self.mean_is_due():
                    self.W[:] = self.W.mean(axis=0)
                    models[self.made[i] - 1] = self.W
            else:
                moved = self.weight * (self.W[j] + self.owed[j] - self.W[i] - self.owed[i])
                self.owed[i] += moved
                self.owed[j] -= moved
        for i in range(self.n):
            self.take_in(i)
        models[STEPS] = self.W + self.H / 2
        return models

    def step(self, i: int) -> None:
        s, rows = self.setting, (self.made[i], i, self.index, self.W[i])
        self.velocity[i] = s.momentum * self.velocity[i] + gradient(s, *rows)
        self.W[i] -= s.lr * self.velocity[i]
        if self.accelerated:
            self.W[i] += self.H[i] * (1 - self.decay) / 2
            self.H[i] *= self.decay
        if isinstance(self.strategy, GASLoC) and (self.made[i] + 1) % self.strategy.period == 0:
            self.outer_step(i, self.strategy.rate, self.strategy.momentum)
        self.take_in(i)
        self.made[i] += 1

    def outer_step(self, i: int, rate: float, momentum: float) -> None:
        gradients = self.W[i] - self.theta[i] - self.moved[i]
        u = self.theta[i] + rate * gradients + self.moved[i]
        self.theta[i] = self.W[i] = u + momentum * (u - self.before[i])
        self.before[i], self.moved[i] = u, 0

    def take_in(self, i: int) -> None:
        self.W[i] += self.owed[i]
        self.moved[i] += self.owed[i]
        if self.accelerated:
            self.H[i] += self.share * self.owed[i]
        self.owed[i] = 0

    def mean_is_due(self) -> bool:
        if not isinstance(self.strategy, GossipPGA):
            return False
        return len(set(self.made)) == 1 and self.made[0] % self.strategy.period == 0
