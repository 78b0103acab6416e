"""SpeechBrain's Brain with the swap; where SpeechBrain and torchaudio are installed."""

import importlib.util
from pathlib import Path

import pytest

from tests.launcher import run_learners
from tests.mpi.test_optimizer import PROGRAMS, SIZE

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.skipif(
        not importlib.util.find_spec("speechbrain"), reason="speechbrain is not installed"
    ),
]


def test_a_brain_trains_validates_and_saves_the_mean(tmp_path: Path) -> None:
    result = run_learners(
        4,
        PROGRAMS / "speechbrain_run.py",
        args=[str(tmp_path)],
        env={SIZE: "2", "HVD_ADPSGD_INNER": "torch"},
        launcher="torchrun",
        fresh=True,
    )
    assert result.returncode == 0, result.report()
    losses = [f["loss"] for f in result.said if f["case"] == "epoch" and f["rank"] == 0]
    assert losses[2] < 0.5 * losses[0], losses
    ends = [facts for facts in result.said if facts["case"] == "end"]
    assert len(ends) == 4
    for facts in ends:
        assert facts["steps"] == 3 * 60 / 2
        assert facts["is_mean"], "not the averaged model"
    assert any(facts["exchanges"] for facts in ends)
