"""Arguments of strategies, each with its bounds: a Strategy raises ConfigError for others when it is made."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import field
from typing import Any

from hvd_adpsgd.errors import ConfigError

# largest prefer_fast: the other asks keep all super learners in touch
MOST_PREFERRED = 0.95


def flag(default: bool) -> Any:
    """Make a field that is True or False, or 1 or 0."""
    return _argument(default, _flag)


def integer(default: int, low: int = 1, below: float = math.inf) -> Any:
    """Make a field for a whole number, low <= number < below."""
    return _argument(default, _integer, low, below)


def number(default: float, low: float, high: float, low_open: bool = False) -> Any:
    """Make a field for a number, low <= number < high (low < number if `low_open`)."""
    return _argument(default, _number, low, high, low_open, False)


def seed() -> Any:
    """Make a field for the seed of a random generator."""
    return integer(0, 0, 2**32)


def preference() -> Any:
    """Make the field prefer_fast."""
    return _argument(0.0, _number, 0, MOST_PREFERRED, False, True)


def _argument(default: Any, check: Callable[..., Any], *bounds: Any) -> Any:
    return field(default=default, metadata={"check": functools.partial(check, *bounds)})


def _flag(strategy: str, argument: str, value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(
            f"bad {argument} for {strategy}: got {value!r}, allowed are True and False. Give the same on "
            "every learner."
        )
    return bool(value)


def _integer(low: int, below: float, strategy: str, argument: str, value: Any) -> int:
    try:
        plain = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        plain = low - 1
    if not low <= plain < below:
        raise ConfigError(
            f"bad {argument} for {strategy}: got {value!r}, allowed is int >= {low}"
            f"{f' and < {below}' if below < math.inf else ''}. Give the same such number on every learner."
        )
    return plain


def _number(
    low: float,
    high: float,
    low_open: bool,
    high_closed: bool,
    strategy: str,
    argument: str,
    value: Any,
) -> float:
    """Return the value as float, so that 1 and 1.0 give the same spec."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    good = is_number and low <= value <= high  # NaN is not
    if not good or (low_open and value == low) or (not high_closed and value == high):
        raise ConfigError(
            f"bad {argument} for {strategy}: got {value!r}, allowed is number "
            f"{'>' if low_open else '>='} {low:g} and {'<=' if high_closed else '<'} {high:g}. Give the same "
            "such number on every learner."
        )
    return float(value)
