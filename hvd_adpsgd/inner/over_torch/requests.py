"""Which operations may begin, in which order: the state that the first learner of a super learner keeps.

As in Horovod, each learner announces its operations by name, in any order. An operation begins when every
learner has announced it, and all learners begin operations in the same order. A learner that has called
join() counts as having announced every allreduce, with zeros. This module has neither threads nor sockets.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

JOIN = "join"
_OF_ZEROS = ("allreduce", "barrier")  # operations in which a learner in join() takes part


class Request(NamedTuple):
    """One learner's announcement of an operation.

    Attributes:
        name: name of the operation, the same on all learners.
        kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or join.
        same: what must be equal on all learners: dtypes, shapes, reduction, root.
        own: what may differ: numbers of rows, splits.
    """

    name: str
    kind: str
    same: Any
    own: Any


class Decision(NamedTuple):
    """One operation that all learners begin, or an error that all of them raise.

    Attributes:
        request: the announcement of the first learner that announced it.
        own: by rank, `own` of each learner's announcement; None for a learner in join().
        error: why the operation is refused; "" if it begins.
    """

    request: Request
    own: list[Any]
    error: str = ""


class Order:
    """The announced operations of learners, in the order in which their announcements are complete.

    Args:
        names: ranks in the job of the learners, by rank here, for messages.
    """

    def __init__(self, names: Sequence[int]):
        self._size, self._names = len(names), names
        self._asked: dict[str, dict[int, Request]] = {}
        # numbers of these names, in the order of first announcements
        self._first: dict[str, int] = {}
        self._numbers = itertools.count()
        self._complete: set[str] = set()  # names that every learner has announced, or is in join()
        self._joined: list[int] = []  # ranks, in the order of their calls of join()

    def ask(self, rank: int, request: Request) -> None:
        """Record that learner `rank` announces an operation."""
        if request.kind == JOIN:
            self._joined.append(rank)
            for name in self._asked:
                self._count(name)
        else:
            if request.name not in self._asked:
                self._asked[request.name], self._first[request.name] = {}, next(self._numbers)
            self._asked[request.name][rank] = request
            self._count(request.name)

    def _count(self, name: str) -> None:
        asked = self._asked[name]
        if len(asked) + len(set(self._joined).difference(asked)) == self._size:
            self._complete.add(name)

    def decide(self) -> list[Decision]:
        """Return the operations that every learner has announced, and forget them."""
        complete = sorted(self._complete, key=self._first.pop)
        self._complete.clear()
        decided = [self._decision(self._asked.pop(name)) for name in complete]
        if len(self._joined) == self._size:
            last = Request(JOIN, JOIN, self._joined[-1], None)
            decided.append(Decision(last, [None] * self._size))
            self._joined = []
        return decided

    def waiting(self) -> list[tuple[str, list[int]]]:
        """Return (name, ranks that have not announced it) of each operation that some learners wait for."""
        everyone = set(range(self._size))
        return [
            (name, sorted(everyone - {*asked, *self._joined}))
            for name, asked in self._asked.items()
        ]

    def _decision(self, asked: dict[int, Request]) -> Decision:
        first = asked[min(asked)]
        own = [asked[rank].own if rank in asked else None for rank in range(self._size)]
        return Decision(first, own, self._refusal(first, asked))

    def _refusal(self, first: Request, asked: dict[int, Request]) -> str:
        if self._joined and first.kind not in _OF_ZEROS:
            return (
                f"{first.kind} {first.name!r} while learner {self._names[self._joined[0]]} is in join(): "
                "only allreduce and barrier work then."
            )
        for rank, other in asked.items():
            if (other.kind, other.same) != (first.kind, first.same):
                return (
                    f"{first.name!r} differs between the learners of the super learner: learner "
                    f"{self._names[min(asked)]} calls {_shown(first)}, learner {self._names[rank]} calls "
                    f"{_shown(other)}."
                )
        return ""


def _shown(request: Request) -> str:
    same = request.same if isinstance(request.same, Iterable) else [request.same]
    return f"{request.kind}({', '.join(map(str, same))})"
