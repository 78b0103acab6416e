"""The interface of averaging strategies, and the plans that they give to the engine: data, no callbacks."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import AdpsgdError, ConfigError
from hvd_adpsgd.theory import topology

NOBODY = -1
# Order of step and averaging: adapt while combining; adapt, then combine.
DURING, AFTER = "awc", "atc"
Averaged = Literal["models", "gradients", "nothing"]


@dataclass(frozen=True, eq=False)
class Rounds:
    """Averaging in rounds, in step with peers: a super learner waits for its peers of the round.

    A round follows every `period`-th step and averages the models after that step.

    Attributes:
        period: steps between rounds, >= 1.
        order: DURING: the round runs while the next gradient is computed, and its correction is
            added at the end of that step, W' = W T - lr g(W). AFTER: the step waits for the round,
            W' = (W - lr g(W)) T.
        peers: shape (rounds, 2), int32; row r modulo rounds: the peer that this super learner asks in round
            r, and the peer that asks it; NOBODY for none. None: the exact mean of all super learners.
        warm_up: steps at the beginning without rounds, >= 0.
        still: whether averaged tensors stay unchanged during a round, also with order DURING.

    Raises:
        ConfigError: for a bad period, order, table or warm-up.

    Source: for the two orders Sayed, Adaptation, learning, and optimization over networks, 2014.
    """

    period: int = 1
    order: str = AFTER
    peers: npt.NDArray[np.int32] | None = None
    warm_up: int = 0
    still: bool = False

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

    @property
    def waits(self) -> bool:
        """Whether a step waits for the round that follows it (order AFTER)."""
        return self.order == AFTER

    @property
    def replaces(self) -> bool:
        """Whether the mean of all models overwrites each model bitwise; otherwise mean - model is added."""
        return self.waits or self.still

    def is_due(self, step: int) -> bool:
        """Whether a round follows step number `step`; the first step is 0."""
        return (step + 1) % self.period == 0 and step >= self.warm_up

    def row(self, number: int) -> tuple[int, int]:
        """The peer that this super learner asks in round `number`, and the peer that asks it, or NOBODY."""
        assert self.peers is not None
        asked, asker = self.peers[number % len(self.peers)]
        return int(asked), int(asker)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which peers one super learner asks, in which order, and the weight of an exchange.

    At its r-th ask (r = 0, 1, ...) the super learner asks the peers of row r modulo rounds.

    Attributes:
        schedule: outer ranks of the peers to ask, shape (rounds, width), int32, C-contiguous, read-only.
            With width 0 the super learner asks no peer.
        weight: share w of the models' difference by which an exchange moves each side, 0 < w <= 1/2; 0 for
            no exchanges. With width 0 the weight applies to exchanges that peers ask for.
            With w <= 1/2 an exchange never moves a model past the middle, so that one active and
            one passive exchange at the same time cannot enlarge the disagreement.
        in_step: rounds in step with peers, beside the exchanges of the schedule or, with width 0, in
            place of them; None for no rounds.
        rule: what has the law and the constants by which each super learner changes its own model beside
            averaging: a strategy, or constants for this number of super learners; None for no such change.
        prefer_fast: probability with which the fastest of three peers that the schedule has next is asked.

    Raises:
        ConfigError: if the schedule has another shape or a negative rank, or the weight is out
            of range.
    """

    schedule: npt.NDArray[np.int32]
    weight: float
    in_step: Rounds | None = None
    rule: Any = None
    prefer_fast: float = 0.0

    def __post_init__(self) -> None:
        table = np.array(self.schedule, dtype=np.int32, order="C")
        _require_schedule(table)
        _require_plan_weight(self.weight, table.shape[1] or int(self.in_pairs))
        table.setflags(write=False)
        object.__setattr__(self, "schedule", table)  # a read-only copy, in the frozen dataclass

    @classmethod
    def nobody(cls, in_step: Rounds | None = None, weight: float = 0.0, rule: Any = None) -> Plan:
        """Make a plan without a schedule, so that the super learner asks peers in rounds only, or never."""
        return cls(np.empty((1, 0), dtype=np.int32), weight, in_step, rule)

    @property
    def rounds(self) -> int:
        """Number of rows of the schedule of peers, after which the schedule repeats."""
        return int(self.schedule.shape[0])

    @property
    def in_pairs(self) -> bool:
        """Whether the plan has rounds in which pairs of super learners average their models."""
        return self.in_step is not None and self.in_step.peers is not None

    @property
    def averages_all(self) -> bool:
        """Whether the plan has rounds that compute the exact mean of all super learners."""
        return self.in_step is not None and self.in_step.peers is None

    @property
    def width(self) -> int:
        """Number of peers that a super learner asks for an exchange at the same time."""
        return int(self.schedule.shape[1])


class Strategy(ABC):
    """How super learners average: an immutable value, equal to another strategy with the same spec.

    Attributes:
        name: the name in a spec string.
        averages: what super learners average: "models", "gradients", or "nothing": then all learners
            form one super learner, as in plain Horovod.
        is_gossip: whether the strategy only averages pairs of models asynchronously.
        refuses: uses that have no meaning with this strategy, each with the reason and the cure.
    """

    name: ClassVar[str]
    averages: ClassVar[Averaged] = "models"
    is_gossip: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Raise ConfigError for an argument that is not within its bounds (strategies.validation)."""
        for argument in dataclasses.fields(_instance(self)):
            if check := argument.metadata.get("check"):
                checked = check(self.name, argument.name, getattr(self, argument.name))
                object.__setattr__(self, argument.name, checked)

    def refuse(self, use: str, error: type[AdpsgdError] = ConfigError) -> None:
        """Raise `error` if `use`, a key such as "buffers=", is in `refuses`."""
        if use in self.refuses:
            raise error(f"{use} with averaging={self.spec()}: {self.refuses[use]}")

    def pair_weight(self, n: int) -> float:
        """Share of the models' difference by which an exchange among n super learners moves each side.

        By default the pair weight of the base strategy; 0 without a base.
        """
        base: Strategy | None = getattr(self, "base", None)
        return 0.0 if base is None else base.pair_weight(n)

    def spec(self) -> str:
        """The canonical spec string, `name` or `name:key=value,...`; `parse` reads it back.

        A strategy with a base is `name:key=value+other`.

        Two super learners average in the same way if and only if their specs are equal.
        """
        base = getattr(self, "base", None)
        values = [
            f"{f.name}={_plain(getattr(self, f.name))}"
            for f in dataclasses.fields(_instance(self))
            if f.name != "base"
        ]
        mine = f"{self.name}:{','.join(values)}" if values else self.name
        return mine if base is None else f"{mine}+{base.spec()}"

    def plan(self, super_rank: int, super_size: int) -> Plan:
        """Return the plan of one super learner among `super_size`; plans are cached.

        Raises:
            TopologyError: if super_size < 1 or super_rank is not in [0, super_size).
            ConfigError: if the strategy does not work with `super_size` super learners.
        """
        topology.require_rank(super_size, super_rank)
        return _planned(self, super_rank, super_size)

    @abstractmethod
    def _plan(self, super_rank: int, super_size: int) -> Plan:
        """Make the plan of one super learner; super_size is at least 2."""

    def round_peers(self, n: int, i: int, round: int) -> tuple[int, int]:
        """The peer that super learner i asks in a lock-step round, and the peer that asks i; NOBODY for none.

        Raises:
            ConfigError: if the strategy has no rounds of pairs.
        """
        raise ConfigError(
            f"{self.name} has no rounds of pairs. Use fixed_ring, random_ring or random_pairs there."
        )


@functools.lru_cache(maxsize=64)
def _planned(strategy: Strategy, super_rank: int, super_size: int) -> Plan:
    return Plan.nobody() if super_size == 1 else strategy._plan(super_rank, super_size)


def require_gossip(name: str, base: Any) -> None:
    """Raise ConfigError unless `base`, of the strategy called `name`, is plain gossip."""
    require_strategy(name, base)
    if not base.is_gossip:
        raise ConfigError(
            f"{name} is on top of gossip, not of {base.name!r}, which is no plain gossip. Use it on "
            "random_pairs, fixed_ring or random_ring."
        )
    if getattr(base, "prefer_fast", 0.0):
        raise ConfigError(
            f"{name} on top of {base.spec()}: only plain gossip prefers fast peers. Leave prefer_fast out."
        )


def require_strategy(name: str, base: Any) -> None:
    """Raise ConfigError unless `base`, of the strategy called `name`, is a Strategy."""
    if not isinstance(base, Strategy):
        raise ConfigError(
            f"bad base for {name}: got {base!r}, allowed is a strategy. Pass hvd.FixedRing(), for "
            f"instance; by name that is {name}+fixed_ring."
        )


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _instance(strategy: Strategy) -> Any:
    """Return the strategy typed as dataclasses.fields needs it; every concrete strategy is a dataclass."""
    return strategy


def _require_schedule(table: npt.NDArray[np.int32]) -> None:
    if table.ndim != 2 or table.shape[0] < 1 or (table.size and table.min() < 0):
        raise ConfigError(
            f"bad schedule: Plan got shape {table.shape}, needed is (rounds >= 1, width >= 0) "
            "with outer ranks >= 0. Give one row per ask."
        )


def _require_plan_weight(weight: float, width: int) -> None:
    if not 0 <= weight <= 0.5 or (weight == 0 and width > 0):
        raise ConfigError(
            f"bad weight: Plan got weight {weight} with width {width} (peers asked per round), allowed is "
            "> 0 and <= 0.5, or 0 if width is 0. Give 0.5 for the mean of a pair."
        )
