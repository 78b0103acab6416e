"""The speed-up benchmark: its fit, its model and what it draws."""

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

from lab.studies import speedup


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({n: 2.0 + 3.0 * math.log2(n) for n in (2, 4, 8)}, (2.0, 3.0)),
        ({2: 4.0}, (0.0, 4.0)),
        ({2: 1.0, 4: 3.0}, (0.0, 1.4)),  # a would be -1
        ({2: 3.0, 4: 1.0}, (2.0, 0.0)),  # b would be -2
    ],
)
def test_fit(seconds: dict[int, float], expected: tuple[float, float]) -> None:
    assert speedup.fitted(seconds) == pytest.approx(expected)


def result(a: float, b: float) -> dict:
    return {
        "preset": "dnn",
        "batch": 256,
        "parameters": 1000,
        "minibatch_s": 0.5,
        "sizes": [2],
        "allreduce_s": {way: {"2": a + b} for way in speedup.WAYS},
        "fit": {way: [a, b] for way in speedup.WAYS},
    }


def test_speedup_is_that_of_the_fitted_all_reduce() -> None:
    found = result(1.0, 0.25)
    assert speedup.speedup(1, 10, found, "mpi") == 1
    assert speedup.speedup(16, 10, found, "mpi") == pytest.approx(16 * 5 / (5 + 1 + 4 * 0.25))
    share = 16 / 9.3 - 1  # the paper's point, if its all-reduce is given
    paper = speedup.speedup(16, 10, result(0.0, share * 5 / 4), "sockets")
    assert paper == pytest.approx(9.3)


def test_what_was_measured_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "result.json").write_text(json.dumps(result(1.0, 0.25)))
    monkeypatch.setattr(sys, "argv", ["speedup.py", "--recall", "--out", str(tmp_path)])
    speedup.main()
    assert "| sockets | 1250 | 1000.0 | 250.0 |" in capsys.readouterr().out
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "result.json").unlink()
    with pytest.raises(speedup.Problem, match="measure first"):
        speedup.main()
