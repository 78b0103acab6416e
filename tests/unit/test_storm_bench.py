"""The storm without processes: its schedules, what the lines of a run add up to, the options' errors."""

import itertools
from typing import Any

import pytest
from hvd_adpsgd_lab.bench.storm import jobs, report, schedule
from hvd_adpsgd_lab.bench.storm.notes import Notes
from hvd_adpsgd_lab.bench.storm.schedule import Fault

from hvd_adpsgd import __main__ as commands
from hvd_adpsgd.errors import ConfigError

# ---- schedules


def test_a_line_is_a_fault_and_faults_come_by_time():
    text = """
        # all kinds
        60 slow 3 30 4
        42.5 kill 21   # at once
        0 stop 7 20.1
        319.3 cut 0 1e2
    """
    assert schedule.parse(text, "text") == [
        Fault(0.0, "stop", 7, 20.1),
        Fault(42.5, "kill", 21),
        Fault(60.0, "slow", 3, 30.0, 4.0),
        Fault(319.3, "cut", 0, 100.0),
    ]


@pytest.mark.parametrize(
    "line",
    ["1 explode 3", "1", "1 kill", "1 kill 3 4", "1 slow 3 4", "-1 kill 3", "nan kill 3", "1 kill x",
     "1 kill 1.5", "1 kill 4096", "1 stop 3 -2", "1 slow 3 2 0.5"],
)  # fmt: skip
def test_a_line_that_is_no_fault_is_named(line):
    with pytest.raises(ConfigError, match=r"^file.txt, line 2: .*[.] (Write|Correct)"):
        schedule.parse(f"# first\n{line}", "file.txt")


def test_written_faults_are_read_again():
    faults = schedule.drawn(3, 5, 3600, dict.fromkeys(schedule.KINDS, 40.0))
    assert {fault.kind for fault in faults} == set(schedule.KINDS)
    assert schedule.parse(schedule.written(faults), "text") == faults


def test_drawn_faults_are_a_poisson_process_of_the_seed():
    rates = {"kill": 60.0, "stop": 30.0, "cut": 0.0}
    many = schedule.drawn(0, 7, 100 * 3600, rates)
    assert schedule.counted(many).keys() == {"kill", "stop"}
    kills = [fault for fault in many if fault.kind == "kill"]
    assert abs(len(kills) - 6000) < 5 * 6000**0.5
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(kills)]
    assert abs(sum(gap > 60 for gap in gaps) / len(gaps) - 0.3679) < 0.03  # exp(-1)
    assert {fault.slot for fault in kills} == set(range(7))
    assert schedule.drawn(0, 7, 100 * 3600, rates) == many
    assert schedule.drawn(1, 7, 100 * 3600, rates) != many
    assert schedule.drawn(0, 7, 100 * 3600, {"kill": 60.0}) == kills


def test_fewer_slots_and_minutes():
    faults = [Fault(1.0, "kill", 5), Fault(59.9, "stop", 3, 9.0), Fault(60.0, "kill", 0)]
    assert schedule.played(faults, 4, 60.0) == [Fault(1.0, "kill", 1), Fault(59.9, "stop", 3, 9.0)]


# ---- reports: two slots from 100 to 200 s


def _learner(slot: int, start: float, steps: list[tuple[float, int]], **more: Any) -> list[dict]:
    """Lines of a learner that imports for 2 s; `steps` are times and exchanges so far."""
    told = [{"event": "started", "t": start, "slot": slot}]
    told += [{"event": "imported", "t": start + 2, "slot": slot}]
    for n, (t, exchanges) in enumerate(steps, more.get("first", 1)):
        sync = more.get("sync", {}).get(t, {})
        line = {"event": "step", "t": t, "slot": slot, "n": n, "exchanges": exchanges}
        told.append(line | {"sent": 10 * exchanges} | sync)
    held = {"event": "held", "t": start + 3, "rss": 2**20 * (slot + 1), "descriptors": 7 + slot}
    return [*told, held]


def _driver(*events: tuple[str, float, int], **numbers: Any) -> list[dict]:
    named = [{"event": e, "t": t, "slot": i, "status": -9, **numbers} for e, t, i in events]
    return [{"event": "began", "t": 100.0}, *named, {"event": "over", "t": 200.0}]


def every(seconds: float, first: float, last: float, exchanges: int = 0) -> list[tuple[float, int]]:
    count = int((last - first) / seconds) + 1
    return [(first + i * seconds, exchanges + i + 1) for i in range(count)]


def _storm() -> report.Run:
    """Slot 1 is killed at 120, its replacement makes its first step at 130; slot 0 is stopped for 10 s."""
    driver = _driver(
        ("kill", 120.0, 1), ("ended", 120.1, 1), ("spawned", 121.0, 1),
        ("stop", 150.0, 0), ("continued", 160.0, 0),
    )  # fmt: skip
    steady = every(1, 101, 150) + every(1, 161, 200, 50)
    killed, replacement = every(1, 101, 120), every(1, 130, 200, -1)
    learners = [(0, 90, steady), (1, 90, killed), (1, 122, replacement)]
    return report.Run(driver, [_learner(*one) for one in learners], 2)


def test_steps_of_the_living_count_no_time_of_the_dead_and_stopped():
    run = _storm()
    assert run.gone(0) == [(150.0, 160.0)]
    assert run.gone(1) == [(120.0, 130.0)]
    assert run.living_s(0) == run.living_s(1) == 90
    assert (run.living(125), run.living(130), run.living(155)) == (1, 2, 1)
    found = report.summary(run, is_redone=False)
    assert found["steps_per_living_s"] == pytest.approx((90 + 20 + 71) / 180)
    assert found["exchanges_per_living_s"] == pytest.approx((90 + 20 + 70) / 180)
    assert found["sent_mb"] == pytest.approx(1800 / 1e6)
    assert found["faults"] == "1 kill, 1 stop"
    assert found["ended_by_themselves"] == 0
    assert (found["rss_mib"], found["descriptors"]) == (1.5, 8)


def test_time_from_a_kill_to_the_first_step_with_and_without_imports():
    found = report.summary(_storm(), is_redone=False)
    assert found["kill_to_step_s"] == found["kill_to_step_s_worst"] == 10
    assert found["kill_to_step_without_imports_s"] == 7  # from 121 to 124 it started
    assert found["kill_to_exchange_s"] == 11  # it had none in its first step
    assert found["not_replaced"] == 0


def test_a_kill_without_a_replacement():
    driver = _driver(("kill", 150.0, 1), ("ended", 150.1, 1))
    run = report.Run(driver, [_learner(0, 90, []), _learner(1, 90, every(1, 101, 150))], 2)
    found = report.summary(run, is_redone=False)
    assert (found["not_replaced"], found["kill_to_step_s"]) == (1, None)
    assert run.gone(1) == [(150.0, 200.0)]


def test_a_slow_second_counts_as_its_share():
    driver = _driver(("slow", 110.0, 0), ("slow", 110.0, 1), seconds=40.0, factor=4.0)
    driver.insert(3, {"event": "stop", "t": 130.0, "slot": 1})
    driver.insert(4, {"event": "continued", "t": 140.0, "slot": 1})
    run = report.Run(driver, [], 2)
    assert run.living_s(0) == 100 - 40 * 3 / 4
    assert run.living_s(1) == 100 - 10 - 30 * 3 / 4
    assert run.living_s(0, (140.0, 160.0)) == 20 - 10 * 3 / 4


def test_counts_that_begin_again_are_no_loss():
    """In a join all learners get new engines, whose counts begin at 0."""
    steps = [(101.0, 5), (102.0, 6), (103.0, 2), (104.0, 2)]
    run = report.Run(_driver(), [_learner(0, 90, steps)], 1)
    assert [step.exchanges for step in run.steps(0)] == [5, 1, 2, 0]


def test_steps_made_again_count_once():
    learners = [_learner(0, 90, every(1, 101, 150)), _learner(0, 155, every(1, 161, 200), first=41)]
    found = report.summary(report.Run(_driver(), learners, 1), is_redone=True)
    assert found["redone_steps"] == 10
    assert found["steps_per_living_s"] == 80 / 100


def test_participation_in_syncs_is_a_share_of_the_living():
    two, one = {"sync": 1, "participants": 2}, {"sync": 2, "participants": 1}
    learners = [
        _learner(0, 90, every(10, 110, 140), sync={110.0: two, 130.0: one}),
        _learner(1, 90, every(10, 110, 140), sync={110.0: two}),
    ]
    run = report.Run(_driver(), learners, 2)
    assert report.syncs(run) == [(110.0, 1.0), (130.0, 0.5)]
    storm = report.summary(run, is_redone=False)
    assert storm["participation"] == 0.75
    assert report.participation_over_time(run, 1.0, 50) == [(50.0, 0.75)]


def test_a_hang_is_a_minute_without_a_step_of_one_that_is_there():
    learners = [_learner(0, 90, [(101.0, 1), (161.5, 2)]), _learner(1, 90, [(101.0, 1)])]
    driver = _driver(("stop", 110.0, 1), ("continued", 155.0, 1))
    run = report.Run(driver, learners, 2)
    assert [report.hangs(run, slot) for slot in (0, 1)] == [1, 0]  # 1: 99 s, stopped for 45 of them


def test_growth_is_that_of_the_longest_growing_life():
    held = [{"event": "held", "t": 5.0 * i, "rss": 2**20 * i, "descriptors": 7} for i in range(40)]
    leaky = [*_learner(0, 0, every(1, 101, 200))[:-1], *held]
    short = [*_learner(1, 0, every(1, 101, 200))[:-1], *held[:20]]
    found = report.summary(report.Run(_driver(), [leaky, short], 2), False)
    assert found["lives_of_2_min"] == 1
    assert found["rss_growth_mib"] == 20  # 10 to 19 MiB, and 30 to 39
    assert found["descriptor_growth"] == 0


# ---- options


@pytest.mark.parametrize(
    "words",
    ["--schemes ddp", "--slots 1", "--minutes 0.0", "--step nan", "--width 48", "--schedule no/such"],
)  # fmt: skip
def test_a_wrong_option_is_named_before_anything_starts(words, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hvd_adpsgd", "bench", "storm", *words.split()])
    assert commands.main() == 2
    assert capsys.readouterr().err.startswith(f"bench: {words}: ")


def test_learners_of_a_storm_have_no_options_of_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HVD_ADPSGD_WIRE_DTYPE", "int8")
    with (tmp_path / "log").open("wb") as log:
        job = jobs.OneByOne({"slots": 2, "folder": str(tmp_path)}, Notes(tmp_path / "n"), log)
        found = job._environment({"HVD_ADPSGD_JOIN_AS": "1"})
    assert {k for k in found if k.startswith("HVD_ADPSGD_")} == {"HVD_ADPSGD_JOIN_AS"}
