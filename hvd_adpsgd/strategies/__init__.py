"""Averaging strategies: which super learners average their models, when, with what weight.

`parse` reads the spec strings of the `averaging` knob: a name, or `name:key=value,key=value`.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.plan import Plan, Strategy
from hvd_adpsgd.strategies.random_pairs import RandomPairs
from hvd_adpsgd.strategies.ring import FixedRing, RandomRing
from hvd_adpsgd.strategies.synchronous import Synchronous

__all__ = [
    "STRATEGIES",
    "FixedRing",
    "Plan",
    "RandomPairs",
    "RandomRing",
    "Strategy",
    "Synchronous",
    "parse",
]

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (RandomPairs, FixedRing, RandomRing, Synchronous)
}


def parse(spec: str) -> Strategy:
    """The strategy that a spec string names; the inverse of `Strategy.spec`.

    Args:
        spec: for instance "random_pairs", "random_pairs:seed=3", "fixed_ring", "synchronous".

    Raises:
        ConfigError: for an unknown name or key, or an unreadable or bad value.
    """
    name, _, tail = spec.strip().partition(":")
    kind = STRATEGIES.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown strategy {name!r} in averaging spec {spec!r}: known are "
            f"{', '.join(STRATEGIES)}. Did you mean {near}?"
        )
    return kind(**_arguments(spec, kind, tail))


def _arguments(spec: str, kind: Any, tail: str) -> dict[str, int]:
    """The keyword arguments in the part of a spec behind the colon; all are integers."""
    known = [f.name for f in dataclasses.fields(kind)]
    arguments: dict[str, int] = {}
    for item in filter(None, (piece.strip() for piece in tail.split(","))):
        key, _, text = item.partition("=")
        if key not in known or key in arguments:
            raise _bad_item(spec, item, known)
        try:
            arguments[key] = int(text)
        except ValueError:
            raise _bad_item(spec, item, known) from None
    return arguments


def _bad_item(spec: str, item: str, known: list[str]) -> ConfigError:
    keys = ", ".join(f"{key}=<int>" for key in known) or "nothing after its name"
    return ConfigError(
        f"bad argument {item!r} in averaging spec {spec!r}: the strategy takes {keys}, each once. "
        "Correct or remove it."
    )
