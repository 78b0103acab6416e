"""Checks, before an operation over all learners, that all learners call the same one with equal arguments."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_adpsgd.collectives.usage import Caller
from hvd_adpsgd.errors import CollectiveMismatchError
from hvd_adpsgd.messaging.attempt import Attempt


class GaveWayError(Exception):
    """Some learners call an operation that yields, others another one; never raised to the user."""


class Call(NamedTuple):
    """One learner's call of an operation over all learners; equal on all learners, except for `private`.

    Attributes:
        kind: name of the operation.
        name: the user's name for the operation.
        tensors: (name, dtype, shape) of each tensor; for an allgather, the shape lacks the first dimension.
        root: rank whose value is sent to all, if the operation has a root.
        op: how a reduction combines the values; None for other operations.
        factors: prescale_factor, postscale_factor.
        private: a value of this learner, not compared with those of the other learners.
        yields: whether the operation gives way to one of another kind that learners call instead.
    """

    kind: str
    name: str | None = None
    tensors: tuple[tuple[str | None, str, tuple[int, ...]], ...] = ()
    root: int | None = None
    op: str | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    private: Any = None
    yields: bool = False


class _Header(NamedTuple):
    """A learner's first message in an operation: its call, a digest of the tensors, the calling line."""

    call: Call
    tensors: int  # number of tensors
    digest: bytes
    caller: str


def compare(attempt: Attempt, call: Call, caller: Caller) -> None:
    """Compare the calls of all learners, and store them in attempt.calls, by rank.

    Raises:
        CollectiveMismatchError: on all learners, if two calls differ.
        GaveWayError: on all learners, if they differ in kind, and those of one kind yield.
    """
    described = hashlib.blake2b(repr(call.tensors).encode(), digest_size=8).digest()
    where = f"{caller.file}:{caller.line}"
    mine = _Header(call._replace(tensors=()), len(call.tensors), described, where)
    headers: list[_Header] = [_Header(Call(*h[0]), *h[1:]) for h in attempt.gather(_plain(mine))]
    first = headers[0]
    if len({h.call.kind for h in headers}) > 1 and any(h.call.yields for h in headers):
        raise GaveWayError
    for i, other in enumerate(headers):
        what = _difference(first, other)
        if what is not None:
            told = attempt.gather(call.tensors) if what == "tensors" else None
            raise _mismatch(what, attempt.ranks, headers, i, told)
    attempt.calls = tuple(header.call for header in headers)


def _plain(header: _Header) -> tuple[Any, ...]:
    """Return the header as builtin tuples, which pickle writes faster than named ones."""
    return (tuple(header.call), *header[1:])


def _difference(first: _Header, other: _Header) -> str | None:
    for what in ("kind", "name", "root", "op", "factors"):
        if getattr(first.call, what) != getattr(other.call, what):
            return what
    if first.tensors != other.tensors:
        return "number of tensors"
    return None if first.digest == other.digest else "tensors"


def _mismatch(
    what: str, ranks: Sequence[int], headers: Sequence[_Header], i: int, tensors: list[Any] | None
) -> CollectiveMismatchError:
    first, other = headers[0], headers[i]
    callers = (
        f"Called at {first.caller} on learner {ranks[0]}, at {other.caller} on learner {ranks[i]}."
    )
    if what == "kind":
        return CollectiveMismatchError(
            f"operations over all learners differ: learner {ranks[0]} is in {first.call.kind}, "
            f"learner {ranks[i]} in {other.call.kind}. {callers} Call the same operations in the same order "
            "on all learners; if several threads call them, one thread at a time."
        )
    if tensors is not None:
        k = next(k for k, (a, b) in enumerate(zip(tensors[0], tensors[i], strict=True)) if a != b)
        what, mine, theirs = f"tensor {k}", _text(tensors[0][k]), _text(tensors[i][k])
    elif what == "number of tensors":
        mine, theirs = str(first.tensors), str(other.tensors)
    else:
        mine, theirs = str(getattr(first.call, what)), str(getattr(other.call, what))
    return CollectiveMismatchError(
        f"{first.call.kind}: {what} differs: {mine} on learner {ranks[0]}, {theirs} on learner {ranks[i]}. "
        f"{callers} Call the same operations in the same order, with equal arguments, on all learners."
    )


def _text(described: tuple[str | None, str, tuple[int, ...]]) -> str:
    name, dtype, shape = described
    return f"{name or 'a tensor'} of {dtype}, shape {list(shape)}"
