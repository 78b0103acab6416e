"""Parses the arguments of `simulate`, and rejects options that do not belong to the requested mode."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.bounds import in_bound
from hvd_adpsgd_lab.simulation.planner import BOUNDS

REPLAY = ("seed", "scenario")
RUNS = (*REPLAY, "seeds")
PLANS = ("super-learners", "train")
TRAIN, SEEDS = ("train",), ("seeds",)
MODES = (*RUNS, "explore", "train", "super-learners")
GROUPS = {
    "with --seed, --scenario or --seeds": RUNS,
    "with --super-learners, or --train": PLANS,
    "with --train": TRAIN,
}


class Option(NamedTuple):
    """An option: the modes that it belongs to, its default and help, and what argparse is told of it."""

    modes: tuple[str, ...]
    default: Any
    meaning: str
    how: dict[str, Any]


def _option(
    modes: tuple[str, ...], metavar: str | None, default: Any, meaning: str, **how: Any
) -> Option:
    shown = f" (default {default})" if default and not how.get("choices") else ""
    return Option(modes, default, meaning + shown, {"metavar": metavar, **how} if metavar else how)


OPTIONS = {
    "chart": _option(
        REPLAY, None, False, "draw the messages as a sequence chart", action="store_true"
    ),
    "timeline": _option(REPLAY, "FILE", None, "write a Chrome trace, as training does"),
    "lines": _option(
        RUNS, "N", None, "draw only the last N lines of a chart (default: all; 60 for a broken promise)",
        type=int,
    ),
    "no-shrink": _option(
        RUNS, None, False, "do not search for the smallest scenario that breaks a promise",
        action="store_true",
    ),
    "keep": _option(
        SEEDS, "FILE", None, "file of the report so far, which a repeated call continues"
    ),
    "workers": _option(SEEDS, "N", None, "number of processes (default: cores)", type=int),
    "model": _option(
        PLANS, "350M", "100M", "number of float32 parameters; with --train that of the model"
    ),
    "step": _option(PLANS, "0.35s", "0.35s", "time of a training step"),
    "network": _option(
        PLANS, "10Gb/s,50us", "10Gb/s,50us", "bandwidth and latency of each host's link"
    ),
    "slow": _option(PLANS, "1x10", "0x1", "1 super learner is 10 times slower"),
    "slow-links": _option(
        PLANS, "0.25x10", "0x1", "a quarter of the pairs of super learners has a 10 times slower link"
    ),
    "racks": _option(PLANS, "2x10", "1x1", "2 racks, with 10 times slower links between them"),
    "fail": _option(PLANS, "0.01/h", "0/h", "failures of one super learner per hour"),
    "strategy": _option(PLANS, "SPEC", "random_pairs", "averaging strategy, as averaging="),
    "minutes": _option(PLANS, "M", 10.0, "minutes of training", type=float),
    "random-seed": _option(PLANS, "N", 0, "seed of all random numbers (default 0)", type=int),
    "options": _option(
        PLANS, "NAME=VALUE", (),
        "options of training, as in docs/options.md: exchange_share=auto wire_dtype=int8", nargs="+",
    ),
    "json": _option(PLANS, "FILE", None, "write all results as JSON"),
    "figure": _option(PLANS, "FILE", None, "draw decay, staleness and steps (needs matplotlib)"),
    "calibration": _option(
        PLANS, "FILE", None, "costs of averaging on a host, as `bench calibrate` writes them"
    ),
    "steps": _option(
        TRAIN, "K", None, "end after K steps per super learner on average, in place of --minutes",
        type=int,
    ),
    "compare": _option(
        TRAIN, "SPEC", None,
        "then train with these strategies, too; besides those of averaging= there are the baselines "
        "synchronous and diloco:period=50,rate=0.7,momentum=0.9", nargs="+",
    ),
    "fault": _option(
        TRAIN, "FAULT", None,
        "faults KIND,SUPER_LEARNER,TIME[,VALUE[,PEER...]], for instance crash,3,20s join,8,30s "
        "stop,1,10s,5s slow,0,5s,10", nargs="+",
    ),
    "replace-after": _option(
        TRAIN, "TIME", None,
        "time from the failure of a super learner until a replacement asks to join, for instance 60s "
        "(default: no replacements)",
    ),
    "points": _option(TRAIN, "P", 50, "points of the curves", type=int),
    "threads": _option(
        TRAIN, "T", 1, "threads of torch; another number may round otherwise", type=int
    ),
    "data": _option(
        TRAIN, None, "dynamic",
        "dynamic: faster super learners make more steps; equal: all make --steps, and wait",
        choices=("dynamic", "equal"),
    ),
}  # fmt: skip


def parsed(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments, with defaults.

    Raises:
        ConfigError: if an option does not belong to the requested mode, which would ignore it.
    """
    parser = _parser(description)
    args = parser.parse_args(arguments)
    given = {name.replace("_", "-") for name, value in vars(args).items() if value is not None}
    mode = next((mode for mode in MODES if mode in given), None)
    if mode is None:
        parser.error(f"one of the arguments {_listed(MODES, ' ')} is required. Add one.")
    modes_of = {"super-learners": PLANS, **{name: one.modes for name, one in OPTIONS.items()}}
    for name, modes in modes_of.items():
        if name in given and mode not in modes:
            raise ConfigError(
                f"--{name} does not belong to --{mode}, but to {_listed(modes, ' and ')}. Leave it out, or "
                "ask for one of these."
            )
    if args.lines is not None:
        in_bound("--lines", args.lines, (1, 10**9))
    if mode == "train":
        _check_training(args)
    for name, option in OPTIONS.items():
        if name not in given and (name, mode) != ("model", "train"):
            setattr(args, name.replace("-", "_"), option.default)
    return args


def _check_training(args: argparse.Namespace) -> None:
    if args.super_learners is None:
        raise ConfigError(
            "--train: the number of super learners is missing. Add --super-learners N, for instance 8."
        )
    if args.steps is not None and args.minutes is not None:
        raise ConfigError(
            f"--train: both --steps {args.steps} and --minutes {args.minutes:g} are given, allowed is one of "
            "them. Leave one out."
        )
    if args.steps is not None:
        args.minutes = BOUNDS["minutes"][1]


def _listed(names: Sequence[str], between: str) -> str:
    return between.join(f"--{name}" for name in names)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd simulate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, metavar="N", help="replay the scenario of a seed")
    what.add_argument(
        "--scenario", metavar="JSON", help="replay a scenario that simulate has printed"
    )
    what.add_argument("--seeds", type=int, nargs=2, metavar=("A", "B"), help="run seeds A to B - 1")
    what.add_argument(
        "--explore", nargs="*", metavar="JOB", help="explore every interleaving of small jobs"
    )
    what.add_argument(
        "--train",
        metavar="FILE.py",
        help="train the model of a file on a cluster of --super-learners N, with torch",
    )
    parser.add_argument(
        "--super-learners", type=int, metavar="N", help="plan a cluster of N super learners"
    )
    for title, all_modes in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, option in OPTIONS.items():
            if _group_of(option) == title:
                some = (
                    "" if option.modes == all_modes else f"with {_listed(option.modes, ' or ')}: "
                )
                group.add_argument(
                    f"--{name}", default=None, help=some + option.meaning, **option.how
                )
    return parser


def _group_of(option: Option) -> str:
    """Return the title of the group with the fewest modes that has all modes of an option."""
    return min(
        (title for title, modes in GROUPS.items() if set(option.modes) <= set(modes)),
        key=lambda title: len(GROUPS[title]),
    )
