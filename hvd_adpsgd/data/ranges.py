"""Sets of positions of all epochs: disjoint pairs (start, stop). Position i of epoch e is EPOCH * e + i."""

from collections.abc import Iterable

EPOCH = 2**48
Ranges = list[tuple[int, int]]


def merged(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of sets of positions, sorted."""
    union: Ranges = []
    for start, stop in sorted(pair for ranges in sets for pair in ranges):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        elif start < stop:
            union.append((start, stop))
    return union


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
