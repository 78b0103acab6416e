"""Which cores the engines of a host have for themselves."""

from __future__ import annotations

import pytest

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.training.cores import NAME, Learner, _listed, plan

ALL = tuple(range(8))


def learners(n: int, threads: int, cores: tuple[int, ...] = ALL, of: int = 1) -> list[Learner]:
    return [Learner(0, cores, threads, i % of == 0) for i in range(n)]


def engines(asked: str, among: list[Learner]) -> list[tuple[int, ...]]:
    return [cores.engine for cores in plan(asked, among)]


def test_auto_takes_cores_that_torch_does_not_need() -> None:
    two = plan("auto", learners(2, 3))
    assert [cores.engine for cores in two] == [(6,), (7,)]
    assert {cores.others for cores in two} == {(0, 1, 2, 3, 4, 5)}


@pytest.mark.parametrize(("n", "threads"), [(1, 8), (2, 4), (7, 1)])
def test_auto_takes_none_where_there_are_too_few(n: int, threads: int) -> None:
    assert plan("auto", learners(n, threads)) == [((), ALL)] * n


def test_only_engines_get_cores() -> None:
    among = learners(4, 1, of=2)
    assert engines("auto", among) == [(6,), (), (7,), ()]
    assert {cores.others for cores in plan("auto", among)} == {(0, 1, 2, 3, 4, 5)}


def test_learners_that_are_bound_have_their_own() -> None:
    among = [Learner(0, (0, 1), 1, True), Learner(0, (2, 3), 1, True), Learner(0, (4,), 1, True)]
    assert plan("auto", among) == [((1,), (0,)), ((3,), (2,)), ((), (4,))]


def test_each_host_by_itself() -> None:
    among = [Learner(0, (0, 1), 1, True), Learner(1, (0, 1), 2, True)]
    assert plan("auto", among) == [((1,), (0,)), ((), (0, 1))]
    assert engines("1", among) == [(1,), (1,)]


def test_cores_that_are_given_go_round() -> None:
    assert engines("2,5-6", learners(4, 2)) == [(2,), (5,), (6,), (2,)]
    assert plan("2,5-6", learners(1, 2))[0].others == (0, 1, 3, 4, 7)


@pytest.mark.parametrize("asked", ["", "x", "1-", "-1", "1,,2", "automatic"])
def test_what_is_no_list_of_cores(asked: str) -> None:
    with pytest.raises(ConfigError, match="allowed are auto, and cores as 3 or 2,5-7"):
        plan(asked, learners(1, 1))


def test_a_range_that_goes_down_holds_no_core() -> None:
    with pytest.raises(ConfigError, match="1-0 names no core"):
        plan("2,1-0", learners(1, 1))


def test_a_learner_keeps_a_core() -> None:
    with pytest.raises(ConfigError, match="may use cores 0,1 only, and the engines would take"):
        plan("0-3", learners(1, 1, (0, 1)))


@pytest.mark.parametrize("text", ["0-99999999", "1-0", "3,7-5", "9" * 5000, "²"])
def test_cores_that_no_host_has_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match=NAME):
        _listed(text)
