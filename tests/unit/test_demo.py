"""The demo: what it refuses, what it tells of a run, and the time that it says is left."""

# The imports come after the check that the example's packages are there.
# ruff: noqa: E402

import json
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("torch", "espeakng_loader", "kaldi_native_fbank", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

from examples.acoustic_model import demo
from examples.acoustic_model.speech.problem import Problem

ROOT = Path(__file__).parents[2]


def killed_run(folder: Path, finishes: bool, scheme: str = "hadpsgd") -> demo.launch.Training:
    options = demo.arguments(["--out", str(folder)])
    one = demo.training(demo.Kind(scheme, "killed"), 0, options)
    one.folder.mkdir(parents=True)
    entries = [{"epoch": epoch, "seconds": 2.5 * epoch} for epoch in range(3 if finishes else 1)]
    (one.folder / "heldout.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    (one.folder / "killed.json").write_text('{"epochs": 0.5, "seconds": 1.5}')
    (one.folder / "log.txt").touch()
    if finishes:
        (one.folder / "model.pt").touch()
    return one


@pytest.mark.parametrize(
    ("scheme", "finishes", "seconds", "part", "line"),
    [
        ("hadpsgd", True, 5.0, 1.0, "finished by the other learners"),
        ("ssgd", False, 1.5, 0.25, "the job ended, after 25 % of the samples"),
    ],
)
def test_what_is_told_of_a_run_whose_learner_is_killed(
    tmp_path: Path, scheme: str, finishes: bool, seconds: float, part: float, line: str
) -> None:
    kind = demo.Kind(scheme, "killed")
    found = demo.row(kind, [killed_run(tmp_path, finishes, scheme)], {})
    assert found == {"seconds": seconds, "part": part}
    assert f"{demo.SCHEMES[scheme]:14}{seconds:11.1f}  {line}" in demo.table({kind.name: found}, {})


@pytest.mark.parametrize("finishes", [False, True])
def test_a_run_whose_learner_is_not_killed_is_a_problem(tmp_path: Path, finishes: bool) -> None:
    one = killed_run(tmp_path, finishes)
    (one.folder / "killed.json").unlink()
    with pytest.raises(Problem, match="its learner was not killed; .*log.txt says why"):
        demo.row(demo.Kind("hadpsgd", "killed"), [one], {})


def test_a_run_that_does_not_outlive_its_learner_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="did not outlive the learner that was killed; .*log.txt"):
        demo.row(demo.Kind("hadpsgd", "killed"), [killed_run(tmp_path, finishes=False)], {})


def test_a_run_with_other_settings_is_not_taken_for_finished(tmp_path: Path) -> None:
    kind, options = demo.Kind("ssgd", "even"), demo.arguments(["--out", str(tmp_path)])
    one = demo.training(kind, 0, options)
    one.folder.mkdir(parents=True)
    (one.folder / "model.pt").touch()
    data = tmp_path / "speech"
    assert not one.is_finished(data)
    (one.folder / "settings.json").write_text(json.dumps(one.settings(data)))
    assert one.is_finished(data)
    assert not one.is_finished(tmp_path / "other")
    longer = demo.training(kind, 0, demo.arguments(["--out", str(tmp_path), "--epochs", "9"]))
    assert longer.folder == one.folder and not longer.is_finished(data)


@pytest.mark.extended
@pytest.mark.mpi
def test_the_whole_demo_on_seconds_of_speech(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.acoustic_model.demo", "--quick"]
    command += ["--out", str(tmp_path / "demo"), "--data", str(tmp_path / "speech")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["rows"]["ssgd-killed"]["part"] == pytest.approx(0.25, abs=0.1)
    assert result["rows"]["hadpsgd-killed"]["part"] == 1
    assert (tmp_path / "demo" / "demo.png").exists()
    assert "[7 of 7] one learner alone, seed 0" in done.stdout
