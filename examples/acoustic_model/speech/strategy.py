"""Values of --strategy: the short names in NAMES, and every averaging spec of the library."""

from __future__ import annotations

import importlib

from .problem import Problem

NAMES = ("random-pairs", "fixed-ring", "random-ring", "ssgd", "single")


def check(strategy: str) -> None:
    """Check the value of --strategy before any learner starts.

    Raises:
        Problem: if `strategy` is neither one of NAMES nor a valid averaging spec.
    """
    if strategy in NAMES:
        return
    try:
        importlib.import_module("hvd_adpsgd.strategies").parse(strategy)
    except ImportError as error:
        raise Problem(
            f"--strategy {strategy} needs hvd_adpsgd, which did not import: {error}"
        ) from error
    except ValueError as error:  # the library's ConfigError is one
        raise Problem(f"--strategy: {error} Or take one of {', '.join(NAMES)}.") from error


def waits(strategy: str) -> bool:
    """Return whether learners wait for each other's steps, so that all make equally many."""
    if strategy in NAMES:
        return strategy in ("ssgd", "single")
    chosen = importlib.import_module("hvd_adpsgd.strategies").parse(strategy)
    return chosen.averages == "nothing" or chosen.plan(0, 4).in_step is not None


def folder_name(strategy: str) -> str:
    """Return a strategy's name with `-` for special characters: noloco-period-10 for "noloco:period=10"."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in strategy)
