"""HVD_ADPSGD_SHRINK: agreement on a step's gradients and on the remaining learners; refused uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.errors import ConfigError, PeerFailedError, WorldError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch.over_torch import require_shrinkable
from hvd_adpsgd.strategies import parse
from hvd_adpsgd.torch.optimizer_arguments import _require_missable
from hvd_adpsgd.training import survivors
from hvd_adpsgd.training.shrinking import require_whole
from hvd_adpsgd.training.survivors import Survivors

LONGEST_S = 60.0
SET = 5  # number of the set under way


class Mates:
    """Learners of one super learner, in threads of this process; `ended` are those that have ended."""

    def __init__(self, n: int, monkeypatch: pytest.MonkeyPatch):
        rows = np.zeros((n, survivors._COLUMNS), np.int64)
        monkeypatch.setattr(survivors, "shared_counters", lambda *_: rows)
        self.ended: set[int] = set()
        inner = SimpleNamespace(first=range(n), look_at_all=lambda: self.ended)
        self.learners = [
            Survivors(lambda i=i: SimpleNamespace(inner=inner, inner_rank=i)) for i in range(n)
        ]
        self.rows = rows
        for learner in self.learners:
            learner._mine[survivors._REDUCED] = SET

    def reduced(self, *ranks: int) -> None:
        self.rows[list(ranks), survivors._REDUCED] = SET + 1


@pytest.fixture
def mates(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Mates]:
    return lambda n: Mates(n, monkeypatch)


def together(*acts: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(acts)) as threads:
        return [done.result(LONGEST_S) for done in [threads.submit(act) for act in acts]]


def test_a_set_counts_once_all_have_reduced_it(mates: Callable[[int], Mates]) -> None:
    its = mates(3)
    together(*(lambda one=one: one.confirm(SET) for one in its.learners))


def test_a_set_counts_that_a_mate_has_reduced_before_its_end(
    mates: Callable[[int], Mates],
) -> None:
    its = mates(3)
    its.reduced(2)
    its.ended = {2}
    together(*(lambda one=one: one.confirm(SET) for one in its.learners[:2]))


def test_a_set_that_a_mate_has_not_reduced_counts_for_none(mates: Callable[[int], Mates]) -> None:
    """Learner 0 has reduced it; that of learner 1 has failed; both drop it, and miss learner 2."""
    its = mates(3)
    its.ended = {2}

    def confirms() -> list[int]:
        with pytest.raises(horovod.HorovodInternalError):
            its.learners[0].confirm(SET)
        return its.learners[0].agree(SET)

    assert together(confirms, lambda: its.learners[1].agree(SET)) == [[2], [2]]
    together(*(lambda one=one: one.confirm(SET + 1) for one in its.learners[:2]))


def test_a_set_that_a_living_mate_gives_up_counts_for_none(mates: Callable[[int], Mates]) -> None:
    its = mates(2)
    its.rows[1, survivors._BROKEN] = SET + 1
    with pytest.raises(horovod.HorovodInternalError):
        its.learners[0].confirm(SET)


def test_one_that_ends_meanwhile_is_lost_too(mates: Callable[[int], Mates]) -> None:
    """The leader waits for learner 1, which ends before it has given the set up."""
    its = mates(3)
    its.ended = {2}
    timer = threading.Timer(0.2, setattr, (its, "ended", {1, 2}))
    timer.start()
    assert its.learners[0].agree(SET) == [1, 2]
    timer.join()


def test_one_that_has_stopped_its_averaging_is_lost(mates: Callable[[int], Mates]) -> None:
    its = mates(2)
    its.learners[1].leaves()
    assert its.learners[0].has_lost(0.0)
    assert its.learners[0].agree(SET) == [1]
    assert not its.learners[0].has_lost(0.0)


def test_none_can_miss_the_leader(mates: Callable[[int], Mates]) -> None:
    its = mates(2)
    its.ended = {0}
    assert not its.learners[1].has_lost(0.0)
    with pytest.raises(horovod.HorovodInternalError, match="the leader"):
        its.learners[1].agree(SET)
    with pytest.raises(PeerFailedError, match="the leader"):
        its.learners[1].barrier()


def test_one_that_only_seemed_to_have_ended_raises(mates: Callable[[int], Mates]) -> None:
    its = mates(2)
    its.ended = {1}
    assert its.learners[0].agree(SET) == [1]
    with pytest.raises(horovod.HorovodInternalError, match="counts this learner"):
        its.learners[1].agree(SET)


@pytest.mark.parametrize("n", [2, 3])
def test_barriers_wait_for_the_living(mates: Callable[[int], Mates], n: int) -> None:
    """And the leader's flag is the same for all, however fast the next call comes."""
    its = mates(n)
    its.ended = {n - 1}
    flags = [bool(number % 3) for number in range(40)]

    def act(one: Survivors) -> list[bool]:
        return [one.as_leader(flag and one is its.learners[0]) for flag in flags]

    acts = [lambda one=one: act(one) for one in its.learners[: n - 1]]
    its.learners[0].out()
    assert together(*acts) == [flags] * (n - 1)


def test_a_mate_in_a_barrier_is_told_from_one_that_has_ended_there(
    mates: Callable[[int], Mates],
) -> None:
    its = mates(3)
    its.rows[1:, survivors._MET] = 1
    its.ended = {2}
    assert its.learners[0].awaiting([1, 2]) == [1]
    its.rows[0, survivors._MET] = 1
    assert its.learners[0].awaiting([1, 2]) == []


# ---- what is refused ----------------------------------------------------------------------------

FITTING = {"inner": "torch", "is_over_mpi": False, "is_plain": False}


def test_a_job_that_fits_and_one_without_the_option() -> None:
    require_shrinkable(Config(shrink=1), **FITTING)
    require_shrinkable(Config(shard="auto"), "horovod", True, True)


@pytest.mark.parametrize(
    ("options", "other", "words"),
    [
        ({}, {"inner": "horovod"}, "HVD_ADPSGD_INNER is horovod.*set HVD_ADPSGD_INNER=torch"),
        ({"shard": "auto"}, {}, "HVD_ADPSGD_SHARD is auto.*leave HVD_ADPSGD_SHARD out"),
        ({}, {"is_over_mpi": True}, "MPI joins the processes.*without MPI"),
        ({}, {"is_plain": True}, "there is one super learner.*HVD_ADPSGD_SUPER_LEARNER_SIZE"),
    ],
)
def test_jobs_that_do_not_fit(options: Any, other: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"init\(\): HVD_ADPSGD_SHRINK=1, and {words}"):
        require_shrinkable(Config(shrink=1, **options), **{**FITTING, **other})


def test_an_optimizer_that_fits() -> None:
    for name in ("random_pairs", "fixed_ring", "random_ring"):
        _require_missable(parse(name), True, horovod.Average)
        _require_missable(parse(name), True, horovod.Sum)


@pytest.mark.parametrize(
    ("averaging", "averages", "op", "words"),
    [
        ("random_pairs", False, "Average", "DistributedDataParallel, fully_shard or the script"),
        ("gossip_pga", True, "Average", "averaging=gossip_pga.* is more than gossip.*use random"),
        ("random_pairs", True, "Adasum", "op=Adasum.*leave op out"),
    ],
)
def test_optimizers_that_do_not_fit(averaging: str, averages: bool, op: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"HVD_ADPSGD_SHRINK=1, and {words}"):
        _require_missable(parse(averaging), averages, getattr(horovod, op))


def test_what_needs_all_learners_is_refused_once_one_is_lost() -> None:
    def world(left: int) -> Any:
        inner = SimpleNamespace(Get_size=lambda: left)
        return SimpleNamespace(inner=inner, inner_size=3, super_rank=1)

    require_whole(world(3), "add_param_group")
    with pytest.raises(
        WorldError, match=r"add_param_group: super learner 1 has 2 of its 3 .* Start"
    ):
        require_whole(world(2), "add_param_group")
