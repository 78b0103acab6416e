"""The study of the papers' claims: its recipe, its tables; a second call trains only what is missing."""

import math
from pathlib import Path
from typing import Any

import pytest

from examples.acoustic_model import virtual_time
from examples.acoustic_model.speech.problem import Problem
from examples.acoustic_model.virtual_time import Recipe
from lab.studies import claims, runs


class Split:
    def __len__(self) -> int:
        return 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "split", lambda name: Split())


def test_the_rate_is_in_proportion_to_the_batch_warms_up_and_falls() -> None:
    plain, warmed = (Recipe(256, 2.0, warm_up, epochs=8) for warm_up in (False, True))
    assert plain.steps() == 32 and plain.scale == 4
    rates = [[2.0 * 4 * recipe.factor(step) for step in range(32)] for recipe in (plain, warmed)]
    assert rates[0][:20] == [8.0] * 20  # five epochs of four steps
    assert rates[1][0] == 2.0 and rates[1][10] == pytest.approx(5.0)
    assert rates[1][20:] == rates[0][20:]
    assert rates[0][20:24] == pytest.approx([8 / math.sqrt(2)] * 4)
    assert rates[0][24] == pytest.approx(4.0)


def one(kind: str, scheme: str, seed: int, **found: Any) -> runs.Run:
    its = {"n": 16, "batch": 256, "rate": 2.0, "warm_up": "none", "slow": 1.0, "curve": []}
    return {"scheme": scheme, "seed": seed, "time_s": 1.0, **its, **found}


def test_the_surface_is_bold_within_five_percent_of_the_best_baseline() -> None:
    found = [
        *(one("batch", "synchronous", s, batch=256, loss=1.0) for s in (0, 1)),
        *(one("batch", "synchronous", s, batch=512, loss=1.06) for s in (0, 1)),
        *(one("batch", "synchronous", s, batch=256, rate=1.0, loss=1.5) for s in (0, 1)),
        one("batch", "fixed_ring", 0, batch=512, loss=1.02),
        one("batch", "fixed_ring", 1, batch=512, loss=1.04),
        one("batch", "fixed_ring", 0, batch=256, loss=math.inf),
    ]  # fmt: skip
    lines = claims.batch_table(found).splitlines()
    assert "| 16 | synchronous | 2 | none | **1.000** | 1.060 |" in lines
    assert "| 16 | synchronous | 1 | none | 1.500 |  |" in lines
    assert "| 16 | fixed_ring | 2 | none | diverged | **1.030** |" in lines


def test_nothing_is_bold_where_the_baseline_diverges() -> None:
    found = [one("batch", "synchronous", 0, loss=math.inf), one("batch", "fixed_ring", 0, loss=9.0)]
    assert "| 16 | fixed_ring | 2 | none | 9.000 |" in claims.batch_table(found).splitlines()


def test_times_are_those_of_synchronous_training_without_a_slow_learner() -> None:
    found = [
        one("straggler", "synchronous", 0, time_s=10.0, loss=1.0),
        one("straggler", "synchronous", 0, slow=10.0, time_s=100.0, loss=1.0),
        one("straggler", "random_pairs", 0, slow=10.0, time_s=10.6, loss=1.1),
    ]
    lines = claims.straggler_table(found).splitlines()
    assert "| 16 | synchronous | 256 | 2 | none | 1.00, 1.000 | 10.00, 1.000 |" in lines
    assert "| 16 | random_pairs | 256 | 2 | none |  | 1.06, 1.100 |" in lines


def counted(cell: runs.Cell) -> runs.Run:
    return {"which": cell[0], "loss": float(cell[0]), "seconds": 0.0}


def test_a_second_call_trains_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.json"
    assert len(runs.perform(file, [(1,), (2,)], ("which",), counted, 1)) == 2
    assert "2/2" in capsys.readouterr().out
    found = runs.perform(file, [(2,), (3,)], ("which",), counted, 1)
    assert sorted(run["which"] for run in found) == [1, 2, 3]
    assert "1/1" in capsys.readouterr().out


def test_a_batch_smaller_than_the_learners_is_refused() -> None:
    with pytest.raises(Problem, match="^--n 300 with --batches 256: each learner needs a segment"):
        claims.arguments(["batch", "--n", "16", "300", "--batches", "256", "512"])
