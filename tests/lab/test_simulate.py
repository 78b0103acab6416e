"""The command `simulate`: replay, chart, timeline, and the smallest scenario that breaks a promise."""

import ctypes
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hvd_adpsgd_lab import simulate
from hvd_adpsgd_lab.simulation import campaign, chart, small_job
from hvd_adpsgd_lab.simulation.coverage import MESSAGES
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
from hvd_adpsgd_lab.simulation.scenario import Fault, Scenario, digest, run
from hvd_adpsgd_lab.simulation.shrink import _smaller, shrink

from hvd_adpsgd.errors import ConfigError

CRASHES = next(
    s
    for s in map(Scenario.random, range(1000))
    if s.size > 4 and any(f.kind == "crash" for f in s.faults)
)


def test_a_replay_says_what_it_is_and_its_chart_has_a_line_for_every_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate.main(["--seed", "8", "--chart"]) == 0
    out = capsys.readouterr().out
    assert str(Scenario.random(8)) in out and "every promise kept" in out
    arrows = [line for line in out.splitlines() if re.search(r"ms\)", line)]
    assert len(arrows) == len(run(Scenario.random(8), trace=True).network.messages()) > 10
    assert re.search(r"ASK 1|chunk \d+ B|VOTE 0|sum \d+ B", out)


def enumerators(file: str, beginning: str) -> dict[str, int]:
    """The names and numbers of an enum of the engine."""
    text = (Path(__file__).parents[2] / "ext/hvd_adpsgd/engine" / file).read_text()
    (body,) = re.findall(rf"^cdef enum{beginning}\n((?:    .*\n)+)", text, re.MULTILINE)
    return {
        name: int(number) for name, number in re.findall(r"^    (\w+) = (\d+)", body, re.MULTILINE)
    }


def test_the_names_of_messages_are_those_of_the_engine() -> None:
    """A message kind without a name here could not be drawn, and would be counted as another one."""
    kinds = enumerators("core.pxd", " Kind:")
    assert kinds.pop("NONE") == 0
    assert kinds == {name: number for number, name in enumerate(chart.NAMES) if name}
    names = [name.upper().replace(" ", "_") for name in MESSAGES]
    assert names == [*kinds, "FAILURE", "SILENCE"]
    assert set(small_job.KINDS) == {"failure", *kinds} - {"REPORT"}
    kinds = enumerators("agreement.pxd", " MessageKind:")
    assert kinds == {name: number for number, name in enumerate(chart.AGREEMENT_NAMES) if name}
    channels = enumerators("wire.pxd", r":(?=\n    NOBODY)")
    assert (channels["CONTROL"], channels["AGREEMENT"]) == (chart.CONTROL, chart.AGREEMENT)
    assert channels["DATA"] + channels["DATA_CHANNELS"] == chart.SUMS


def test_a_trace_changes_nothing() -> None:
    for seed in range(10):
        plain, traced = run(Scenario.random(seed)), run(Scenario.random(seed), trace=True)
        assert digest([plain]) == digest([traced])


def test_a_timeline_has_steps_and_exchanges(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    seed = next(i for i in range(100) if Scenario.random(i).config.averaging == "random_pairs")
    assert simulate.main(["--seed", str(seed), "--timeline", str(path)]) == 0
    events = json.loads(path.read_text())
    steps = sum(run(Scenario.random(seed)).summary()["steps"])
    assert sum(e["name"] == "step" for e in events) == steps
    merges = [e for e in events if e["name"] == "merge"]
    assert merges and all(e["dur"] >= 0 and e["args"]["bytes"] > 0 for e in merges)


EIGHT = Scenario.random(8)
BAD = {
    "strategy": ["zzz", 3],
    "steps": [-1, 1.5, True],
    "dtype": ["int8"],
    "latency_s": [math.nan, math.inf],
    "late": [2],
    "max_staleness": [-1],
    "seed": [-1, 2**62, 10**400],
    "learners": [[], [3], None],
    "hosts": [[0], [0, -1], [0, "a"], 3],
}
BAD_FAULTS = [
    {"who": EIGHT.size},
    {"kind": "nokind"},
    {"kind": "cut"},
    {"kind": "partition", "peers": [-1]},
    {"at_s": -5},
    {"kind": "stop", "value": 1e12},
    {"kind": "slow", "value": 0},
]
BAD_LEARNERS = [{"rate": math.nan}, {"step_s": -1}, {"spread": 5}, {"node_s": None}, {"more": 1}]


def altered() -> Iterator[dict[str, object]]:
    """Scenarios with one thing that no scenario has."""
    good = json.loads(EIGHT.to_json())
    for name, values in BAD.items():
        for value in values:
            yield {**good, name: value}
    crash = {"at_s": 0.01, "kind": "crash", "who": 0, "peers": [], "value": 0.0}
    for fault in BAD_FAULTS:
        yield {**good, "faults": [{**crash, **fault}]}
    for learner in BAD_LEARNERS:
        yield {**good, "learners": [*good["learners"][1:], {**good["learners"][0], **learner}]}
    yield {**good, "more": 1}
    yield {name: value for name, value in good.items() if name != "learners"}


@pytest.mark.parametrize("text", [*map(json.dumps, altered()), "", "[]", "3", "{}", "[" * 100_000])
def test_a_scenario_that_cannot_be_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(["--scenario", text]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("seed", [2**62 - 1, 2**62 - 2**40])
def test_the_largest_seeds_run(seed: int) -> None:
    run(Scenario.random(seed))


@pytest.mark.parametrize(
    "arguments",
    [
        "--seed -1",
        "--seeds 5 5",
        f"--seeds 0 {2**63}",
        "--seeds 0 9 --workers 0",
        "--seed 8 --timeline /nowhere/file",
    ],
)
def test_arguments_out_of_their_bounds_are_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and re.search(r"allowed is a|cannot be written", printed.err)


@pytest.mark.parametrize(
    ("arguments", "belongs_to"),
    [
        ("--super-learners 16 --chart", "--seed and --scenario"),
        ("--seed 8 --minutes 3", "--super-learners and --train"),
        ("--super-learners 2 --steps 3", "--train"),
        ("--explore two --workers 2", "--seeds"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: str, belongs_to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and f"but to {belongs_to}." in printed.err


def test_a_scenario_that_cannot_be_names_its_fields() -> None:
    good = json.loads(EIGHT.to_json())
    learner = {**good["learners"][0], "more": 1}
    for text, said in (
        ("[]", "is no JSON object"),
        ('{"seed": 3, "a": 1}', "missing fields: bytes_per_s.*unknown fields: a"),
        (json.dumps({**good, "learners": [learner]}), "a learner: unknown fields: more"),
    ):
        with pytest.raises(ConfigError, match=f"not a scenario.*{said}"):
            Scenario.from_json(text)


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "report.json"
    monkeypatch.setattr(campaign, "BLOCK", 4)
    blocks = iter([campaign.run_block, campaign.run_block])

    def stopped(seeds: range) -> campaign.Report:
        try:
            return next(blocks)(seeds)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(campaign, "run_block", stopped)
    command = ["--seeds", "0", "20", "--workers", "1", "--keep", str(kept)]
    assert simulate.main(command) == 130
    said = f"8 of 20 seeds are in {kept}; the same command runs the others"
    assert said in capsys.readouterr().err


def test_output_that_nobody_reads_ends_quietly() -> None:
    command = [sys.executable, "-m", "hvd_adpsgd", "simulate", "--seed", "8", "--chart"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


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


def test_a_smaller_scenario_keeps_what_its_faults_need() -> None:
    """A fault may strike a super learner that joins, or choose bits: some smaller ones cannot be."""
    for seed in range(100):
        scenario = replace(Scenario.random(seed), copy_every=8)
        tried = list(_smaller(scenario))
        assert any(s.copy_every == 1 for s in tried)
        assert len(tried) > scenario.size + len(scenario.faults) / 2


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


def test_kept_seeds_are_those_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "report.json"
    campaign.explore(0, 8, workers=1, kept=kept)
    before = kept.read_text()
    for seeds in ("1000 1008", "1 9", "0 5"):
        assert simulate.main(["--seeds", *seeds.split(), "--keep", str(kept)]) == 2
        assert "the report is of 8 seeds from 0 on, asked are" in capsys.readouterr().err
    assert kept.read_text() == before
    assert campaign.explore(0, 8, workers=1, kept=kept).runs == 8


GOOD = campaign.Report(first=3).to_json()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "x", "[" * 100_000, GOOD[: len(GOOD) // 2]),
        *(GOOD.replace('"runs": 0', f'"runs": {runs}') for runs in ('"a"', "-1", "true")),
        GOOD.replace('"first": 3, ', ""),
        GOOD.replace('"faults": {}', '"faults": {"flood | idle": 1}'),
        GOOD.replace('"faults": {}', '"faults": {"crash | idle": "a"}'),
        GOOD.replace('"failures": []', '"failures": [3]'),
        EIGHT.to_json(),
    ],
)
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    kept.write_text(text)
    with pytest.raises(ConfigError, match="not a report of simulated seeds"):
        campaign.explore(3, 5, workers=1, kept=kept)
    assert kept.read_text() == text


def test_a_report_that_cannot_be_kept_is_found_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "run_block", lambda seeds: pytest.fail("seeds were run"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x80")
    for path in (tmp_path, binary, tmp_path / "nowhere" / "report.json"):
        with pytest.raises(ConfigError, match=r"the report cannot be (read|written)"):
            campaign.explore(0, 8, workers=1, kept=path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_huge_range_of_seeds_begins_at_once(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "run_block", runs_only)
    told: list[int] = []

    def stop(report: campaign.Report) -> None:
        told.append(report.runs)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign.explore(0, 2**62, workers=workers, progress=stop)
    assert told == [campaign.BLOCK * i for i in (1, 2, 3)]


def test_blocks_come_in_their_order_from_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "run_block", runs_only)
    blocks = [range(i, 2 * i + 1) for i in range(20)]
    assert [report.runs for report in campaign._reports(iter(blocks), 2)] == [*range(1, 21)]


def runs_only(seeds: range) -> campaign.Report:
    """In place of run_block; nothing runs."""
    return campaign.Report(runs=len(seeds))


class Mallinfo2(ctypes.Structure):
    """Of glibc: sizes, of which `uordblks` are the bytes that are in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use() -> int:
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    return int(mallinfo2().uordblks)


def test_runs_leave_no_memory() -> None:
    """A million of them fit in one process; what engines leave to a wire that ends is given back."""
    seeds = range(7000, 7100)
    campaign.run_block(seeds)  # and what is planned once
    before = in_use()
    assert not campaign.run_block(seeds).failures
    assert in_use() - before < 100_000, "bytes, 1000 per run"
