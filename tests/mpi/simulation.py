"""The laws of the averaging schemes in numpy, for all learners at once.

Models are rows of W, one per super learner. Gradients are those of programs/schemes.py, elementwise,
so that a few elements stand for the whole model.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.strategies import parse
from tests.theorems import mixing_matrix

Array = NDArray[np.float64]

LAWS = (
    "delay_by_one",
    "delayed_gradients",
    "periodic_averaging:period=3",
    "periodic_averaging:period=3,block_momentum=0.75",
    "periodic_averaging:period=3,block_momentum=0.75,block_rate=0.8,nesterov=1",
    "synchronous_gossip:order=awc+fixed_ring",
    "synchronous_gossip:order=atc+fixed_ring",
    "synchronous_gossip:order=awc+random_ring:seed=2",
    "synchronous_gossip:order=atc+random_ring:seed=2",
    "synchronous_gossip:order=awc+random_pairs:seed=1",
    "synchronous_gossip:order=atc+random_pairs:seed=1",
    "noloco:period=3",
    "noloco:period=2,rate=0.9,momentum=0.25,seed=4",
)
GOSSIP = ("random_pairs", "fixed_ring", "random_ring")
ONE_OF_A_KIND = (
    "delay_by_one",
    "delayed_gradients",
    "periodic_averaging:period=3",
    "synchronous_gossip:order=atc+random_pairs:seed=1",
    "noloco:period=3",
    "random_pairs",
    "gossip_pga:period=5",
)
RESUMED = (
    "delay_by_one",
    "delayed_gradients",
    "synchronous_gossip:order=awc+random_ring:seed=2",
    "synchronous_gossip:order=atc+random_pairs:seed=1",
    "noloco:period=3",
    "periodic_averaging:period=4",
    "periodic_averaging:period=4,block_momentum=0.75,block_rate=0.8,nesterov=1",
)
FREE = ("random_pairs", "random_ring", "a2cid2", "gossip_pga:period=7")
HALF = 10  # steps until a checkpoint
EXACT = {"steps": 7, "curvature": 0.5, "exact": True}
KNOWN = {"steps": 14, "curvature": 0.0}


@dataclass(frozen=True)
class Setting:
    """What programs/schemes.py trains with.

    Attributes:
        spec: of the averaging.
        steps: how many.
        curvature: h in g = h (w - rank) + noise.
        exact: the noise, the learning rate and h are short binary fractions, so that sums of few
            of them are exact in whatever order they are made.
        momentum: of SGD.
        same_shards: everybody has the gradients of learner 0.
    """

    spec: str
    steps: int = 14
    curvature: float = 0.7
    exact: bool = False
    momentum: float = 0.0
    same_shards: bool = False

    @property
    def lr(self) -> float:
        return 0.125 if self.exact else 0.1


def gradient(s: Setting, step: int, rank: int, index: NDArray[np.int64], w: Array) -> Array:
    """Of learner `rank`, at the elements `index` of its model."""
    rank = 0 if s.same_shards else rank
    if s.exact:
        noise = ((7 * step + 5 * rank + 3 * index) % 17 - 8) / 16
    else:
        noise = np.sin(1 + 3 * step + 5 * rank + 0.37 * index)
    return s.curvature * (w - rank) + noise


@dataclass
class Simulation:
    """Super learners of k learners each, n of them."""

    setting: Setting
    n: int
    k: int
    index: NDArray[np.int64]
    W: Array = field(init=False)

    def __post_init__(self) -> None:
        self.W = np.zeros((self.n, self.index.size))
        self.velocity = np.zeros_like(self.W)
        self.late = np.zeros_like(self.W)
        self.delta = np.zeros_like(self.W)
        self.momentum = np.zeros_like(self.W)
        self.slow = self.W.copy()
        self.start = self.W.copy()
        self.globally = self.W.copy()
        self.pending = False  # a round has begun, and its result is not yet taken in
        self.alone: Collection[int] = ()  # super learners that the mean of all does without

    def run(self, settle_after: int | None = None) -> Array:
        """The models after each step, shape (steps, n, elements)."""
        models = []
        for step in range(self.setting.steps):
            self.step(step)
            if step == settle_after:
                self.settle(step)
            models.append(self.W.copy())
        return np.array(models)

    def gradients(self, step: int) -> Array:
        rows = [
            [
                gradient(self.setting, step, s * self.k + i, self.index, self.W[s])
                for i in range(self.k)
            ]
            for s in range(self.n)
        ]
        return np.array(rows).mean(axis=1)

    def descend(self, G: Array) -> None:
        self.velocity = self.setting.momentum * self.velocity + G
        self.W = self.W - self.setting.lr * self.velocity

    def mean(self, X: Array) -> Array:
        return np.tile(
            X[[s for s in range(self.n) if s not in self.alone]].mean(axis=0), (self.n, 1)
        )

    def mix(self, round_: int) -> Array:
        """The models of the round that began after step `round_`."""
        if not self.pending:
            return self.W
        strategy = parse(self.setting.spec)
        if strategy.name == "delay_by_one":
            return self.mean(self.W)
        return mixing_matrix(strategy, self.n, round_) @ self.W

    def settle(self, step: int) -> None:
        """What was to come one step later is taken in now."""
        if not self.delays_gradients:
            self.W = self.mix(step)
            self.pending = False

    @property
    def delays_gradients(self) -> bool:
        return parse(self.setting.spec).averages == "gradients"

    def step(self, step: int) -> None:
        strategy = parse(self.setting.spec)
        G = self.gradients(step)
        if strategy.name == "synchronous":
            self.descend(self.mean(G))
        elif self.delays_gradients:
            if step:
                self.descend(self.mean(self.late))
            self.late = G
        elif strategy.name == "delay_by_one" or getattr(strategy, "order", "") == "awc":
            self.W = self.mix(step - 1)
            self.descend(G)
            self.pending = True
        elif strategy.name == "synchronous_gossip":
            self.descend(G)
            self.W = mixing_matrix(strategy, self.n, step) @ self.W
        else:
            self.descend(G)
            if (step + 1) % strategy.period == 0 and step >= getattr(strategy, "warm_up", 0):
                self.round((step + 1) // strategy.period - 1)

    def round(self, number: int) -> None:
        strategy = parse(self.setting.spec)
        if strategy.name == "noloco":
            T = mixing_matrix(strategy, self.n, number)
            pull = T @ (self.W - self.slow) + T @ self.slow - self.slow
            self.momentum = strategy.momentum * self.momentum + strategy.rate * pull
            self.slow = self.slow + self.momentum
            self.W = self.slow.copy()
            return
        mean = self.mean(self.W)
        if strategy.block_momentum == 0 and strategy.block_rate == 1:
            self.W = mean
            return
        self.delta = strategy.block_momentum * self.delta + strategy.block_rate * (
            mean - self.start
        )
        self.globally = self.globally + self.delta
        ahead = strategy.block_momentum * self.delta if strategy.nesterov else 0
        self.start = self.globally + ahead
        self.W = self.start.copy()
