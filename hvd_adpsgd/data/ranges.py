"""Sets of positions of all epochs: disjoint pairs (start, stop). Position i of epoch e is EPOCH * e + i."""

from bisect import bisect_left
from collections.abc import Iterable

EPOCH = 2**48
Ranges = list[tuple[int, int]]


def merged(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of sets of positions, sorted."""
    union: Ranges = []
    for ranges in sets:
        add(union, ranges)
    return union


def add(union: Ranges, ranges: Iterable[tuple[int, int]]) -> int:
    """Add positions to a sorted set of them, in place; return how many it did not have."""
    added = 0
    for start, stop in ranges:
        if start >= stop:
            continue
        i, j = bisect_left(union, (start, 0)), bisect_left(union, (stop + 1, 0))
        i -= i > 0 and union[i - 1][1] >= start
        if i < j:
            start, stop = min(start, union[i][0]), max(stop, union[j - 1][1])
        added += stop - start - count(union[i:j])
        union[i:j] = [(start, stop)]
    return added


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return the positions of `ranges` that are not in `taken`, which is sorted."""
    left: Ranges = []
    for start, stop in ranges:
        for a, b in taken:
            if a < stop and b > start:
                left.append((start, a))
                start = max(start, b)
        left.append((start, stop))
    return [(start, stop) for start, stop in left if start < stop]


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in ranges)


def split(ranges: Ranges, number: int) -> tuple[Ranges, Ranges]:
    """Return the first `number` positions of `ranges`, in their order, and the rest."""
    for i, (start, stop) in enumerate(ranges):
        if stop - start > number:
            cut = start + number
            return [*ranges[:i], (start, cut)][: i + (number > 0)], [(cut, stop), *ranges[i + 1 :]]
        number -= stop - start
    return ranges, []
