"""The study of adaptive optimizers: its table; a second call trains only what is missing."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from lab.studies import moments

ROOT = Path(__file__).parents[2]


def run(seed: int, scheme: str, rate: float, loss: float) -> dict[str, object]:
    return {
        "n": 8, "sequences": 4, "optimizer": "adamw", "scheme": scheme, "rate": rate, "seed": seed,
        "steps": 9, "loss": loss,
    }  # fmt: skip


def test_the_table_compares_best_rates_by_seed() -> None:
    runs = [
        *(run(s, "synchronous", r, 2.0 + 0.1 * s - r) for s in (0, 1, 2) for r in (0.1, 0.2)),
        *(run(s, "pairs@own", r, 2.5 + 0.1 * s + r) for s in (0, 1, 2) for r in (0.1, 0.2, 0.3)),
    ]
    text = moments.table(moments.by_scheme(runs))
    assert "| 8 | 4 | adamw | synchronous | 0.2 (end of grid) | 1.900 |  |" in text
    assert "| 8 | 4 | adamw | pairs@own | 0.1 (end of grid) | 2.700 | +0.800 ± 0.000 |" in text


def test_the_interval_is_students() -> None:
    mean, half = moments.difference({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0))
    assert mean == 2.0
    assert math.isclose(half, 4.303 / math.sqrt(3))


def test_only_equal_seeds_are_compared() -> None:
    """As after a study that was interrupted: one scheme lacks seed 0."""
    runs = [
        *(run(seed, "synchronous", 0.1, 2.0 + seed) for seed in (0, 1, 2)),
        *(run(seed, "pairs", 0.1, 2.5 + seed) for seed in (1, 2)),
    ]
    assert "| pairs | 0.1 (end of grid) | 4.000 | +0.500 ± 0.000 |" in moments.table(
        moments.by_scheme(runs)
    )


@pytest.mark.extended
def test_a_second_call_trains_what_is_missing(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "lab.studies.moments", "--n", "2", "--steps", "2", "--seeds", "2",
        "--rates", "0.01", "--out", str(tmp_path),
    ]  # fmt: skip
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert "6/6" in first and "6/6" not in second
    assert len(json.loads((tmp_path / "runs.json").read_text())) == 6
    assert (tmp_path / "moments.png").stat().st_size > 10_000
