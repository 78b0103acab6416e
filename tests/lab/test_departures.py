"""The rule by which news of departures travels, enumerated: does it reach all that stay, in how many hops?

The rule, of ext/hvd_adpsgd/engine/membership.pyx: tell the first peers 1, 2, 4, ... ranks behind that are
there, as far as one knows. The simulator's bound follows: n hops of calm, unless an engine waits for one that
has ended.
"""

import itertools
from collections.abc import Iterator

import pytest


def listeners(own: int, n: int, departed: frozenset[int]) -> Iterator[int]:
    """Whom an engine tells that knows of these departures."""
    distance = 1
    while distance < n:
        ranks = ((own + distance + i) % n for i in range(n))
        first = next((r for r in ranks if r == own or r not in departed), own)
        if first != own:
            yield first
        distance *= 2


def spread(n: int, known: dict[int, frozenset[int]]) -> tuple[dict[int, frozenset[int]], int, bool]:
    """What all know in the end, after how many hops, and whether an engine waits for one that has left."""
    hops = 0
    while True:
        after = dict(known)
        blocked = False
        for own, departed in known.items():
            for peer in listeners(own, n, departed) if departed else ():
                blocked |= peer not in known
                if peer in known:
                    after[peer] |= departed
        if after == known:
            return known, hops, blocked
        known, hops = after, hops + 1


def cases(n: int) -> Iterator[tuple[frozenset[int], dict[int, frozenset[int]]]]:
    """All sets of engines that have left, and all ways in which at least one that stays knows of each."""
    for count in range(1, n - 1):
        for gone in itertools.combinations(range(n), count):
            stay = [i for i in range(n) if i not in gone]
            groups = [g for k in range(1, len(stay) + 1) for g in itertools.combinations(stay, k)]
            for who in itertools.product(groups, repeat=count):
                known = {
                    i: frozenset(d for d, w in zip(gone, who, strict=True) if i in w) for i in stay
                }
                yield frozenset(gone), known


@pytest.mark.parametrize(
    ("n", "stuck"), [(3, 0), (4, 0), (5, 0), pytest.param(6, 27, marks=pytest.mark.extended)]
)
def test_news_reaches_all_that_stay_unless_several_wait_for_those_that_have_left(
    n: int, stuck: int
) -> None:
    """In fewer than n hops. Else engines wait for some that have ended, until the wire reports their ends."""
    waiting = 0
    for gone, known in cases(n):
        found, hops, blocked = spread(n, known)
        assert hops < n
        if blocked:
            assert len(gone) >= 3
            waiting += 1
        else:
            assert all(each == gone for each in found.values())
    assert waiting == stuck
