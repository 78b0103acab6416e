"""The positions that a super learner takes in an epoch, and how its learners divide them into steps."""

import bisect
import math

from hvd_adpsgd.data.ranges import Ranges, count


class Steps:
    """The positions of one epoch of a super learner: its leader appends, all its learners read.

    Step t of k learners with g positions each is positions t k g to (t + 1) k g, in the order in which they
    were appended: learner j has the j-th g of them. The last step may be shorter. There each learner has as
    many as the first one: the last position is repeated; with `drops_last` it is left out.

    Attributes:
        number, ended: number of positions appended; whether no more come.
        marks: (number, samples): how many samples the job had made when position `number` was appended.
    """

    def __init__(self, learners: int, each: int, drops_last: bool = False) -> None:
        self.number, self.ended = 0, False
        self.marks: list[tuple[int, int]] = []
        self._learners, self._each, self._drops_last = learners, each, drops_last
        self._ranges: Ranges = []
        self._before: list[int] = []  # number of positions before each range

    def append(self, ranges: Ranges) -> None:
        """Append positions."""
        for start, stop in ranges:
            if self._ranges and self._ranges[-1][1] == start:
                self._ranges[-1] = self._ranges[-1][0], stop
            else:
                self._before.append(self.number)
                self._ranges.append((start, stop))
            self.number += stop - start

    def end(self, step: int) -> Ranges:
        """End before a step; return the positions appended for it and later ones, except dropped ones."""
        first = step * self._learners * self._each
        rest = [] if self.of_step(step, 0) == [] else self.between(first, self.number)
        self.number, self.ended = min(self.number, first), True
        return rest

    def samples(self, step: int) -> int:
        """Return how many samples the job had made when the first position of a step was appended."""
        first = step * self._learners * self._each
        return self.marks[bisect.bisect_right(self.marks, (first, math.inf)) - 1][1]

    def between(self, first: int, end: int) -> Ranges:
        """Return the positions appended as number `first` to `end` - 1."""
        i = max(0, bisect.bisect_right(self._before, first) - 1)
        j = bisect.bisect_left(self._before, end)
        pieces = zip(self._ranges[i:j], self._before[i:j], strict=True)
        cut = [
            (start + max(0, first - before), min(stop, start + end - before))
            for (start, stop), before in pieces
        ]
        return [(start, stop) for start, stop in cut if start < stop]

    def of_step(self, step: int, learner: int) -> Ranges | None:
        """Return the positions of a learner in a step; [] after the last step, None if they are to come."""
        first, each = step * self._learners * self._each, self._each
        left = self.number - first
        if left < self._learners * each:
            if not self.ended:
                return None
            if left <= 0 or self._drops_last:
                return []
            each = -(-left // self._learners)
        ranges = self.between(first + learner * each, first + (learner + 1) * each)
        if missing := each - count(ranges):
            ranges += missing * self.between(self.number - 1, self.number)
        return ranges

    def made(self, first: int, end: int) -> Ranges:
        """Return all positions of the steps `first` to `end` - 1."""
        size = self._learners * self._each
        return self.between(first * size, end * size)
