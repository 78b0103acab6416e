"""Half of the windows are where two models differ most, the others give each chunk its turn."""

import time

import numpy as np

from tests.members import DEADLINE_S, Member, come_to_rest, connect_all

ELEMENTS = 8 * 1024  # 8 chunks, an exchange moves one
APART = 5  # the chunk that local updates change most
WINDOWS = 80


def windows_of(aims: bool) -> tuple[list[int], dict, dict]:
    """The first of two engines asks: the chunks of its windows; its counters, and the other one's."""
    pair = [Member(rank, ELEMENTS, rate=0.0, aims=aims) for rank in (0, 1)]
    asks, moved = pair[0], []
    chunks = asks.chunks
    for member in pair:
        member.loop.move_share(1 / chunks)
        member.loop.start()
    ends = time.monotonic() + DEADLINE_S
    while len(moved) < WINDOWS:
        for member in pair:
            member.model.model += 1e-3 * (-1) ** member.rank
            member.model.model[1024 * APART : 1024 * (APART + 1)] += 1.0 * (-1) ** member.rank
            member.step()
        marks = np.zeros(chunks, np.uint8)
        asks.loop.mark_next(marks)
        moved += np.flatnonzero(marks).tolist()
        asks.loop.ask(1)
        while asks.loop.finished() < len(moved):
            connect_all(pair)
            assert time.monotonic() < ends, asks.loop.view()
    return moved, *come_to_rest(pair)


def test_half_of_the_windows_are_where_the_models_differ_most() -> None:
    moved, *counters = windows_of(True)
    counts = np.bincount(moved[9:], minlength=8)  # the first nine have shown where
    assert counts.argmax() == APART
    assert counts[APART] > 0.35 * counts.sum(), counts
    assert counts.min() > 0, counts
    for found in counters:  # on both sides
        exchanges = found["exchanges_active"] + found["exchanges_passive"]
        assert 0 < found["compared"] < 0.8 * exchanges, (
            "aimed windows are no sample of the distance"
        )


def test_else_each_chunk_has_its_turn() -> None:
    moved, *counters = windows_of(False)
    counts = np.bincount(moved, minlength=8)
    assert counts.max() - counts.min() <= 2, counts
    for found in counters:
        assert found["compared"] == found["exchanges_active"] + found["exchanges_passive"]
