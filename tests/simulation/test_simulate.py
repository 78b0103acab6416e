"""The command `simulate`: replay, chart, timeline, and the smallest scenario that breaks a promise."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.simulation import campaign
from hvd_adpsgd.simulation.ledger import BrokenPromise
from hvd_adpsgd.simulation.scenario import Fault, Scenario, digest, run
from hvd_adpsgd.simulation.shrink import shrink
from hvd_adpsgd.tools import simulate

CRASHES = next(
    s
    for s in map(Scenario.random, range(1000))
    if s.size > 4 and any(f.kind == "crash" for f in s.faults)
)


def test_a_replay_says_what_it_is_and_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seed", "8", "--chart"]) == 0
    out = capsys.readouterr().out
    assert str(Scenario.random(8)) in out
    assert "every promise kept" in out
    assert re.search(r"ASK 1|chunk \d+ B|VOTE 0|sum \d+ B", out)


def test_a_chart_has_a_line_for_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--seed", "8", "--chart"])
    job = run(Scenario.random(8), trace=True)
    lines = capsys.readouterr().out.splitlines()
    arrows = [line for line in lines if re.search(r"ms\)", line)]
    assert len(arrows) == len(job.network.messages()) > 10


def test_a_trace_changes_nothing() -> None:
    for seed in range(10):
        plain, traced = run(Scenario.random(seed)), run(Scenario.random(seed), trace=True)
        assert digest([plain]) == digest([traced])


def test_a_timeline_has_steps_and_exchanges(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    seed = next(i for i in range(100) if Scenario.random(i).strategy == "random_pairs")
    assert simulate.main(["--seed", str(seed), "--timeline", str(path)]) == 0
    events = json.loads(path.read_text())
    steps = sum(run(Scenario.random(seed)).summary()["steps"])
    assert sum(e["name"] == "step" for e in events) == steps
    merges = [e for e in events if e["name"] == "merge"]
    assert merges and all(e["dur"] >= 0 and e["args"]["bytes"] > 0 for e in merges)


def test_seeds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--seeds", "0", "30", "--workers", "1"]) == 0
    assert "30 runs" in capsys.readouterr().out


def test_an_unreadable_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="not a scenario"):
        Scenario.from_json('{"seed": 3}')
    assert simulate.main(["--scenario", "x"]) == 2
    assert "Pass what `simulate` has printed" in capsys.readouterr().err


def test_shrinking_keeps_what_the_failure_needs() -> None:
    """With a judge of our own: broken while super learner 1 crashes and there are three chunks or more."""
    scenario = replace(
        CRASHES,
        chunks=9,
        faults=(*CRASHES.faults, Fault(0.001, "crash", 1), Fault(0.002, "unfit", 0)),
    )

    def judge(s: Scenario) -> BrokenPromise | None:
        broken = s.chunks >= 3 and any(f.kind == "crash" and f.who == 1 for f in s.faults)
        return BrokenPromise("promise", "broken") if broken else None

    small = shrink(scenario, judge)
    assert judge(small) is not None
    assert (small.chunks, small.size, small.steps, small.hosts) == (3, 2, 1, ())
    assert [f.kind for f in small.faults] == ["crash"]


def test_what_breaks_nothing_is_not_shrunk() -> None:
    assert shrink(CRASHES) == CRASHES


def test_an_interrupted_run_of_seeds_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report in the file and that of the rest are that of all seeds at once."""
    kept = tmp_path / "report.json"
    monkeypatch.setattr(campaign, "BLOCK", 8)
    whole = campaign.explore(0, 24, workers=1)
    campaign.explore(0, 16, workers=1, kept=kept)
    told: list[int] = []
    again = campaign.explore(
        0, 24, workers=1, kept=kept, progress=lambda report: told.append(report.runs)
    )
    assert told == [24], "seeds were run twice"
    assert again == whole == campaign.Report.from_json(kept.read_text())
    assert whole.coverage and whole.faults and whole.runs == 24
    broken = campaign.Report(failures=[campaign.Failure(7, "promise 1")])
    assert campaign.Report.from_json(broken.to_json()) == broken
