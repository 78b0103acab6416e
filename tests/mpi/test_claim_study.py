"""The study `claim`, made small: learners train, are killed, and their models are judged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for needed in ("torch", "espeakng_loader", "kaldi_native_fbank", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

from hvd_adpsgd_lab.machines import unavailable  # noqa: E402

from lab.studies.claim import schemes  # noqa: E402

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).parents[2]


def study(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The records of the runs, by the situations as the study names them."""
    command = [sys.executable, "-m", "lab.studies.claim", "--quick", "--seeds", "0"]
    command += ["--tasks", "text", "--seconds", "2", "--out", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "claim.png").exists()
    kept = [json.loads(file.read_text()) for file in (folder / "runs").glob("*/run.json")]
    situations = words[1 : words.index("--schemes")]
    return sorted(kept, key=lambda run: situations.index(run["settings"]["situation"]))


@pytest.mark.extended
@pytest.mark.parametrize("scheme", list(schemes.SCHEMES))
def test_each_scheme_beside_a_slow_and_a_killed_learner(tmp_path: Path, scheme: str) -> None:
    if reason := schemes.missing(scheme):
        pytest.skip(reason)
    slow, killed = study(tmp_path, "--only", "slow", "killed", "--schemes", scheme)
    assert slow["ended_s"] is None
    if scheme in ("horovod", "ddp"):
        assert killed["ended_s"] is not None
    if scheme == "hadpsgd":
        assert killed["ended_s"] is None


@pytest.mark.extended
@pytest.mark.parametrize("scheme", list(schemes.SCHEMES))
def test_each_scheme_over_thin_links(tmp_path: Path, scheme: str) -> None:
    if reason := schemes.missing(scheme) or unavailable():
        pytest.skip(reason)
    (run,) = study(tmp_path, "--only", "100mbit", "--schemes", scheme)
    assert run["ended_s"] is None
    assert run["curve"]
