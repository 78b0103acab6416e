"""Averaging strategies: which super learners average their models, when, with what weight.

`parse` reads the spec strings of the `averaging` option: a name, or `name:key=value,key=value`. A
strategy on top of another is joined to it by "+": `gossip_pga:period=50+random_pairs`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any, cast

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.a2cid2 import A2CiD2
from hvd_adpsgd.strategies.delay_by_one import DelayByOne
from hvd_adpsgd.strategies.delayed_gradients import DelayedGradients
from hvd_adpsgd.strategies.gasloc import GASLoC
from hvd_adpsgd.strategies.gossip_pga import GossipPGA
from hvd_adpsgd.strategies.noloco import NoLoCo
from hvd_adpsgd.strategies.periodic_averaging import PeriodicAveraging
from hvd_adpsgd.strategies.plan import Plan, Rounds, Strategy
from hvd_adpsgd.strategies.random_pairs import RandomPairs
from hvd_adpsgd.strategies.ring import FixedRing, RandomRing
from hvd_adpsgd.strategies.synchronous import Synchronous
from hvd_adpsgd.strategies.synchronous_gossip import SynchronousGossip

__all__ = [
    "STRATEGIES", "A2CiD2", "DelayByOne", "DelayedGradients", "FixedRing", "GASLoC", "GossipPGA", "NoLoCo",
    "PeriodicAveraging", "Plan", "RandomPairs", "RandomRing", "Rounds", "Strategy", "Synchronous",
    "SynchronousGossip", "parse", "same",
]  # fmt: skip

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (
        RandomPairs,
        FixedRing,
        RandomRing,
        DelayByOne,
        DelayedGradients,
        PeriodicAveraging,
        GossipPGA,
        SynchronousGossip,
        A2CiD2,
        GASLoC,
        NoLoCo,
        Synchronous,
    )
}
_KINDS: dict[Any, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: _flag(text),
}
_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@functools.lru_cache(maxsize=64)
def parse(spec: str) -> Strategy:
    """Return the strategy that a spec string describes; the inverse of `Strategy.spec`. Results are cached.

    Args:
        spec: for instance "random_pairs", "random_pairs:seed=3", "synchronous",
            "periodic_averaging:period=20,block_momentum=0.75", "synchronous_gossip:order=atc+fixed_ring".

    Raises:
        ConfigError: for an unknown strategy name or key, or an unreadable or bad value.
    """
    *upper, lowest = spec.split("+")
    strategy = _one(spec, lowest)
    for piece in reversed(upper):
        strategy = _one(spec, piece, strategy)
    return strategy


def same(one: str, other: str) -> bool:
    """Whether two spec strings describe equal strategies; a key that a spec omits has its default value.

    A spec that cannot be parsed equals only the identical string.
    """
    try:
        return parse(one) == parse(other)
    except ConfigError:
        return one == other


def _one(spec: str, piece: str, base: Strategy | None = None) -> Strategy:
    """Parse one part of a spec, such as "gossip_pga:period=50"; return its strategy, on top of `base`."""
    name, _, tail = piece.strip().partition(":")
    kind: Any = STRATEGIES.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown strategy {name!r} in averaging spec {spec!r}: known are "
            f"{', '.join(STRATEGIES)}. Did you mean {near}?"
        )
    arguments = _arguments(spec, kind, tail)
    if base is None:
        return cast(Strategy, kind(**arguments))
    if "base" not in (f.name for f in dataclasses.fields(kind)):
        raise ConfigError(
            f"{name} in averaging spec {spec!r} is not on top of another strategy. Put it last, or "
            "leave the other out."
        )
    return cast(Strategy, kind(base=base, **arguments))


def _arguments(spec: str, kind: Any, tail: str) -> dict[str, Any]:
    """Parse the part of a spec after the colon into keyword arguments of the strategy class `kind`."""
    known = {f.name: f.type for f in dataclasses.fields(kind) if f.name != "base"}
    arguments: dict[str, Any] = {}
    for item in filter(None, (piece.strip() for piece in tail.split(","))):
        key, _, text = item.partition("=")
        if key not in known or key in arguments:
            raise _bad_item(spec, item, known)
        try:
            arguments[key] = _KINDS[known[key]](text)
        except ValueError:
            raise _bad_item(spec, item, known) from None
    return arguments


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


def _bad_item(spec: str, item: str, known: dict[str, Any]) -> ConfigError:
    keys = ", ".join(f"{key}=<{kind}>" for key, kind in known.items())
    takes = f"{keys}, each once" if keys else "no arguments"
    return ConfigError(
        f"bad argument {item!r} in averaging spec {spec!r}: the strategy takes {takes}. Correct or remove it."
    )
