"""Chunks that are in one of several exchanges only: each has its turn."""

import re
from collections import Counter

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation.planner import Cluster, job_of
from hvd_adpsgd_lab.simulation.scenario import DEFAULTS, Learner, Scenario, run

MERGED, OVER = re.compile(r"merges chunk (\d+) with"), re.compile(r"exchange \d+ with \d+ is over")


def exchanges(
    chunks: int,
    period: int,
    share: float,
    steps: int = 120,
    strategy: str = "random_pairs",
    n: int = 2,
) -> list[list[int]]:
    """The chunks of each exchange of the first super learner, in the order in which it merges them."""
    learner = Learner(rate=1.0, step_s=0.1, spread=0.1, node_s=0.0, deadline_s=5.0)
    scenario = Scenario(
        seed=1,
        config=DEFAULTS.replace(averaging=strategy, exchange_share=share),
        steps=steps,
        chunks=chunks,
        later=0,
        elements=4,
        dtype="float64",
        latency_s=1e-3,
        jitter=0.1,
        late=0.0,
        bytes_per_s=1e9,
        slack=1.0,
        detect_s=1.0,
        leave_deadline_s=5.0,
        learners=(learner,) * n,
        rare_period=period,
    )
    found: list[list[int]] = [[]]
    for _, process, text in run(scenario, trace=True).story:
        if process == 0 and (merged := MERGED.match(text)):
            found[-1].append(int(merged[1]))
        if process == 0 and OVER.match(text):
            found.append([])
    return found[:-1]


@pytest.mark.parametrize(
    ("chunks", "period"), [(13, 4), (16, 4), (3, 4), (7, 16), (18, 4), (40, 3), (2, 8)]
)
def test_a_whole_exchange_has_all_frequent_chunks_and_a_part_of_the_rare_ones(
    chunks: int, period: int
) -> None:
    rare = set(range(1, chunks, 2))
    each = -(-len(rare) // period)
    moved = exchanges(chunks, period, 1.0)
    assert len(moved) > 50
    for window in moved:
        assert sorted(set(window)) == sorted(window)
        assert set(range(0, chunks, 2)) <= set(window)
        assert len(rare & set(window)) == each
    counts = Counter(chunk for window in moved for chunk in window)
    turns = [counts[chunk] / len(moved) for chunk in sorted(rare)]
    assert min(turns) > 0.8 * each / len(rare)
    assert max(turns) < 2.2 * each / len(rare)
    assert sum(turns) == pytest.approx(each)


@pytest.mark.parametrize("share", [0.5, 0.3, 0.05])
def test_with_a_share_every_chunk_has_its_turn(share: float) -> None:
    chunks, period = 24, 4
    moved = exchanges(chunks, period, share, steps=600)
    assert all(len(set(window)) == len(window) for window in moved)
    counts = Counter(chunk for window in moved for chunk in window)
    assert set(counts) == set(range(chunks))
    frequent = sum(counts[chunk] for chunk in range(0, chunks, 2))
    rare = sum(counts[chunk] for chunk in range(1, chunks, 2))
    assert frequent / rare == pytest.approx(period, rel=0.1)


@pytest.mark.parametrize(
    ("chunks", "period", "share"),
    [
        (8, 4, 1.0),
        (12, 3, 1.0),
        (12, 6, 1.0),
        (24, 2, 0.5),
        (8, 1, 0.5),
        (9, 1, 1 / 3),
        (16, 1, 0.25),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_a_short_schedule_leaves_no_chunk_out(
    chunks: int, period: int, share: float, n: int
) -> None:
    """Windows and peers come in turn; where both cycles have a common divisor, some would never meet."""
    moved = exchanges(chunks, period, share, 400, "fixed_ring", n)
    counts = Counter(chunk for window in moved for chunk in window)
    assert set(counts) == set(range(chunks))
    for kind in (0, 1):  # the frequent ones, and the rare ones
        turns = [counts[chunk] for chunk in range(kind, chunks, 2)]
        assert max(turns) < 2.5 * min(turns)


@pytest.mark.parametrize(("period", "each"), [(1, 8), (4, 2)])
def test_the_distance_counts_rare_chunks_that_an_exchange_has_left_out(
    period: int, each: int
) -> None:
    """Of 8 frequent chunks, 3 apart, and 8 rare ones, 5 apart, four elements each."""
    models = [np.zeros((16, 4)), np.repeat([[3.0], [5.0]] * 8, 4, axis=1)]
    cluster = Cluster(2, 64, 0.1, 1e9, 1e-5)
    rare = (range(1, 16, 2), period) if period > 1 else ((), 1)
    job = job_of(cluster, models, bytes_scale=1.0, rare=rare)
    while not job.loop_of(0).counters()["compared"]:
        job.run_for(0.01)
    counters = job.loop_of(0).counters()
    assert counters["compared"] == 1
    assert counters["chunks"] == 8 + each
    assert counters["square"] == pytest.approx(8 * 4 * 9 + 8 * 4 * 25)
