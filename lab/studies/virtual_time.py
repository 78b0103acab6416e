"""Compares the same small job on real processes and in virtual time: curve of the loss, and speed.

    python -m lab.studies.virtual_time                   4 processes, 3 seeds; a few minutes
    python -m lab.studies.virtual_time --seeds 1 --steps 60
    python -m lab.studies.virtual_time --strategy delay_by_one
    python -m lab.studies.virtual_time --task examples/byte_transformer.py --steps 300 --moments own

Every step computes a gradient and then sleeps until --step is over, so that 4 processes fit on 2 cores. The
job in virtual time has the same task (--task), strategy, batches and steps, and what averaging costs on this
machine (`bench calibrate`). Compared are the loss of the mean model over samples, its evaluation at the end,
and the steps per second.
Written to --out: result.json, and all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples.acoustic_model.speech.problem import Problem, new_parser, run, within

ROOT = Path(__file__).resolve().parents[2]
PARTS = 5  # points of a curve after the first one
NETWORK = "10Gb/s,50us"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--task", default="examples/virtual_time.py", metavar="FILE.py")
    add("--learners", type=int, default=4)
    add("--steps", type=int, default=200, help="of each learner (default: 200)")
    add("--step", type=float, default=0.03, help="seconds of a step (default: 0.03)")
    add("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    add("--strategy", default="random_pairs")
    add("--moments", choices=("shared", "own"), help="the option of this name")
    add("--out", type=Path, default=Path("out/virtual_time"))
    add("--learner", metavar="FILE", help=argparse.SUPPRESS)
    add("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name, low, high in (("learners", 2, 64), ("steps", PARTS, 10**6), ("seeds", 1, 100)):
        within(f"--{name}", getattr(options, name), low, high)
    within("--step", options.step, 1e-3, 10)
    return options


# ---- one real learner ---------------------------------------------------------------------------


def learn(options: argparse.Namespace) -> None:
    """Train as one of the processes; the first one writes the points of the mean model."""
    import torch
    from hvd_adpsgd_lab.learning import Task
    from hvd_adpsgd_lab.learning.task import seed_torch

    import hvd_adpsgd.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    task = Task.from_file(options.task)
    seed_torch(options.seed, 0, 0)  # the start of the job in virtual time
    model = task.new_model()
    optimizer = task.new_optimizer(list(model.parameters()), model)
    schedule = task.new_schedule(optimizer)
    wrapped = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        averaging=None if options.strategy == "synchronous" else options.strategy,
        moments=options.moments,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    stream = task.stream(hvd.rank(), hvd.size(), options.seed)
    probes = [next(task.stream(i, hvd.size(), options.seed)) for i in range(min(8, hvd.size()))]
    points, took, samples = [], 0.0, 0
    for part in range(PARTS):
        began = time.monotonic()
        for _ in range(options.steps * part // PARTS, options.steps * (part + 1) // PARTS):
            ends = time.monotonic() + options.step
            wrapped.zero_grad()
            batch = next(stream)
            task.loss_of(model, batch).backward()
            samples += len(batch[0])
            time.sleep(max(0.0, ends - time.monotonic()))
            wrapped.step()
            if schedule is not None:
                schedule.step()
        took += time.monotonic() - began
        with hvd.averaged(model), torch.no_grad():
            loss = sum(task.loss_of(model, probe).item() for probe in probes) / len(probes)
            evaluation = task.evaluation(model)
        points.append({"samples": samples * hvd.size(), "loss": loss, "evaluation": evaluation})
    rates = hvd.allgather_object(options.steps / took)
    if hvd.rank() == 0:
        found = {"points": points, "steps_per_s": sum(rates)}
        Path(options.learner).write_text(json.dumps(found))
    hvd.shutdown()


# ---- both jobs ----------------------------------------------------------------------------------


def performed(command: list[str], variables: dict[str, str] | None = None) -> None:
    """Run a command.

    Raises:
        Problem: if it fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **(variables or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        told = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise Problem(f"{' '.join(command)} ended with status {done.returncode}:\n{told}")


def real(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train on processes; return the points and the steps per second."""
    file = (options.out / f"real_{seed}.json").resolve()
    command = ["horovodrun", "-np", str(options.learners), sys.executable, "-m", __spec__.name]
    for name in ("task", "steps", "step", "strategy"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--seed", str(seed), "--learner", str(file)]
    command += ["--moments", options.moments] if options.moments else []
    variables = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "OMP_NUM_THREADS": "1"}
    performed(command, {**variables, "HVD_ADPSGD_AVERAGING": options.strategy})
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def simulated(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train in virtual time; return the points and the steps per second."""
    file = (options.out / f"simulated_{seed}.json").resolve()
    command = [sys.executable, "-m", "hvd_adpsgd", "simulate", "--train", options.task]
    command += ["--super-learners", str(options.learners), "--steps", str(options.steps)]
    command += ["--step", f"{options.step}s", "--network", NETWORK, "--points", str(PARTS)]
    command += ["--strategy", options.strategy, "--random-seed", str(seed)]
    command += ["--options", f"moments={options.moments}"] if options.moments else []
    command += ["--calibration", str(options.out / "calibration.json"), "--json", str(file)]
    performed(command)
    (found,) = json.loads(file.read_text())["runs"]
    return {"points": found["points"][1:], "steps_per_s": found["steps_per_s"]}


def compared(real: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses of both by point, and the ratio of their speeds."""
    rows = []
    for i in range(PARTS):
        ours = [one["points"][i]["loss"] for one in simulated]
        theirs = [one["points"][i]["loss"] for one in real]
        spread = max(max(theirs) - min(theirs), max(ours) - min(ours))
        apart = abs(statistics.mean(ours) - statistics.mean(theirs))
        rows.append(
            {
                "samples": real[0]["points"][i]["samples"],
                "real": theirs,
                "simulated": ours,
                "apart": apart,
                "within": len(ours) < 2 or apart <= spread,
            }
        )
    evaluations = {
        name: [
            [one["points"][-1]["evaluation"][name] for one in runs] for runs in (real, simulated)
        ]
        for name in real[0]["points"][-1]["evaluation"]
    }
    speeds = [statistics.mean(one["steps_per_s"] for one in runs) for runs in (real, simulated)]
    return {
        "points": rows,
        "evaluations": evaluations,
        "real_steps_per_s": speeds[0],
        "simulated_steps_per_s": speeds[1],
        "ratio": speeds[1] / speeds[0],
    }


def main(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    options.out.mkdir(parents=True, exist_ok=True)
    calibration = options.out / "calibration.json"
    if not calibration.exists():
        performed(
            [sys.executable, "-m", "hvd_adpsgd", "bench", "calibrate", "--out", str(calibration)]
        )
    ours, theirs = [], []
    for seed in range(options.seeds):
        theirs.append(real(options, seed))
        ours.append(simulated(options, seed))
    result = compared(theirs, ours)
    print("   samples  loss, processes        loss, virtual time")
    for row in result["points"]:
        shown = ["  ".join(f"{loss:.4f}" for loss in row[name]) for name in ("real", "simulated")]
        verdict = "within the spread of seeds" if row["within"] else f"apart by {row['apart']:.4f}"
        print(f"{row['samples']:10}  {shown[0]}    {shown[1]}    {verdict}")
    for name, both in result["evaluations"].items():
        shown = ["  ".join(f"{value:.4f}" for value in its) for its in both]
        print(f"{name} at the end: {shown[0]} on processes, {shown[1]} in virtual time")
    print(
        f"steps per second: {result['real_steps_per_s']:.1f} on processes, "
        f"{result['simulated_steps_per_s']:.1f} in virtual time, ratio {result['ratio']:.3f}"
    )
    (options.out / "result.json").write_text(json.dumps(result, indent=1))


def start(argv: list[str] | None = None) -> None:
    """Run the study, or one of its learners."""
    options = arguments(argv)
    if options.learner:
        learn(options)
    else:
        main(options)


if __name__ == "__main__":
    run(start)
