"""Schedules of faults: a text format, the public schedule, and schedules drawn from a seed.

A line is a fault, `SECONDS KIND SLOT [DURATION [FACTOR]]`; what follows a # is a comment:

    42.5 kill 21            the process of slot 21 is killed, and a new one takes its place
    34.8 stop 7 20.1        it is stopped (SIGSTOP), and continued 20.1 s later
    60 slow 3 30 4          for 30 s its steps take 4 times as long
    319.3 cut 3 22.5        its link is cut for 22.5 s: needs hosts, is left out
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from hvd_adpsgd.errors import ConfigError

KINDS = ("kill", "stop", "slow", "cut")
PUBLIC = "public_32"
LONGEST_S, LARGEST_FACTOR, LARGEST_SLOT = 1e6, 1e3, 4095
_VALUES = {"kill": 0, "stop": 1, "cut": 1, "slow": 2}  # numbers that follow the slot
_DURATION_S = (10.0, 40.0)  # of drawn faults, that of the public schedule
_FACTOR = 4.0


@dataclass(frozen=True)
class Fault:
    """A fault that strikes one slot.

    Attributes:
        at_s: seconds after the start of the run.
        kind: one of KINDS.
        slot: number of the slot, from 0.
        duration_s: seconds until it is over; 0 for kill.
        factor: how many times as long a step takes, for slow; else 1.
    """

    at_s: float
    kind: str
    slot: int
    duration_s: float = 0.0
    factor: float = 1.0


def parse(text: str, source: str) -> list[Fault]:
    """Return the faults of a schedule, by time.

    Args:
        text: the schedule.
        source: its name, for messages.

    Raises:
        ConfigError: for a line that is no fault, or a number out of its bound.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            faults.append(_fault(words, f"{source}, line {number}"))
    return sorted(faults, key=lambda fault: fault.at_s)


def _fault(words: list[str], where: str) -> Fault:
    kind = words[1] if len(words) > 1 else ""
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: the kind of a fault is {kind!r}, allowed are {', '.join(KINDS)}. "
            "Write SECONDS KIND SLOT [DURATION [FACTOR]]."
        )
    needs = 3 + _VALUES[kind]
    if len(words) != needs:
        raise ConfigError(
            f"{where}: {kind} has {len(words)} words, needed are {needs}. "
            "Write SECONDS KIND SLOT, for stop and cut also DURATION, for slow DURATION FACTOR."
        )
    slot = _number(words[2], 0, LARGEST_SLOT, f"{where}: the slot")
    if slot != int(slot):
        raise ConfigError(
            f"{where}: the slot is {words[2]}, allowed are whole numbers. Correct it."
        )
    values = [
        _number(word, least, most, f"{where}: the {name}")
        for word, (name, least, most) in zip(
            words[3:], [("duration", 0, LONGEST_S), ("factor", 1, LARGEST_FACTOR)], strict=False
        )
    ]
    return Fault(_number(words[0], 0, LONGEST_S, f"{where}: the time"), kind, int(slot), *values)


def _number(word: str, least: float, most: float, what: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ConfigError(f"{what} is {word!r}, which is no number. Correct it.") from None
    if not least <= value <= most:
        raise ConfigError(f"{what} is {word}, allowed is {least:g} to {most:g}. Correct it.")
    return value


def written(faults: Sequence[Fault]) -> str:
    """Return faults as text that `parse` reads."""
    return "".join(f"{' '.join(_words(fault))}\n" for fault in faults)


def _words(fault: Fault) -> list[str]:
    values = [fault.duration_s, fault.factor][: _VALUES[fault.kind]]
    return [f"{fault.at_s!r}", fault.kind, str(fault.slot), *(f"{value!r}" for value in values)]


def drawn(seed: int, slots: int, seconds: float, per_hour: Mapping[str, float]) -> list[Fault]:
    """Return faults of a Poisson process for each kind, by time; the same ones for the same arguments.

    Args:
        seed: of the random numbers. A kind's faults depend on the seed and on its own rate alone.
        slots: number of slots, n >= 1, one of which each fault strikes.
        seconds: length of the run.
        per_hour: faults of the whole job per hour, by kind; a kind that is left out has none.
    """
    faults: list[Fault] = []
    for kind, rate in per_hour.items():
        faults += _of_kind(random.Random(f"{seed} {kind}"), kind, slots, seconds, rate / 3600)
    return sorted(faults, key=lambda fault: fault.at_s)


def _of_kind(
    chance: random.Random, kind: str, slots: int, seconds: float, per_s: float
) -> Iterator[Fault]:
    at_s = chance.expovariate(per_s) if per_s > 0 else math.inf
    while at_s < seconds:
        duration_s = 0.0 if kind == "kill" else round(chance.uniform(*_DURATION_S), 1)
        factor = _FACTOR if kind == "slow" else 1.0
        yield Fault(round(at_s, 1), kind, chance.randrange(slots), duration_s, factor)
        at_s += chance.expovariate(per_s)


def named(name: str) -> list[Fault]:
    """Return the faults of a schedule: PUBLIC, "none", or those of a file.

    Raises:
        ConfigError: if there is no such file, or it is no schedule.
    """
    if name == "none":
        return []
    if name == PUBLIC:
        text = (resources.files(__package__) / f"{PUBLIC}.txt").read_text()
        return parse(text, PUBLIC)
    try:
        return parse(Path(name).read_text(), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--schedule {name}: the file cannot be read ({error}). "
            f"Pass {PUBLIC}, drawn, none or the name of a schedule's file."
        ) from None


def played(faults: Sequence[Fault], slots: int, seconds: float) -> list[Fault]:
    """Return the faults of the first `seconds`, each at its slot modulo `slots`."""
    return [replace(f, slot=f.slot % slots) for f in faults if f.at_s < seconds]


def counted(faults: Sequence[Fault]) -> dict[str, int]:
    """Return the number of faults by kind, without kinds that have none."""
    counts = Counter(fault.kind for fault in faults)
    return {kind: counts[kind] for kind in KINDS if counts[kind]}
