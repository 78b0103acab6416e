"""The study of goodput: its runs, and its table."""

from pathlib import Path
from typing import Any

import pytest

from examples.acoustic_model.speech.problem import Problem
from lab.studies import goodput


def one(scheme: str, rate: float, seed: int = 0, **found: Any) -> dict[str, Any]:
    return {
        "n": 8, "minutes": 3.0, "step": 1.0, "replace": 60.0, "task": "t.py", "kept": 0.5, "loss": 1.0,
        "failed": 4, "joined": 3, "seconds": 1.0, "curve": [[0.0, 0, 2.0, 8], [180.0, 100, 1.0, 7]],
        "scheme": scheme, "rate": rate, "seed": seed, **found,
    }  # fmt: skip


def test_samples_are_shares_of_all_and_of_those_there() -> None:
    runs = [one("random_pairs", 60.0, 0, kept=0.4), one("random_pairs", 60.0, 1, kept=0.5)]
    # a minute between failures, and a minute to a replacement
    row = goodput.table(runs).splitlines()[-1]
    assert row == "| 60 | random_pairs | 4, 3 | 45.0 % | 90.0 % | 1.000 |"
    assert "| 0 | diloco | 4, 3 | 50.0 % | 50.0 % | 1.000 |" in goodput.table([one("diloco", 0.0)])


def test_goodput_is_drawn(tmp_path: Path) -> None:
    goodput.draw([one("random_pairs", 1.0), one("synchronous", 10.0, kept=0.0)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_small_job_loses_less_to_failures_than_synchronous_training() -> None:
    told = {
        "n": 4, "rate": 60.0, "seed": 0, "minutes": 0.7, "step": 1.0, "replace": 5.0,
        "task": "examples/virtual_time.py",
    }  # fmt: skip
    gossip, synchronous = (
        goodput.trained(told | {"scheme": scheme}) for scheme in ("random_pairs", "synchronous")
    )
    assert gossip["failed"] > 0 and synchronous["failed"] > 0
    assert gossip["kept"] > 1.5 * synchronous["kept"]
    assert gossip["curve"][-1][2] < gossip["curve"][0][2]


@pytest.mark.parametrize("option", [["--n", "1"], ["--rates", "-1"], ["--replace", "-1"]])
def test_wrong_options_are_refused(option: list[str]) -> None:
    with pytest.raises(Problem, match=option[0]):
        goodput.arguments(option)
