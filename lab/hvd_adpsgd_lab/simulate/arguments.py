"""Parses the arguments of `simulate`, and rejects options that do not belong to the requested mode."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.bounds import in_bound
from hvd_adpsgd_lab.simulation.planner import BOUNDS

REPLAY = ("seed", "scenario")
RUNS = (*REPLAY, "seeds")
MODES = (*RUNS, "explore", "train", "super_learners")
PLANS = ("super_learners", "train")
TRAIN_DEFAULTS = {"points": 50, "threads": 1, "data": "dynamic"}
PLAN_DEFAULTS: dict[str, Any] = {
    "model": "100M",
    "step": "0.35s",
    "network": "10Gb/s,50us",
    "slow": "0x1",
    "slow_links": "0x1",
    "racks": "1x1",
    "fail": "0/h",
    "strategy": "random_pairs",
    "options": (),
    "minutes": 10.0,
    "random_seed": 0,
}
DEFAULTS = {**PLAN_DEFAULTS, **TRAIN_DEFAULTS, "chart": False, "no_shrink": False}
OF = {  # option: the modes that it belongs to
    "chart": REPLAY,
    "timeline": REPLAY,
    "lines": RUNS,
    "no_shrink": RUNS,
    "keep": ("seeds",),
    "workers": ("seeds",),
    **dict.fromkeys((*PLAN_DEFAULTS, "json", "figure", "calibration", "super_learners"), PLANS),
    **dict.fromkeys((*TRAIN_DEFAULTS, "steps", "compare", "fault", "replace_after"), ("train",)),
}


def parsed(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments, with defaults.

    Raises:
        ConfigError: if an option does not belong to the requested mode, which would ignore it.
    """
    parser = _parser(description)
    args = parser.parse_args(arguments)
    mode = next((mode for mode in MODES if getattr(args, mode) is not None), None)
    if mode is None:
        parser.error(f"one of the arguments {' '.join(map(_option, MODES))} is required. Add one.")
    for name, modes in OF.items():
        if getattr(args, name) is not None and mode not in modes:
            raise ConfigError(
                f"{_option(name)} does not belong to {_option(mode)}, but to "
                f"{' and '.join(map(_option, modes))}. Leave it out, or ask for one of these."
            )
    if args.lines is not None:
        in_bound("--lines", args.lines, (1, 10**9))
    if mode == "train":
        _check_training(args)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None and (name, mode) != ("model", "train"):
            setattr(args, name, value)
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


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    _add_run_arguments(parser.add_argument_group("with --seed, --scenario or --seeds"))
    _add_plan_arguments(parser.add_argument_group("with --super-learners, or --train"))
    _add_train_arguments(parser.add_argument_group("with --train"))
    return parser


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chart",
        action="store_true",
        default=None,
        help="with --seed or --scenario: draw the messages as a sequence chart",
    )
    group.add_argument(
        "--timeline",
        metavar="FILE",
        help="with --seed or --scenario: write a Chrome trace, as training does",
    )
    group.add_argument(
        "--lines",
        type=int,
        metavar="N",
        help="draw only the last N lines of a chart (default: all; 60 for a broken promise)",
    )
    group.add_argument(
        "--no-shrink",
        action="store_true",
        default=None,
        help="do not search for the smallest scenario that breaks a promise",
    )
    group.add_argument(
        "--keep",
        metavar="FILE",
        help="with --seeds: file of the report so far, which a repeated call continues",
    )
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="with --seeds: number of processes (default: cores)",
    )


def _add_plan_arguments(group: argparse._ArgumentGroup) -> None:
    for name, kind, metavar, meaning in (
        ("model", str, "350M", "number of float32 parameters; with --train that of the model"),
        ("step", str, "0.35s", "time of a training step"),
        ("network", str, "10Gb/s,50us", "bandwidth and latency of each host's link"),
        ("slow", str, "1x10", "1 super learner is 10 times slower"),
        (
            "slow_links",
            str,
            "0.25x10",
            "a quarter of the pairs of super learners has a 10 times slower link",
        ),
        ("racks", str, "2x10", "2 racks, with 10 times slower links between them"),
        ("fail", str, "0.01/h", "failures of one super learner per hour"),
        ("strategy", str, "SPEC", "averaging strategy, as averaging="),
        ("minutes", float, "M", "minutes of training"),
        ("random_seed", int, "N", "seed of all random numbers"),
    ):
        group.add_argument(
            _option(name),
            type=kind,
            metavar=metavar,
            help=f"{meaning} (default {PLAN_DEFAULTS[name]})",
        )
    group.add_argument(
        "--options",
        nargs="+",
        metavar="NAME=VALUE",
        help="options of training, as in docs/options.md: exchange_share=auto wire_dtype=int8",
    )
    group.add_argument("--json", metavar="FILE", help="write all results as JSON")
    group.add_argument(
        "--figure", metavar="FILE", help="draw decay, staleness and steps (needs matplotlib)"
    )
    group.add_argument(
        "--calibration",
        metavar="FILE",
        help="costs of averaging on a host, as `bench calibrate` writes them",
    )


def _add_train_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help="end after K steps per super learner on average, in place of --minutes",
    )
    group.add_argument(
        "--compare",
        nargs="+",
        metavar="SPEC",
        help="then train with these strategies, too; besides those of averaging= there are the baselines "
        "synchronous and diloco:period=50,rate=0.7,momentum=0.9",
    )
    group.add_argument(
        "--fault",
        nargs="+",
        metavar="FAULT",
        help="faults KIND,SUPER_LEARNER,TIME[,VALUE[,PEER...]], for instance crash,3,20s join,8,30s "
        "stop,1,10s,5s slow,0,5s,10",
    )
    group.add_argument(
        "--replace-after",
        metavar="TIME",
        help="time from the failure of a super learner until a replacement asks to join, for instance 60s "
        "(default: no replacements)",
    )
    group.add_argument(
        "--points",
        type=int,
        metavar="P",
        help=f"points of the curves (default {TRAIN_DEFAULTS['points']})",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help=f"threads of torch; another number may round otherwise (default {TRAIN_DEFAULTS['threads']})",
    )
    group.add_argument(
        "--data",
        choices=("dynamic", "equal"),
        help="dynamic: faster super learners make more steps; equal: all make --steps, and wait",
    )
