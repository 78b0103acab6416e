"""The arguments of `simulate`: what is asked for, and the options that belong to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.simulation.bounds import in_bound

__all__ = ["parsed"]

REPLAY = ("seed", "scenario")
RUNS = (*REPLAY, "seeds")
MODES = (*RUNS, "explore", "super_learners")
PLAN_DEFAULTS = {
    "model": "100M",
    "step": "0.35s",
    "network": "10Gb/s,50us",
    "slow": "0x1",
    "fail": "0/h",
    "strategy": "random_pairs",
    "rate": 1.0,
    "share": 1.0,
    "minutes": 10.0,
    "random_seed": 0,
}
DEFAULTS = {**PLAN_DEFAULTS, "chart": False, "no_shrink": False}
OF = {  # the modes that an option belongs to
    "chart": REPLAY,
    "timeline": REPLAY,
    "lines": RUNS,
    "no_shrink": RUNS,
    "keep": ("seeds",),
    "workers": ("seeds",),
    **dict.fromkeys((*PLAN_DEFAULTS, "json", "figure", "calibration"), ("super_learners",)),
}


def parsed(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with defaults.

    Raises:
        ConfigError: if an option does not belong to what is asked for, which would ignore it.
    """
    args = _parser(description).parse_args(arguments)
    mode = next(mode for mode in MODES if getattr(args, mode) is not None)
    for name, modes in OF.items():
        if getattr(args, name) is not None and mode not in modes:
            raise ConfigError(
                f"{_option(name)} does not belong to {_option(mode)}, but to "
                f"{' and '.join(map(_option, modes))}. Leave it out, or ask for one of these."
            )
    if args.lines is not None:
        in_bound("--lines", args.lines, (1, 10**9))
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd simulate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, metavar="N", help="replay the scenario of a seed")
    what.add_argument(
        "--scenario", metavar="JSON", help="replay a scenario that simulate has printed"
    )
    what.add_argument("--seeds", type=int, nargs=2, metavar=("A", "B"), help="run seeds A to B - 1")
    what.add_argument(
        "--explore", nargs="*", metavar="JOB", help="explore every interleaving of small jobs"
    )
    what.add_argument("--super-learners", type=int, metavar="N", help="plan a cluster of so many")
    _add_run_arguments(parser.add_argument_group("a run, or many"))
    _add_plan_arguments(parser.add_argument_group("a cluster"))
    return parser


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chart",
        action="store_true",
        default=None,
        help="of one run: draw the messages as a sequence chart",
    )
    group.add_argument(
        "--timeline", metavar="FILE", help="of one run: write a Chrome trace, as training does"
    )
    group.add_argument(
        "--lines",
        type=int,
        metavar="N",
        help="only the last N lines of a chart (default: all, of a failure 60)",
    )
    group.add_argument(
        "--no-shrink",
        action="store_true",
        default=None,
        help="do not look for the smallest failure",
    )
    group.add_argument(
        "--keep",
        metavar="FILE",
        help="of --seeds: the report so far; the same call again continues it",
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="of --seeds: processes (default: cores)"
    )


def _add_plan_arguments(group: argparse._ArgumentGroup) -> None:
    for name, kind, metavar, meaning in (
        ("model", str, "350M", "float32 parameters"),
        ("step", str, "0.35s", "time of a step"),
        ("network", str, "10Gb/s,50us", "of each host's link"),
        ("slow", str, "1x10", "one is ten times slower"),
        ("fail", str, "0.01/h", "failures of one super learner"),
        ("strategy", str, "SPEC", "as averaging="),
        ("rate", float, "R", "exchanges per step"),
        ("share", float, "S", "of the model that an exchange moves"),
        ("minutes", float, "M", "of training"),
        ("random_seed", int, "N", "of all that is random"),
    ):
        group.add_argument(
            _option(name),
            type=kind,
            metavar=metavar,
            help=f"{meaning} (default {PLAN_DEFAULTS[name]})",
        )
    group.add_argument("--json", metavar="FILE", help="write all numbers")
    group.add_argument(
        "--figure", metavar="FILE", help="draw decay, staleness and steps (needs matplotlib)"
    )
    group.add_argument(
        "--calibration", metavar="FILE", help="costs of averaging on a host, of `bench calibrate`"
    )
