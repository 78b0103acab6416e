"""Is it slower than before? Benchmarks of another revision and of this tree, in turns in one run.

    python -m tests.benchmarks.before REVISION [--rounds N] [--limit 1.05]

Each round runs every benchmark once with the other revision and once with this tree, which of them first in
turn. A ratio is this tree's number over the other's of the same round, so that both see the same machine;
above 1 is slower. The other revision is checked out and built in a temporary folder; it runs with the
packages that this Python has.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "exchange": ["exchange"],
    "exchange through MPI": ["exchange", "--through-mpi"],
    "step": ["step"],
}
# Of each benchmark: the number, and whether more of it is better.
NUMBERS: dict[str, list[tuple[str, bool]]] = {
    "exchange": [("exchange_ms", False), ("engine_cpu_ms", False), ("ratio", False)],
    "exchange through MPI": [("exchange_ms", False), ("engine_cpu_ms", False)],
    "step": [("on.steps_per_s", True), ("on.cpu_ms_per_step", False), ("speed_kept", True)],
}


def checked_out(revision: str, folder: Path) -> Path:
    """That revision, built."""
    tree = folder / "before"
    tree.mkdir()
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-xf", "-"], cwd=tree, input=archive.stdout, check=True)
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    for folder in (tree, tree / "lab"):
        if folder.exists():  # a revision without one has its benchmarks in the package
            subprocess.run(build, cwd=folder, env=of(tree), check=True, stdout=subprocess.DEVNULL)
    return tree


def of(tree: Path) -> dict[str, str]:
    """The environment in which Python imports from a tree."""
    return {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'lab'}"}


def measured(tree: Path, benchmark: str) -> dict[str, Any]:
    env = of(tree)
    command = [sys.executable, "-m", "hvd_adpsgd", "bench", *BENCHMARKS[benchmark], "--json"]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"before: {' '.join(command)} in {tree}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def number(result: dict[str, Any], name: str) -> float:
    for part in name.split("."):
        result = result[part]
    return float(result)  # type: ignore[arg-type]


def slowdown(before: dict[str, Any], now: dict[str, Any], name: str, more_is_better: bool) -> float:
    a, b = number(before, name), number(now, name)
    return a / b if more_is_better else b / a


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=1.05, help="largest median that passes")
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=list(BENCHMARKS))
    args = parser.parse_args()
    ratios: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": checked_out(args.revision, Path(folder)), "now": ROOT}
        for turn in range(args.rounds):
            order = list(trees) if turn % 2 == 0 else list(reversed(trees))
            for benchmark in args.only:
                found = {which: measured(trees[which], benchmark) for which in order}
                for name, more in NUMBERS[benchmark]:
                    ratio = slowdown(found["before"], found["now"], name, more)
                    ratios.setdefault((benchmark, name), []).append(ratio)
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    print(f"| benchmark | number | now / {args.revision}: median, least to most |\n|---|---|---|")
    for (benchmark, name), values in ratios.items():
        spread = f"{statistics.median(values):.3f}, {min(values):.3f} to {max(values):.3f}"
        print(f"| {benchmark} | {name} | {spread} |")
    return int(max(map(statistics.median, ratios.values())) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
