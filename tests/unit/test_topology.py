"""Rings, matchings and random peers, against enumeration and counts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.theory import topology
from tests.theorems import ring_edges

SIZES = st.integers(1, 17)
SEEDS = st.integers(0, 2**32 - 1)
ROUNDS = st.integers(0, 10_000)


@given(SIZES)
def test_ring_neighbours_are_the_ring_edges(n):
    edges = ring_edges(n)
    for i in range(n):
        by_edges = [j for edge in edges if i in edge for j in edge if j != i]
        assert sorted(topology.ring_neighbours(n, i)) == sorted(by_edges)


@given(SIZES, SEEDS, ROUNDS)
def test_permuted_neighbours_are_mutual_and_form_one_ring(n, seed, round_):
    table = [topology.permuted_ring_neighbours(n, i, seed, round_) for i in range(n)]
    for i, mine in enumerate(table):
        assert len(set(mine)) == len(mine) == min(n - 1, 2)
        assert all(i in table[j] and j != i for j in mine)
    seen, at = {0}, 0
    while fresh := [j for j in table[at] if j not in seen]:
        at = fresh[0]
        seen.add(at)
    assert seen == set(range(n))


@given(SIZES, SEEDS, ROUNDS)
def test_perfect_matching_is_mutual_and_leaves_out_at_most_one(n, seed, round_):
    peers = topology.perfect_matching(n, seed, round_)
    assert peers.count(None) == n % 2
    assert all(peers[j] == i != j for i, j in enumerate(peers) if j is not None)


@given(st.integers(2, 17), SEEDS, st.data())
def test_random_partners_are_others_in_range(n, seed, data):
    i = data.draw(st.integers(0, n - 1))
    peers = topology.random_partners(n, i, seed, 257)
    assert peers.dtype == np.int32
    assert peers.shape == (257,)
    assert peers.min() >= 0
    assert peers.max() < n
    assert not (peers == i).any()


@pytest.mark.parametrize("i", [0, 2, 4])
def test_random_partners_are_uniform(i):
    counts = np.bincount(topology.random_partners(5, i, 7, 40_000), minlength=5)
    assert counts[i] == 0
    others = np.delete(counts, i)
    assert np.abs(others - 10_000).max() < 5 * np.sqrt(40_000 * 0.25 * 0.75)


def test_ring_order_is_uniform_over_rounds():
    counts = Counter(tuple(topology.ring_order(3, 11, round_)) for round_ in range(6000))
    assert len(counts) == 6
    assert max(abs(c - 1000) for c in counts.values()) < 5 * np.sqrt(6000 / 6 * 5 / 6)


def test_the_same_seed_says_the_same_and_others_differ():
    draw = topology.ring_order
    assert np.array_equal(draw(17, 3, 5), draw(17, 3, 5))
    assert not np.array_equal(draw(17, 3, 5), draw(17, 3, 6))
    assert not np.array_equal(draw(17, 3, 5), draw(17, 4, 5))
    tables = [tuple(topology.random_partners(9, i, 3, 64)) for i in range(9)]
    assert len(set(tables)) == 9
