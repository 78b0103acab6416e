"""Checks that raise ConfigError for bad arguments of strategies."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from hvd_adpsgd.errors import ConfigError


def require_flag(strategy: str, argument: str, value: Any) -> None:
    """Raise ConfigError unless the value is True or False, or 1 or 0."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(
            f"bad {argument} for {strategy}: got {value!r}, allowed are True and False. Give the same on "
            "every learner."
        )


def require_integer(strategy: str, argument: str, value: Any, low: int = 1) -> None:
    """Raise ConfigError unless the value is a whole number >= low."""
    try:
        good = not isinstance(value, bool) and operator.index(value) >= low
    except TypeError:
        good = False
    if not good:
        raise ConfigError(
            f"bad {argument} for {strategy}: got {value!r}, allowed is int >= {low}. Give the same "
            "such number on every learner."
        )


# largest prefer_fast: the other asks keep all super learners in touch
MOST_PREFERRED = 0.95


def require_preference(strategy: str, value: Any) -> float:
    """Return prefer_fast as float; raise ConfigError unless 0 <= value <= 0.95."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_PREFERRED:
        raise ConfigError(
            f"bad prefer_fast for {strategy}: got {value!r}, allowed is number >= 0 and "
            f"<= {MOST_PREFERRED:g}. Give the same such number on every learner."
        )
    return float(value)


def require_number(
    strategy: str, argument: str, value: Any, low: float, high: float, low_open: bool = False
) -> float:
    """Return the value as float; raise ConfigError unless low <= value < high (low < value if `low_open`)."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    good = number and math.isfinite(value) and low <= value < high
    if not good or (low_open and value == low):
        raise ConfigError(
            f"bad {argument} for {strategy}: got {value!r}, allowed is number "
            f"{'>' if low_open else '>='} {low:g} and < {high:g}. Give the same such number on every "
            "learner."
        )
    return float(value)
