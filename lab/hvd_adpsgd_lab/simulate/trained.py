"""`simulate --train`: trains a file's model in virtual time, and prints what came of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from hvd_adpsgd.errors import ConfigError, MissingRequirementError
from hvd_adpsgd_lab.simulate import progress, units
from hvd_adpsgd_lab.simulation.planner import Cluster, fields_of

try:
    from hvd_adpsgd_lab.learning import Outcome, Task, train
    from hvd_adpsgd_lab.learning.figure import draw
    from hvd_adpsgd_lab.learning.train import prepared
except ImportError as error:
    if error.name != "torch":
        raise
    raise MissingRequirementError(
        "--train: torch is not installed, which trains the model. Run pip install torch."
    ) from error


def main(args: argparse.Namespace, cluster: Cluster) -> int:
    """Train with --strategy and then with each of --compare; print, write and draw the outcomes.

    Args:
        args: the parsed arguments.
        cluster: the cluster that they describe; its strategy and parameters are replaced.
    """
    task = Task.from_file(args.train)
    specs = [args.strategy, *(args.compare or ())]
    parameters = units.model(args.model) if args.model else float(task.parameters())
    faults = [units.fault(text) for text in args.fault or ()]
    cluster = dataclasses.replace(cluster, parameters=parameters)
    for spec in specs:  # before the first run, which may take minutes
        prepared(cluster, spec, faults)
    replace_s = None if args.replace_after is None else units.seconds(args.replace_after)
    outcomes = []
    for spec in specs:
        outcome = train(
            task,
            cluster,
            strategy=spec,
            steps=args.steps,
            faults=faults,
            points=args.points,
            threads=args.threads,
            replace_s=replace_s,
            data=args.data,
            progress=progress.of_training(spec),
        )
        print(described(outcome), flush=True)
        outcomes.append(outcome)
        if args.json:  # after each run: a later one may fail
            _write("--json", args.json, as_json(args, cluster, outcomes))
    if args.figure:
        draw(outcomes, args.figure)
    return 0


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: the file cannot be written ({error.strerror}). Free some space, or name "
            "another file."
        ) from error


def as_json(args: argparse.Namespace, cluster: Cluster, outcomes: list[Outcome]) -> str:
    """Return the runs as a JSON object, the same text for the same arguments."""
    fields = fields_of(cluster)
    if args.steps is not None:
        fields["minutes"] = None
    runs = [outcome.to_dict() for outcome in outcomes]
    told = {"task": args.train, "steps": args.steps, "data": args.data, "faults": args.fault or []}
    if args.replace_after is not None:
        told["replace_after"] = args.replace_after
    return json.dumps({**told, "cluster": fields, "runs": runs}, indent=1)


def described(o: Outcome) -> str:
    """Return the lines that `simulate` prints of a run."""
    last = o.points[-1]
    numbers = "".join(f", {name} {value:.4g}" for name, value in last.evaluation.items())
    steps = f"{sum(o.steps)} in {last.time_s:.6g} s, {o.steps_per_s:.4g} per second"
    rows = [
        ("steps", f"{steps}, {min(o.steps)} to {max(o.steps)} by super learner"),
        ("mean model", f"loss {last.loss:.4f}{numbers}, after {last.samples} samples"),
        ("distance", f"{last.distance:.4g} of the models from their mean"),
        ("exchanges per step", f"{o.exchanges_per_step:.2f} of a super learner, asked and served"),
        ("staleness", f"{o.staleness_mean:.1f} steps, 99 % within {o.staleness_99}"),
        ("sent", f"{o.sent_bytes / 1e6:.4g} MB per super learner"),
        ("failed, joined", f"{o.failed}, {o.joined}; {last.training} train at the end"),
        ("ended by", o.ended),
        ("digest", o.digest[:16]),
    ]
    lines = "\n".join(f"{name:>20}  {value}" for name, value in rows)
    return f"{o.strategy}\n{lines}"
