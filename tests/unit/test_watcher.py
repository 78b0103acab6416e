"""Which leader warns, serves metrics and sends for all: the first one that lives, answers and has joined."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.training import watching
from hvd_adpsgd.watching.alerts import Alert, Alerts
from hvd_adpsgd.watching.record import Record, read
from hvd_adpsgd.watching.reports import Report, decode
from hvd_adpsgd.watching.sampler import Sampler

ALIVE, SUSPECT, LEFT, FAILED = PeerState.ALIVE, PeerState.SUSPECT, PeerState.LEFT, PeerState.FAILED


def world(own: int, *states: PeerState, joining: bool = False) -> Any:
    names = [f"host{i}" for i in range(len(states))]
    return SimpleNamespace(
        super_rank=own,
        super_size=len(states),
        membership=SimpleNamespace(states=list(states), names=names, own=own, own_failed=False),
        collectives=SimpleNamespace(joining=joining),
    )


def watcher(of: Any) -> Any:
    """Without a thread and without files."""
    made: Any = watching.Watcher.__new__(watching.Watcher)
    made._membership, made._joining = of.membership, of.collectives.joining
    made._events, made._record, made._exporter = [], None, None
    made._states, made._suspect = [ALIVE] * len(of.membership.states), {}
    made._ill, made._recorded, made._ages, made._every_s = {}, {}, {}, 1.0
    return made


def speaks_at(own: int, *states: PeerState) -> list[int]:
    """The seconds at which this leader speaks, of 0 to 30; from second 10 on the states are these."""
    well = world(own, *([ALIVE] * len(states)))
    ill = world(own, *states)
    made = watcher(well)
    found = []
    for second in range(30):
        now = ill if second >= 10 else well
        made._note_states(now, float(second))
        if made._speaks(now, float(second)):
            found.append(second)
    return found


def test_leaders_that_do_not_answer_are_passed_over_after_10_s() -> None:
    assert speaks_at(1, SUSPECT, ALIVE) == list(range(21, 30))
    assert speaks_at(2, SUSPECT, SUSPECT, ALIVE) == list(range(21, 30))
    assert speaks_at(2, SUSPECT, ALIVE, ALIVE) == [], "the second one speaks"
    assert speaks_at(2, LEFT, FAILED, ALIVE) == list(range(10, 30)), "at once"
    assert speaks_at(0, ALIVE, SUSPECT) == list(range(30))


def test_a_leader_whose_reports_are_missing_is_passed_over() -> None:
    """Its engine answers, but the thread that reports does not run."""
    now = world(1, ALIVE, ALIVE)
    made = watcher(now)
    spoken = []
    for made._ages in ({}, {0: 20.0}, {0: 21.0}):
        spoken.append(made._speaks(now, 0.0))
    assert spoken == [False, False, True]


def test_a_leader_that_answers_again_speaks_again() -> None:
    ill, well = world(1, SUSPECT, ALIVE), world(1, ALIVE, ALIVE)
    made = watcher(well)
    for now, second, speaks in (
        (ill, 0, False),
        (ill, 15, True),
        (well, 16, False),
        (ill, 17, False),
    ):
        made._note_states(now, float(second))
        assert made._speaks(now, float(second)) is speaks, second


def test_what_happened_long_ago_is_still_known_at_the_end_of_a_file(tmp_path: Path) -> None:
    """Also to who reads only the end of it, as top does."""
    now = world(0, ALIVE, FAILED, SUSPECT)
    now.super_size = 3
    made = watcher(now)
    made._record = Record(tmp_path, 0)
    for i in (1, 2):
        made._record.report(i, Report(time_s=time.time()))
    made._note_states(now, 0.0)
    for k in range(100):
        reports = {0: Report(time_s=time.time() + k, step=k)}
        made._write(now, reports, None, last=True, speaks=True)
    made._record.close()
    for newest in (None, 2000):
        run = read(tmp_path, newest)
        assert [(e.what, e.about) for e in run.events] == [("failed", 1), ("suspect", 2)], newest
    assert len((tmp_path / "0.jsonl").read_text()) > 20_000, "more than is read"


def test_a_replacement_is_silent_until_it_has_joined() -> None:
    now = world(0, ALIVE, ALIVE, joining=True)
    made = watcher(now)
    made._note_joined(now)
    assert not made._speaks(now, 0.0)
    made._note_end()
    now.collectives.joining = False
    made._note_joined(now)
    made._note_joined(now)
    assert made._speaks(now, 0.0)
    made._note_end()
    assert [(event.what, event.about) for event in made._events] == [
        ("failed", 0),  # it ended before it joined
        ("joined", 0),
        ("left", 0),
    ]


@pytest.mark.parametrize("name", ["x" * 129, "a\udc80b"], ids=["long", "surrogate"])
def test_a_name_that_no_view_can_show_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed are 128"):
        watching.log(**{name: 1.0})


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no number"):
        watching.log(loss=torch.zeros((), device="meta"))


def test_a_long_value_is_cut_and_marked_as_cut() -> None:
    with pytest.raises(ConfigError, match=r"words w\.\.\. is no number"):
        watching.log(loss="words " * 100)


def test_an_optimizer_that_was_dropped_is_not_told_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaging continues until the script's thread stops it; the time without steps is no hang."""
    told: list[Report | None] = []
    engine = SimpleNamespace(
        counters=lambda: None,
        tell=lambda text: told.append(decode(text)),
        told=dict,
        loop=None,
        memory=SimpleNamespace(store=SimpleNamespace(left_out=lambda exchanges: ())),
    )
    dropped: Any = SimpleNamespace(
        world=world(0, ALIVE, LEFT),
        engine=engine,
        record=SimpleNamespace(counters=SimpleNamespace(sums=defaultdict(float))),
        plan=SimpleNamespace(in_step=None),
        spec=SimpleNamespace(config=Config()),
        super_learner=SimpleNamespace(mates=SimpleNamespace(is_away=False)),
        stopped="the optimizer was dropped",
        **dict.fromkeys(("step", "pauses", "holds_mean", "waits_for_peers", "nonfinite_steps"), 0),
    )
    now = dropped.world
    made = watcher(now)
    made._watched, made._sampler = lambda: dropped, Sampler(2)
    made._alerts = Alerts(now.membership.names)
    monkeypatch.setattr(watching, "live", lambda also_stopping=False: [dropped] * also_stopping)
    monkeypatch.setattr(watching.time, "monotonic", itertools.count(step=100.0).__next__)
    made._look(now, None)
    made._look(now, None)
    assert [report and report.idle_s for report in told] == [0.0, 0.0]
    made._look(now, dropped)  # it stops, and its engine ends
    made._look(now, None)
    assert len(told) == 3


def test_alerts_and_states_are_events() -> None:
    """A super learner that is replaced has joined."""
    made = watcher(world(0, ALIVE, ALIVE))
    made._warn(Alert("slow", 1, "super learner 1 is slow"))
    for state in (SUSPECT, ALIVE, FAILED, ALIVE):
        made._note_states(world(0, ALIVE, state), 0.0)
    found = [(event.what, event.about) for event in made._events]
    assert found == [("alert", 1), ("suspect", 1), ("alive", 1), ("failed", 1), ("joined", 1)]
