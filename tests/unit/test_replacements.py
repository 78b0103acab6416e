"""Which lost super learners are replaced, and where: nothing twice, and nothing that does not fit."""

import pytest

from hvd_adpsgd.joining.candidates import _moved
from hvd_adpsgd.joining.decision import all_switch
from hvd_adpsgd.joining.replacements import is_minority, lost, starters
from hvd_adpsgd.launch.world import Placement


def job(*hosts: int, of: int = 1) -> tuple[list[Placement], list[tuple[int, ...]]]:
    """So many super learners `of` learners on each host."""
    placements: list[Placement] = []
    for n in hosts:
        first = len(placements)
        placements += [Placement(first, f"h{first}", i, n * of) for i in range(n * of)]
    return placements, [tuple(range(i, i + of)) for i in range(0, len(placements), of)]


def without(groups: list[tuple[int, ...]], *numbers: int) -> list[int]:
    return [rank for i, group in enumerate(groups) if i not in numbers for rank in group]


@pytest.mark.parametrize(
    ("hosts", "gone", "left", "expected"),
    [
        ((6,), (1, 2, 3, 4, 5), (), False),  # one host cannot be cut
        ((2, 2, 2), (2, 3), (), False),
        ((2, 2, 2), (0, 1, 2, 3), (), True),
        ((1,) * 6, (0, 1, 2, 4, 5), (), True),
        ((1,) * 6, (0, 1, 2, 4, 5), (0, 1, 2, 4, 5), False),  # they announced the departure
        ((1, 1), (1,), (), False),  # of two halves the first
        ((1, 1), (0,), (), True),
        ((2, 2), (1, 2, 3), (), True),  # the other side has two at most, this one
        ((2, 2), (0, 1, 3), (), True),
    ],
)
def test_the_smaller_side_of_a_cut_is_known(
    hosts: tuple[int, ...], gone: tuple[int, ...], left: tuple[int, ...], expected: bool
) -> None:
    placements, groups = job(*hosts)
    living = without(groups, *gone)
    assert lost(groups, living) == list(gone)
    assert is_minority(placements, groups, living, left) == expected


@pytest.mark.parametrize("hosts", [(2, 1), (1, 1, 1), (3, 3), (2, 2, 1), (1,) * 6])
def test_at_most_one_side_of_a_cut_starts_replacements(hosts: tuple[int, ...]) -> None:
    placements, groups = job(*hosts)
    numbers = sorted({p.host for p in placements})
    for cut in range(2 ** len(numbers)):
        sides = [[h for i, h in enumerate(numbers) if cut >> i & 1 == side] for side in (0, 1)]
        starting = 0
        for side in sides:
            living = [rank for rank, p in enumerate(placements) if p.host in side]
            starting += not is_minority(placements, groups, living, ())
        assert starting == 1


def test_on_its_host_a_replacement_takes_the_slots_of_the_lost_one() -> None:
    placements, groups = job(3, 3, of=2)
    living = without(groups, 1, 4)
    assert starters(placements, groups, living, {}) == {1: 0, 4: 6}
    assert starters(placements, groups, living, {4: 6}) == {1: 0}


@pytest.mark.parametrize(
    ("spare", "expected"), [(0, {}), (1, {}), (2, {2: 0}), (3, {2: 0}), (4, {2: 0, 3: 0})]
)
def test_those_of_a_lost_host_need_spare_slots(spare: int, expected: dict[int, int]) -> None:
    placements, groups = job(2, 2, of=2)
    assert starters(placements, groups, without(groups, 2, 3), {}, spare) == expected


def test_spare_slots_count_what_runs_there_already() -> None:
    placements, groups = job(1, 1, 1, 1)
    assert starters(placements, groups, without(groups, 2, 3), {}, 1) == {2: 0, 3: 1}
    assert starters(placements, groups, without(groups, 2, 3), {2: 0}, 1) == {3: 1}
    there = list(_moved(tuple(placements), groups[2], 0))
    assert there[2] == Placement(0, "h0", 0, 1)
    # 2 runs on the host of 0: what both had is full, and 1 has a host no more
    assert starters(there, groups, without(groups, 1, 3), {}, 1) == {}


def test_on_another_host_it_shares_devices_that_are_there() -> None:
    placements, groups = job(1, 1, of=4)
    smaller = [
        Placement(p.host, p.hostname, p.local_rank, 2) if p.host == 0 else p for p in placements
    ]
    moved = _moved(tuple(smaller), groups[1], 0)
    assert [p.local_rank for p in moved[4:]] == [0, 1, 0, 1]
    assert _moved(moved, groups[1], 1) == moved


def test_members_switch_if_all_have_voted_yes_and_none_was_lost() -> None:
    assert all_switch(True, (3, 1, 0), (0, 1, 3))
    assert not all_switch(False, (0, 1, 3), (0, 1, 3))
    assert not all_switch(True, (0, 3), (0, 1, 3))
