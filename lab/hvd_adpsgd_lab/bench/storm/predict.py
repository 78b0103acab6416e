"""Plays a schedule in virtual time: the same model, engines and faults, with simulated time and network.

Super learners of a simulation have processes with numbers of their own, and a fault names one of the first n.
A fault of a slot whose first learner is dead therefore strikes another one of the first n that trains: with
random pairs all are alike. When none of them is left, the fault is left out, and counted.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_adpsgd_lab.bench.storm import model as work
from hvd_adpsgd_lab.bench.storm.schedule import Fault
from hvd_adpsgd_lab.learning import Outcome, Task, train
from hvd_adpsgd_lab.simulation import scenario
from hvd_adpsgd_lab.simulation.planner import Cluster

_BYTES_PER_S, _LATENCY_S = 1e9, 1e-4  # of loopback on a busy host; models are small
_REPLACE_S = 10.0  # from a kill to the replacement's request, if none was measured


def predicted(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    faults: Sequence[Fault],
    measured: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return steps and participation of a simulated job, and their differences from the measurement.

    Args:
        args: options of `bench storm`.
        settings: of a learner, see driver.perform.
        faults: what was played.
        measured: the report of hadpsgd; None: there is none. Its step without faults, and the time that a
            replacement needs to start, are those of the simulation.
    """
    measured = measured or {}
    speed = measured.get("calm_steps_per_living_s")
    step_s = 1 / speed if speed else args.step
    asks_s = _asks_s(measured)
    struck, left_out = simulated(faults, args.slots)
    task = task_of(settings)
    storm = _train(args, task, step_s, struck, asks_s)
    calm = _train(args, task, step_s, [], None)
    found = _numbers(storm, calm, _living_s(storm) - _lost_s(struck, 60 * args.minutes))
    found |= {"left_out": left_out, "step_s": step_s, "kill_to_request_s": asks_s}
    for name in ("steps_kept", "participation"):
        if measured.get(name):
            found[f"{name}_off"] = found[name] / measured[name] - 1
    return found


def _asks_s(measured: Mapping[str, Any]) -> float:
    """Return the seconds from a kill until a new process, with all imports, asks to join."""
    back_s, without_s = (measured.get(f"kill_to_step{what}_s") for what in ("", "_without_imports"))
    return _REPLACE_S if back_s is None or without_s is None else back_s - without_s


def simulated(faults: Sequence[Fault], slots: int) -> tuple[list[scenario.Fault], int]:
    """Return the faults for the simulation, and how many were left out."""
    living, found, left_out = list(range(slots)), [], 0
    for fault in faults:
        if fault.kind == "cut":
            left_out += 1  # as on one host
        elif not living or (fault.kind == "kill" and len(living) == 1):
            left_out += 1
        else:
            who = fault.slot if fault.slot in living else living[fault.slot % len(living)]
            found += list(_struck(replace(fault, slot=who)))
            if fault.kind == "kill":
                living.remove(who)
    return found, left_out


def _struck(fault: Fault) -> Iterator[scenario.Fault]:
    if fault.kind == "kill":
        yield scenario.Fault(fault.at_s, "crash", fault.slot)
    elif fault.kind == "stop":
        yield scenario.Fault(fault.at_s, "stop", fault.slot, value=fault.duration_s)
    else:
        yield scenario.Fault(fault.at_s, "slow", fault.slot, value=fault.factor)
        yield scenario.Fault(fault.at_s + fault.duration_s, "slow", fault.slot, value=1.0)


def task_of(settings: Mapping[str, Any]) -> Task:
    """Return the work of a learner, by its settings, as a task in virtual time."""
    text = work.Text(settings["length"])

    def batches(super_learner: int, n: int, seed: int) -> Iterator[work.Batch]:
        chance = torch.Generator().manual_seed(1_000_003 * seed + super_learner)
        return (text.batch(settings["batch"], chance) for _ in itertools.count())

    return Task(
        model=lambda: work.GPT(settings["width"], settings["layers"], settings["length"]),
        loss=lambda model, batch: work.loss_of(model, batch),
        batches=batches,
        optimizer=lambda parameters: work.adamw(list(parameters), settings["rate"]),
        evaluate=lambda model: work.loss_of(model, text.held_out()).item(),
        name="bench storm",
    )


def _train(
    args: argparse.Namespace, task: Task, step_s: float, faults: Sequence[scenario.Fault],
    replace_s: float | None,
) -> Outcome:  # fmt: skip
    cluster = Cluster(
        super_learners=args.slots,
        parameters=float(task.parameters()),
        step_s=step_s,
        bytes_per_s=_BYTES_PER_S,
        latency_s=_LATENCY_S,
        minutes=args.minutes,
        seed=args.seed,
    )
    points = max(1, int(60 * args.minutes / args.every))
    return train(task, cluster, faults=faults, points=points, replace_s=replace_s)


def _living_s(outcome: Outcome) -> float:
    """Return the seconds of all super learners together in which they trained, by the points."""
    pairs = itertools.pairwise(outcome.points)
    return sum((a.training + b.training) / 2 * (b.time_s - a.time_s) for a, b in pairs)


def _lost_s(struck: Sequence[scenario.Fault], seconds: float) -> float:
    """Return the seconds in which super learners were stopped, or slow, as far as their steps were longer."""
    lost_s, slow = 0.0, {}
    for fault in sorted(struck, key=lambda fault: fault.at_s):
        if fault.kind == "stop":
            lost_s += min(fault.value, seconds - fault.at_s)
        elif fault.kind == "slow" and fault.value > 1:
            slow[fault.who] = fault
        elif fault.kind == "slow" and fault.who in slow:
            since = slow.pop(fault.who)
            lost_s += (min(fault.at_s, seconds) - since.at_s) * (1 - 1 / since.value)
    return lost_s


def _numbers(storm: Outcome, calm: Outcome, living_s: float) -> dict[str, Any]:
    seconds = calm.points[-1].time_s
    slots = calm.points[-1].training
    steps, calm_steps = sum(storm.steps), sum(calm.steps)
    made = storm.exchanges_per_step * steps / living_s
    return {
        "steps_kept": steps / living_s / (calm_steps / (slots * seconds)),
        "participation": made / (calm.exchanges_per_step * calm_steps / (slots * seconds)),
        "loss": _evaluation(storm),
        "calm_loss": _evaluation(calm),
        "jump": max(0.0, *_rises(storm)),
        "failed": storm.failed,
        "joined": storm.joined,
    }


def _evaluation(outcome: Outcome) -> float:
    return next(iter(outcome.points[-1].evaluation.values()))


def _rises(outcome: Outcome) -> list[float]:
    losses = [next(iter(point.evaluation.values())) for point in outcome.points]
    return [b - a for a, b in itertools.pairwise(losses)] or [0.0]
