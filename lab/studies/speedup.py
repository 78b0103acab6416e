"""Models the speed-up of N learners that average every K minibatches, from two measured times.

    python -m lab.studies.speedup                measure and draw; takes minutes on an idle machine
    python -m lab.studies.speedup --preset dnn   with a small net
    python -m lab.studies.speedup --recall       draw the measured times again

    S(N) = N K t / (K t + t_allreduce(N)),   t_allreduce(N) = a + b log2 N

t is the time of a minibatch (forward, backward, update) of a DNN of the speech example, on one core.
t_allreduce(N) is the time of an all-reduce of N such models, by MPI and by the library over sockets (`bench
operations`), measured for 2, 4 and 8 learners on this machine; a >= 0 and b >= 0 are fitted by least squares.
The curves are extrapolated to 32 learners; the measured 2 to 8 learners share the cores of one machine.

Also drawn are the two speed-ups that Su and Chen report (arXiv:1507.01239), and the all-reduce time that
they imply: N / S - 1 = t_allreduce(N) / (K t).
Written to --out: result.json, table.md, speedup.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.acoustic_model.speech import model as models
from examples.acoustic_model.speech.problem import Problem, new_parser, run, within

PAPER = {16: 9.3, 32: 17.0}  # number of learners: speed-up over one learner
PERIODS = (1, 10, 20, 100)
MOST = 32
WAYS = ("mpi", "sockets")
OUTPUTS = 256  # number of outputs, for a preset that takes it from the data


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; raise Problem if one is out of range."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--preset", choices=("dnn", "dnn-paper"), default="dnn-paper")
    add("--batch", type=int, default=256, help="frames per minibatch (default: 256)")
    add("--learners", type=int, default=8, help="largest number of learners started (default: 8)")
    add("--rounds", type=int, default=5)
    add("--recall", action="store_true", help="measure nothing, draw the results in --out")
    add("--out", type=Path, default=Path("out/speedup"))
    options = parser.parse_args(argv)
    for name, low, high in (("batch", 1, 2**20), ("learners", 2, 64), ("rounds", 1, 1000)):
        within(f"--{name}", getattr(options, name), low, high)
    return options


def minibatch_s(shape: models.Shape, batch: int, rounds: int) -> tuple[float, int]:
    """Return the median seconds of a minibatch on one core, and the number of parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = models.make(shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    frames = torch.randn(batch, 1 + 2 * shape.context, shape.inputs)
    labels = torch.randint(shape.outputs, (batch,))
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(frames).flatten(0, 1), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), sum(p.numel() for p in net.parameters())


def allreduce_s(parameters: int, learners: int, rounds: int) -> dict[str, dict[int, float]]:
    """Measure an all-reduce; return its seconds, by way of summing and number of learners.

    Raises:
        Problem: if the benchmark fails.
    """
    command = [sys.executable, "-m", "hvd_adpsgd", "bench", "operations", "--json"]
    command += [f"--learners={learners}", f"--mib={parameters / 2**18}", f"--rounds={rounds}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise Problem(f"{' '.join(command[1:])} ended with status {done.returncode}")
    found = json.loads(done.stdout)
    sizes = [int(name[2:]) for name in found if name.startswith("n ")]
    large = {n: found[f"n {n}"]["allreduce_large"] for n in sizes}
    return {way: {n: large[n][f"{way}_ms"] / 1e3 for n in sizes} for way in WAYS}


def fitted(seconds: dict[int, float]) -> tuple[float, float]:
    """Return a and b of t(n) = a + b log2 n, fitted by least squares, both >= 0."""
    stages = [math.log2(n) for n in seconds]
    if len(seconds) == 1:
        return 0.0, next(iter(seconds.values())) / stages[0]
    b, a = statistics.linear_regression(stages, list(seconds.values()))[:2]
    if a < 0:  # fit b with a = 0 instead
        b = sum(x * y for x, y in zip(stages, seconds.values(), strict=True))
        return 0.0, b / sum(x * x for x in stages)
    return (a, b) if b > 0 else (statistics.mean(seconds.values()), 0.0)


def speedup(n: int, period: int, result: dict[str, Any], way: str) -> float:
    """Return the speed-up S(n) by the model, with the fitted all-reduce time."""
    a, b = result["fit"][way]
    seconds = a + b * math.log2(n) if n > 1 else 0.0
    local = period * result["minibatch_s"]
    return n * local / (local + seconds)


def _allreduce_share(n: int, speedup: float) -> float:
    """Return the cost of averaging that a measured speed-up implies: t_allreduce / (K t) = n / S - 1."""
    return n / speedup - 1


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table of measured all-reduce times, fitted a and b, and speed-ups by the model."""
    lines = ["| sum by | " + " | ".join(f"t_allreduce({n}), ms" for n in result["sizes"])]
    lines[0] += " | a, ms | b, ms | " + " | ".join(
        f"S({n}), K = {k}" for n in PAPER for k in PERIODS
    )
    lines[0] += " |"
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for way in WAYS:
        cells = [way]
        cells += [f"{1e3 * s:.0f}" for s in result["allreduce_s"][way].values()]
        cells += [f"{1e3 * value:.1f}" for value in result["fit"][way]]
        cells += [f"{speedup(n, k, result, way):.1f}" for n in PAPER for k in PERIODS]
        lines.append(f"| {' | '.join(cells)} |")
    shares = ", ".join(
        f"{_allreduce_share(n, s):.3f} at {n} ({_allreduce_share(n, s) / math.log2(n):.3f} "
        "per stage)"
        for n, s in PAPER.items()
    )
    return "\n".join(lines) + (
        f"\n\n{result['preset']}: {result['parameters']:,} parameters, minibatch of {result['batch']} in "
        f"{1e3 * result['minibatch_s']:.0f} ms on one core. S: a model, not a measurement. The paper's "
        f"speed-ups mean t_allreduce / (K t) = {shares}.\n"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw speed-up over the number of learners: the model's curves, and the paper's two points."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawing.subplots()
    sizes = list(range(1, MOST + 1))
    axes.plot(sizes, sizes, color="0.8", lw=1, label="N")
    for period in PERIODS:
        curve = [speedup(n, period, result, "sockets") for n in sizes]
        axes.plot(sizes, curve, lw=1.5, label=f"model, K = {period}")
    share = statistics.mean(_allreduce_share(n, s) / math.log2(n) for n, s in PAPER.items())
    implied = [n / (1 + share * math.log2(n)) for n in sizes]
    axes.plot(sizes, implied, "k--", lw=1, label=f"t_allreduce = {share:.2f} K t log2 N")
    axes.plot(list(PAPER), list(PAPER.values()), "ko", label="reported by Su and Chen, 2015")
    axes.set(
        xlabel="learners", ylabel="speed-up over one learner", xlim=(1, MOST), ylim=(0, MOST),
        title=f"A model, not a measurement: t and t_allreduce(2 to {max(result['sizes'])}) of one machine, "
        f"{result['preset']}",
    )  # fmt: skip
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    drawing.savefig(path, dpi=120)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a minibatch and the all-reduce, fit a and b; return all of them."""
    shape = models.preset(options.preset, OUTPUTS)
    shape = replace(shape, inputs=models.PRESETS["dnn"].inputs)
    seconds, parameters = minibatch_s(shape, options.batch, options.rounds)
    print(f"minibatch: {1e3 * seconds:.1f} ms, {parameters:,} parameters", flush=True)
    times = allreduce_s(parameters, options.learners, options.rounds)
    return {
        "preset": options.preset,
        "batch": options.batch,
        "parameters": parameters,
        "minibatch_s": seconds,
        "sizes": sorted(times["mpi"]),
        "allreduce_s": times,
        "fit": {way: fitted(times[way]) for way in WAYS},
    }


def main() -> None:
    """Measure and fit, or recall the results; write table and figure."""
    options = arguments()
    path = options.out / "result.json"
    if options.recall and not path.exists():
        raise Problem(f"--recall: there is no {path}; measure first, without --recall")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.recall:
        path.write_text(json.dumps(measured(options), indent=1) + "\n")
    result = json.loads(path.read_text())
    (options.out / "table.md").write_text(table(result))
    draw(result, options.out / "speedup.png")
    print(table(result))


if __name__ == "__main__":
    run(main)
