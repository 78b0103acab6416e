"""Learners with unequal numbers of batches, from Lhotse manifests: no barrier for gossip."""

# ruff: noqa: E402, F811

import subprocess
import sys
from pathlib import Path

import pytest

lhotse = pytest.importorskip("lhotse")
pytest.importorskip("soundfile")

from examples.acoustic_model.speech import journal
from tests.launcher import ROOT, environment, launch
from tests.unit.test_real_speech import data, manifest  # noqa: F401

pytestmark = [pytest.mark.mpi, pytest.mark.extended]


@pytest.fixture
def manifests(tmp_path: Path) -> list[str]:
    """Of four utterances in two recordings, and of the two in one."""
    whole, short = manifest(tmp_path), tmp_path / "short.jsonl.gz"
    lhotse.CutSet.from_cuts([next(iter(lhotse.CutSet.from_file(whole)))]).to_file(short)
    return [str(whole), str(short)]


def test_gossip_trains_on_all_of_them(data: Path, manifests: list[str], tmp_path: Path) -> None:
    words = ["--data", str(data), "--out", str(tmp_path / "run"), "--epochs", "3", "--warm-up", "1"]
    words += ["--layers", "1", "--cells", "8", "--seconds", "1", "--cuts", *manifests]
    done = subprocess.run(
        [*launch(2, "horovodrun"), sys.executable, "-m", "examples.real_speech.train", *words],
        env=environment({"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}),
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "model.pt").exists()
    epochs = journal.read(tmp_path / "run" / "heldout.jsonl")
    assert [told["utterances"] for told in epochs] == [6, 12, 18]  # four and two in each
