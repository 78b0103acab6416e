"""Parses sizes, times and rates with units: 350M, 0.35s, 10Gb/s,50us, 1x10, 0.01/h."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.planner import PATIENT
from hvd_adpsgd_lab.simulation.scenario import Fault

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_RATES = {"Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "MB/s": 1e6, "GB/s": 1e9}


def _number(text: str, units: dict[str, float], what: str, example: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)\s*([A-Za-z/]*)", text.strip())
    try:
        if found is not None and found[2] in units and float(found[1]) >= 0:
            return float(found[1]) * units[found[2]]
    except ValueError:
        pass
    raise ConfigError(
        f"bad {what} {text!r}: allowed is a number with one of {', '.join(filter(None, units))}. "
        f"Pass {example}, for instance."
    )


def model(text: str) -> float:
    """Return the number of parameters that a text like "350M" means."""
    return _number(text, _COUNTS, "--model", "350M")


def seconds(text: str) -> float:
    """Return the number of seconds that a text like "0.35s" means."""
    return _number(text, _TIMES, "time", "0.35s")


def network(text: str) -> tuple[float, float]:
    """Return bytes per second and latency (seconds) of a link, from a text like "10Gb/s,50us"."""
    rate, _, latency = text.partition(",")
    return (
        _number(rate, _RATES, "--network", "10Gb/s,50us"),
        _number(latency or "50us", _TIMES, "--network", "10Gb/s,50us"),
    )


def _times(text: str, option: str, how_many: str, example: str) -> tuple[float, float]:
    """Return how many are how many times slower, by a text like "1x10"."""
    try:
        many, much = map(float, text.split("x"))
    except ValueError:
        raise ConfigError(
            f"bad {option} {text!r}: allowed is {how_many}xHOW_MUCH. Pass {example}, for instance."
        ) from None
    return many, much


def _whole(text: str, option: str, example: str) -> tuple[int, float]:
    many, much = _times(text, option, "HOW_MANY", example)
    if not many.is_integer():
        raise ConfigError(
            f"bad {option} {text!r}: allowed is a whole number before the x. Pass {example}, for instance."
        )
    return int(many), much


def slow(text: str) -> tuple[int, float]:
    """Return how many super learners are how many times slower: 1 and 10.0 for "1x10"."""
    return _whole(text, "--slow", "1x10")


def slow_links(text: str) -> tuple[float, float]:
    """Return which share of the links is how many times slower: 0.25 and 10.0 for "0.25x10"."""
    return _times(text, "--slow-links", "SHARE_OF_PAIRS", "0.25x10")


def racks(text: str) -> tuple[int, float]:
    """Return the number of racks, and how much slower the links between them are: 2 and 10.0 for "2x10"."""
    return _whole(text, "--racks", "2x10")


def failures(text: str) -> float:
    """Return the failures of one super learner per hour, from a text like "0.01/h"."""
    return _number(text, {"/h": 1.0, "/d": 1 / 24}, "--fail", "0.01/h")


def options(texts: Sequence[str], **more: Any) -> Config:
    """Return the options that texts like "wire_dtype=int8" mean, and `more`, in a simulation."""
    given = dict(text.partition("=")[::2] for text in texts)
    return PATIENT.replace(**{**more, **Config.parsed(given)})


def fault(text: str) -> Fault:
    """Return the fault that a text like "crash,3,20s", "slow,0,5s,10" or "sever,1,5s,2s,4" means.

    That is KIND,SUPER LEARNER,TIME[,VALUE[,PEER...]]; the value is a factor for slow, a bandwidth for link, a
    share for share, a time for other kinds.
    """
    kind, *rest = text.split(",")
    try:
        who, at, *values = rest
        value = 0.0
        if values:
            value = _value(kind, values[0])
        return Fault(seconds(at), kind, int(who), tuple(map(int, values[1:])), value)
    except ValueError:
        raise ConfigError(
            f"bad --fault {text!r}: allowed is KIND,SUPER_LEARNER,TIME[,VALUE[,PEER...]]. Pass crash,3,20s, "
            "for instance."
        ) from None


def _value(kind: str, text: str) -> float:
    if kind == "link":
        return _number(text, _RATES, "--fault link", "10Mb/s")
    return float(text) if kind in ("slow", "share", "bits") else seconds(text)
