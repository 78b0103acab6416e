"""Parameters of the rules by which a super learner updates its model after averaging."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockMomentum:
    """Parameters of block momentum, the momentum over blocks of steps; see strategies.PeriodicAveraging."""

    momentum: float
    rate: float
    nesterov: bool


@dataclass(frozen=True)
class SlowModel:
    """Parameters of a slow model that follows the averaged model with momentum; see strategies.NoLoCo."""

    momentum: float
    rate: float


@dataclass(frozen=True)
class Accelerate:
    """Parameters of a second model that is coupled to the first; see strategies.A2CiD2.

    Attributes:
        eta: rate at which the two models pull each other together, per step at one exchange per step.
        alpha_tilde: share of the difference from the peer by which an exchange moves the second model.
    """

    eta: float
    alpha_tilde: float


@dataclass(frozen=True)
class OuterStep:
    """Parameters of a step with momentum after each block of `period` steps; see strategies.GASLoC."""

    period: int
    rate: float
    momentum: float


@dataclass(frozen=True)
class LateGradients:
    """Gradients are averaged instead of models, and used one step later; see strategies.DelayedGradients."""


Rule = BlockMomentum | SlowModel | Accelerate | OuterStep | LateGradients
