"""Which leader warns, serves metrics and sends for all: the first one that lives, answers and has joined."""

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
from hvd_adpsgd.watching.record import Record, read
from hvd_adpsgd.watching.reports import Report, decode
from hvd_adpsgd.watching.sampler import Sample
from hvd_adpsgd.watching.scalars import log
from hvd_adpsgd.watching.states import States
from hvd_adpsgd.watching.watcher import Watcher

ALIVE, SUSPECT, LEFT, FAILED = PeerState.ALIVE, PeerState.SUSPECT, PeerState.LEFT, PeerState.FAILED


def world(own: int, *states: PeerState, joining: bool = False, **options: Any) -> Any:
    names = [f"host{i}" for i in range(len(states))]
    return SimpleNamespace(
        super_rank=own,
        super_size=len(states),
        membership=SimpleNamespace(states=list(states), names=names, own=own, own_failed=False),
        collectives=SimpleNamespace(joining=joining),
        config=Config(**options),
        inner_size=1,
    )


def states(of: Any) -> tuple[States, list[tuple[str, int | None]]]:
    """The states, and (kind, about) of the events that they note."""
    noted: list[tuple[str, int | None]] = []
    return States(of, lambda what, about, text: noted.append((what, about))), noted


def speaks_at(own: int, *now: PeerState) -> list[int]:
    """The seconds at which this leader speaks, of 0 to 30; from second 10 on the states are these."""
    well, ill = world(own, *([ALIVE] * len(now))), world(own, *now)
    made, _ = states(well)
    spoken = []
    for second in range(30):
        of = ill if second >= 10 else well
        made.update(of, float(second))
        if made.speaks(of, float(second), {}):
            spoken.append(second)
    return spoken


def test_leaders_that_do_not_answer_are_passed_over_after_10_s() -> None:
    assert speaks_at(1, SUSPECT, ALIVE) == list(range(21, 30))
    assert speaks_at(2, SUSPECT, SUSPECT, ALIVE) == list(range(21, 30))
    assert speaks_at(2, SUSPECT, ALIVE, ALIVE) == [], "the second one speaks"
    assert speaks_at(2, LEFT, FAILED, ALIVE) == list(range(10, 30)), "at once"
    assert speaks_at(0, ALIVE, SUSPECT) == list(range(30))


def test_a_leader_whose_reports_are_missing_is_passed_over() -> None:
    """Its engine answers, but the thread that reports does not run."""
    now = world(1, ALIVE, ALIVE)
    made, _ = states(now)
    assert [made.speaks(now, 0.0, ages) for ages in ({}, {0: 20.0}, {0: 21.0})] == [
        False,
        False,
        True,
    ]


def test_a_leader_that_answers_again_speaks_again() -> None:
    ill, well = world(1, SUSPECT, ALIVE), world(1, ALIVE, ALIVE)
    made, _ = states(well)
    for now, second, speaks in (
        (ill, 0, False),
        (ill, 15, True),
        (well, 16, False),
        (ill, 17, False),
    ):
        made.update(now, float(second))
        assert made.speaks(now, float(second), {}) is speaks, second


def test_a_replacement_is_silent_until_it_has_joined() -> None:
    now = world(0, ALIVE, ALIVE, joining=True)
    made, noted = states(now)
    made.update(now, 0.0)
    assert not made.speaks(now, 0.0, {})
    made.end()
    now.collectives.joining = False
    made.update(now, 0.0)
    made.update(now, 0.0)
    assert made.speaks(now, 0.0, {})
    made.end()
    assert noted == [("failed", 0), ("joined", 0), ("left", 0)], "it ended before it joined"


def test_changes_of_states_are_events() -> None:
    """A super learner that is replaced has joined."""
    made, noted = states(world(0, ALIVE, ALIVE))
    for state in (SUSPECT, ALIVE, FAILED, ALIVE):
        made.update(world(0, ALIVE, state), 0.0)
    made.update(world(0, ALIVE, ALIVE, ALIVE), 0.0)
    kinds = ["suspect", "alive", "failed", "joined"]
    assert noted == [*((kind, 1) for kind in kinds), ("joined", 2)]


def test_what_happened_long_ago_is_still_known_at_the_end_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to readers of the end alone, such as top; alerts are events, too."""
    now = world(0, ALIVE, FAILED, SUSPECT, record=str(tmp_path))
    for i in (1, 2):
        record = Record(tmp_path, i)
        record.report(i, Report(time_s=1e9))
        record.close()
    samples = [Sample(float(k), k, {"global_operations": float(k)}) for k in range(100)]
    one_by_one = iter(samples)
    made = Watcher(now, lambda stopping: (next(one_by_one), None))
    for k in range(100):
        monkeypatch.setattr(time, "monotonic", lambda k=k: float(k))
        monkeypatch.setattr(time, "time", lambda k=k: 1e9 + 2 * k)
        made._look(now, None)
    assert made._record is not None
    made._record.close()
    for newest in (None, 2000):
        events = [(e.what, e.about) for e in read(tmp_path, newest).events]
        assert ("failed", 1) in events and ("suspect", 2) in events, newest
    assert ("alert", 0) in [(e.what, e.about) for e in made.events]
    assert len((tmp_path / "0.jsonl").read_text()) > 20_000, "more than is read"


@pytest.mark.parametrize("name", ["x" * 129, "a\udc80b"], ids=["long", "surrogate"])
def test_a_name_that_no_view_can_show_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed are 128"):
        log(**{name: 1.0})


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no number"):
        log(loss=torch.zeros((), device="meta"))


def test_a_long_value_is_cut_and_marked_as_cut() -> None:
    with pytest.raises(ConfigError, match=r"words w\.\.\. is no number"):
        log(loss="words " * 100)


def test_an_optimizer_that_was_dropped_is_not_told_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaging continues until the script's thread stops it; the time without steps is no hang."""
    told: list[Report | None] = []
    store = SimpleNamespace(left_out=lambda exchanges: ())
    engine = SimpleNamespace(
        counters=lambda: None,
        send_report=lambda text: told.append(decode(text)),
        reports=dict,
        loop=None,
        memory=SimpleNamespace(own=SimpleNamespace(store=store)),
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
    source = watching.Source()
    source._watched = lambda: dropped
    made = Watcher(now, source.observe)
    monkeypatch.setattr(watching, "live", lambda also_stopping=False: [dropped] * also_stopping)
    monkeypatch.setattr(time, "monotonic", itertools.count(step=100.0).__next__)
    made._look(now, None)
    made._look(now, None)
    assert [report and report.idle_s for report in told] == [0.0, 0.0]
    made._look(now, dropped)  # it stops, and its engine ends
    made._look(now, None)
    made._look(now, dropped)  # another one is watched by now: this one is not to be watched again
    assert len(told) == 3 and not hasattr(dropped, "at_stop")
