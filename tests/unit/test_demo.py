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
from examples.acoustic_model import train as script
from examples.acoustic_model.speech import figure
from examples.acoustic_model.speech.problem import Problem

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("value", ["3", "3:", ":2", "-1:2", "3:0", "3:nan", "3:x"])
def test_a_disturbance_that_cannot_be_read_is_refused(value, capsys) -> None:
    with pytest.raises(SystemExit):
        script.arguments([f"--slow={value}"])
    assert f"'{value}' is not RANK:NUMBER, for instance 3:5" in capsys.readouterr().err
    assert script.arguments(["--kill", "3:0.5"]).kill == (3, 0.5)


def test_no_learner_is_made_faster() -> None:
    with pytest.raises(Problem, match=r"FACTOR of --slow is 0\.5, allowed are 1 to 1e\+06"):
        script.arguments(["--slow", "3:0.5"])


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


def test_the_table_and_the_figure(tmp_path: Path) -> None:
    rows = {
        kind.name: {"seconds": 10.0 + i, "part": 1.0, "wer": 0.13, "interval": [0.1, 0.16]}
        for i, kind in enumerate(demo.kinds(["even", "slow"]))
    }
    rows["ssgd-killed"] = {"seconds": 2.0, "part": 0.25}
    rows["hadpsgd-killed"] = {"seconds": 6.0, "part": 1.0}
    difference = {"difference": -0.006, "low": -0.02, "high": 0.008}
    text = demo.table(rows, {"H-ADPSGD minus plain Horovod, even learners": difference})
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[1:7:2]] == list(demo.SITUATIONS.values())
    assert lines[7].endswith("even learners: WER -0.6 points (-2.0 to +0.8)")
    assert "one learner alone, with its own batch and rate: WER 13.0" in lines[8]
    figure.draw_times(rows, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_that_is_left_follows_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(demo.time, "perf_counter", lambda: now[0])
    runs = demo.kinds(["even", "slow", "killed"])
    clock = demo.Clock(runs, 4)
    total = sum(kind.seconds(4) for kind in runs)
    assert clock.next("a", 0) == f"\n[1 of 7] a, seed 0 (about {total / 60:.1f} min left)"
    first = runs[0].seconds(4)
    now[0] += 2 * first  # this machine takes twice as long
    assert f"about {2 * (total - first) / 60:.1f} min left" in clock.next("b", 0)


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
