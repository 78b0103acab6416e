"""A run that is watched: every leader knows all, the record is written, a failure is in it."""

import http.client
import json
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvd_adpsgd.watching.record import read
from tests.launcher import ROOT, environment, free_port, run_learners, wait_for

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "watched.py"
OPTIONS = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_REPORT_S": "0.1"}


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What `python -m hvd_adpsgd` prints."""
    return subprocess.run(
        [sys.executable, "-m", "hvd_adpsgd", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment({"COLUMNS": "140"}),
    )


def test_every_leader_knows_all_and_the_record_has_it(tmp_path: Path) -> None:
    env = {**OPTIONS, "HVD_ADPSGD_RECORD": str(tmp_path)}
    result = run_learners(3, PROGRAM, env=env).checked()
    for facts in result.by_rank():
        assert set(facts["known"]) == {"0", "1", "2"}, facts
        for rank, (step, learner, exchanges) in facts["known"].items():
            assert learner == int(rank) and step > 0 and exchanges > 0, facts
        assert facts["watchers"] == [1, 0], "a thread that ends in shutdown"
        assert facts["waits"] == [False, True, True], "it steps; is paused; evaluates the mean"
        assert [each["error"] for each in facts["refused"]] == ["ConfigError"] * 5, facts
    first, *others = result.by_rank()
    assert [facts["sent"] for facts in others] == [0, 0], "the first leader sends for all"
    assert first["threads"] == ["hvd_adpsgd.watching"], "the trainer never waits for the writer"
    last = {tag: value for tag, value, _ in first["points"]}
    assert last["hvd_adpsgd/step/0"] == first["step"], "the last numbers are sent"
    assert {f"hvd_adpsgd/{name}/{i}" for name in ("lr", "step") for i in range(3)} <= set(last)
    assert last["hvd_adpsgd/super_learners"] == 3
    run = read(tmp_path)
    assert set(run.tracks) == {0, 1, 2}
    for rank, track in run.tracks.items():
        steps = [report.step for report in track.reports]
        assert len(steps) >= 3 and steps == sorted(steps), steps
        assert steps[-1] == result.by_rank()[rank]["step"], "the last report is of the end"
        assert track.reports[-1].scalars["learner"] == rank
        assert sum(track.tables["peers"].values()) == track.reports[-1].exchanges
    table = json.loads(command("top", "--json", tmp_path).stdout)
    assert [row["super_learner"] for row in table["super_learners"]] == [0, 1, 2]
    assert {row["state"] for row in table["super_learners"]} == {"left"}, "the run is over"
    text = command("top", "--once", tmp_path).stdout
    assert "steps/s" in text and "3 super learners" in text, text
    assert command("report", tmp_path).returncode == 0
    assert "Plotly.newPlot" in (tmp_path / "report.html").read_text()


def test_nothing_watches_if_it_is_turned_off() -> None:
    result = run_learners(2, PROGRAM, env={**OPTIONS, "HVD_ADPSGD_REPORT_S": "0"})
    for facts in result.checked().by_rank():
        assert facts["watchers"] == [0, 0], facts
        assert facts["known"] == {}, facts


def test_a_failure_is_in_the_record(tmp_path: Path) -> None:
    env = {**OPTIONS, "HVD_ADPSGD_RECORD": str(tmp_path), "FAILS": "2"}
    run_learners(3, PROGRAM, env=env)
    run = read(tmp_path)
    failed = [event for event in run.events if event.what == "failed"]
    assert {event.about for event in failed} == {2}, run.events
    states = json.loads(command("top", "--json", tmp_path).stdout)["super_learners"]
    assert states[2]["state"] == "FAILED", states
    assert run.tracks[0].reports[-1].time_s > failed[0].time_s, "the survivors are recorded on"


def serves(port: int, *lines: str) -> bool:
    """Whether the metrics at this port have a line with each of these patterns."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    except (OSError, http.client.HTTPException):  # a leader that dies cuts its answer short
        return False
    return all(re.search(line, text) for line in lines)


def test_the_next_leader_serves_metrics_when_the_first_has_failed(tmp_path: Path) -> None:
    port = free_port()
    env = {**OPTIONS, "HVD_ADPSGD_METRICS_ADDRESS": f":{port}"}
    program = PROGRAM.with_name("until_stopped.py")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_learners, 3, program, args=[str(tmp_path)], env=env)
        try:
            well = [rf'_state{{.*state="ok",super_learner="{i}"}} 1.0' for i in range(3)]
            scalar = r'_scalar{.*name="loss",super_learner="2"}'
            wait_for(lambda: job.done() or serves(port, *well, scalar), "metrics of all")
            (tmp_path / "kill.0").touch()
            failed = r'_state{.*state="FAILED",super_learner="0"} 1.0'
            wait_for(lambda: job.done() or serves(port, failed), "metrics of the next leader")
        finally:
            (tmp_path / "stop").touch()
        result = job.result()
    facts = {each["rank"]: each for each in result.said if "step" in each}
    assert set(facts) == {1, 2}, result.report()
    assert "no metrics at" not in result.stderr


def test_a_record_that_cannot_be_written_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = {**OPTIONS, "HVD_ADPSGD_RECORD": str(tmp_path / "file")}
    result = run_learners(2, PROGRAM, env=env)
    assert result.returncode != 0
    assert result.stderr.count("ConfigError: ") >= 2, result.report()
    assert "HVD_ADPSGD_RECORD" in result.stderr
