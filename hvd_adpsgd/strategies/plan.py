"""What a strategy is, and what it hands the engine: data, never a callback."""

from __future__ import annotations

import dataclasses
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.update_rules import Rule

__all__ = [
    "AFTER",
    "DURING",
    "NOBODY",
    "SEED_BOUND",
    "Plan",
    "Rounds",
    "Strategy",
    "checked_seed",
    "require_strategy",
]

SEED_BOUND = 2**32
NOBODY = -1
DURING, AFTER = "awc", "atc"  # adapt while communicating; adapt, then communicate


@dataclass(frozen=True, eq=False)
class Rounds:
    """What super learners do in step with each other; each waits for its peers of the round.

    A round comes after every `period`-th step. Its models are those that the step has left.

    Attributes:
        period: steps between rounds, >= 1.
        order: DURING: the round runs while the next gradient is computed, and what comes of it is
            added at the end of that step, W' = W T - lr g(W). AFTER: the step waits for it,
            W' = (W - lr g(W)) T.
        peers: shape (rounds, 2), int32: whom this super learner asks in round r modulo rounds,
            and who asks it; NOBODY for none. None: the exact mean of all super learners.
        warm_up: steps at the beginning after which no round comes, >= 0.

    Raises:
        ConfigError: for a bad period, order, table or warm-up.

    Source: for the two orders Sayed, Adaptation, learning, and optimization over networks, 2014.
    """

    period: int = 1
    order: str = AFTER
    peers: npt.NDArray[np.int32] | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise ConfigError(
                f"bad rounds: warm_up {self.warm_up}, allowed is >= 0. Use 0 for rounds from the start."
            )
        if self.period < 1 or self.order not in (DURING, AFTER):
            raise ConfigError(
                f"bad rounds: period {self.period} and order {self.order!r}, allowed are period >= 1 "
                f"and order {DURING!r} or {AFTER!r}. Use period 1 for a round after every step."
            )
        if self.order == DURING and self.period != 1:
            raise ConfigError(
                f"bad rounds: order {DURING!r} with period {self.period}: what a round owes the model "
                f"is added one step later, so rounds come after every step. Use order {AFTER!r}."
            )
        if self.peers is not None:
            table = np.array(self.peers, dtype=np.int32, order="C")
            if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] != 2:
                raise ConfigError(
                    f"bad rounds: peers of shape {table.shape}, needed is (rounds >= 1, 2). Give "
                    "whom to ask and who asks, one row per round."
                )
            table.setflags(write=False)
            object.__setattr__(self, "peers", table)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rounds):
            return NotImplemented
        same = (self.period, self.order, self.warm_up) == (other.period, other.order, other.warm_up)
        if self.peers is None or other.peers is None:
            return same and self.peers is other.peers
        return same and np.array_equal(self.peers, other.peers)

    def __hash__(self) -> int:
        return hash((self.period, self.order))

    def is_due(self, step: int) -> bool:
        """Whether a round comes after step number `step`; the first is 0."""
        return (step + 1) % self.period == 0 and step >= self.warm_up

    def row(self, number: int) -> tuple[int, int]:
        """Whom to ask in round `number`, and who asks; NOBODY for none."""
        assert self.peers is not None
        asked, asker = self.peers[number % len(self.peers)]
        return int(asked), int(asker)


@dataclass(frozen=True, eq=False)
class Plan:
    """Whom one super learner asks, in which order, and how much of the difference each takes.

    At its r-th ask (r = 0, 1, ...) the super learner asks the peers of row r modulo rounds.

    Attributes:
        schedule: outer ranks, shape (rounds, width), int32, C-contiguous, read-only. Width 0
            asks nobody.
        weight: share w of the difference that each side moves, 0 < w <= 1/2; 0 if width is 0.
            With w <= 1/2 an exchange never moves a model past the middle, so that one active and
            one passive exchange at the same time cannot enlarge the disagreement.
        in_step: what is done in step with the others, beside the exchanges of the schedule or, with
            width 0, instead of them; None for nothing.
        rule: what each super learner does to its own model when it has averaged; None for nothing.

    Raises:
        ConfigError: if the schedule has another shape or a negative rank, or the weight is out
            of range.
    """

    schedule: npt.NDArray[np.int32]
    weight: float
    in_step: Rounds | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        table = np.array(self.schedule, dtype=np.int32, order="C")
        _require_schedule(table)
        exchanging = self.in_step is not None and self.in_step.peers is not None
        _require_plan_weight(self.weight, table.shape[1] or int(exchanging))
        table.setflags(write=False)
        object.__setattr__(self, "schedule", table)  # frozen: the plan's own, read-only copy

    @classmethod
    def nobody(
        cls, in_step: Rounds | None = None, weight: float = 0.0, rule: Rule | None = None
    ) -> Plan:
        """The plan that asks nobody, or only in rounds: one row of width 0."""
        return cls(np.empty((1, 0), dtype=np.int32), weight, in_step, rule)

    @property
    def rounds(self) -> int:
        """Rows of the schedule, after which it repeats."""
        return int(self.schedule.shape[0])

    @property
    def width(self) -> int:
        """Peers asked per ask."""
        return int(self.schedule.shape[1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (self.weight, self.in_step, self.rule) == (
            other.weight,
            other.in_step,
            other.rule,
        ) and np.array_equal(self.schedule, other.schedule)

    def __hash__(self) -> int:
        return hash((self.weight, self.schedule.shape, self.schedule.tobytes()))


class Strategy(ABC):
    """How super learners average: an immutable value, equal to another with the same spec.

    Attributes:
        name: the name in a spec string.
        weight: share of the difference that each side of an exchange moves, for large n.
        averages_gradients_globally: whether gradients of all learners are averaged each step, so
            that there is nothing left for the engine to do.
    """

    name: ClassVar[str]
    weight: ClassVar[float]
    averages_gradients_globally: ClassVar[bool] = False

    def spec(self) -> str:
        """The canonical spec string, `name` or `name:key=value,...`; `parse` reads it back.

        A strategy with a base is `name:key=value+other`.

        Two super learners average in the same way exactly if their specs are equal.
        """
        base = getattr(self, "base", None)
        values = [
            f"{f.name}={_plain(getattr(self, f.name))}"
            for f in dataclasses.fields(_instance(self))
            if f.name != "base"
        ]
        mine = f"{self.name}:{','.join(values)}" if values else self.name
        return mine if base is None else f"{mine}+{base.spec()}"

    @abstractmethod
    def plan(self, super_rank: int, super_size: int) -> Plan:
        """The plan of one super learner among `super_size`.

        Raises:
            TopologyError: if super_size < 1 or super_rank is not in [0, super_size).
        """

    @abstractmethod
    def mixing_matrix(self, n: int, round: int) -> npt.NDArray[np.float64]:
        """The matrix T of one lock-step round, as in the papers' synchronous analysis.

        The engine has no rounds; the matrix is for theory and for tests of the engine.

        Args:
            n: number of super learners.
            round: number of the round, >= 0.

        Returns:
            T, shape (n, n), symmetric and doubly stochastic.

        Raises:
            TopologyError: if n < 1 or round < 0.
        """

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """Whom super learner i asks in one lock-step round, and who asks it; NOBODY for none.

        Raises:
            ConfigError: if the strategy has no rounds of pairs.
        """
        raise ConfigError(
            f"{self.name} has no rounds of pairs. Use fixed_ring, random_ring or random_pairs there."
        )


def require_strategy(name: str, base: Any) -> None:
    """Raise ConfigError unless `base` is a strategy, on top of which `name` can be."""
    if not isinstance(base, Strategy):
        raise ConfigError(
            f"bad base for {name}: got {base!r}, allowed is a strategy. Pass hvd.FixedRing(), for "
            f"instance; by name that is {name}+fixed_ring."
        )


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def checked_seed(strategy: str, seed: Any) -> int:
    """The seed as a plain int.

    Raises:
        ConfigError: if it is not an integer in [0, 2**32).
    """
    try:
        plain = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        plain = -1
    if not 0 <= plain < SEED_BOUND:
        raise ConfigError(
            f"bad seed for {strategy}: got {seed!r}, allowed is int >= 0 and < {SEED_BOUND}. "
            "Give the same such number on every learner."
        )
    return plain


def _instance(strategy: Strategy) -> Any:
    """The strategy as what dataclasses.fields accepts; every concrete one is a dataclass."""
    return strategy


def _require_schedule(table: npt.NDArray[np.int32]) -> None:
    if table.ndim != 2 or table.shape[0] < 1 or (table.size and table.min() < 0):
        raise ConfigError(
            f"bad schedule: Plan got shape {table.shape}, needed is (rounds >= 1, width >= 0) "
            "with outer ranks >= 0. Give one row per ask."
        )


def _require_plan_weight(weight: float, width: int) -> None:
    if width == 0 and weight == 0:
        return
    if width == 0 or not 0 < weight <= 0.5:
        raise ConfigError(
            f"bad weight: Plan got {weight} with width {width}, allowed is > 0 and <= 0.5, and 0 "
            "with width 0. Give 0.5 for the mean of a pair."
        )
