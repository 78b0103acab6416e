"""Plans never ask oneself, all super learners agree, lock-step matrices keep the mean."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adpsgd import mixing
from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.strategies import (
    STRATEGIES,
    FixedRing,
    Plan,
    RandomPairs,
    RandomRing,
    Synchronous,
    parse,
)

SEEDS = st.integers(0, 2**32 - 1)
ALL = st.one_of(
    st.just(FixedRing()),
    st.just(Synchronous()),
    SEEDS.map(RandomRing),
    SEEDS.map(RandomPairs),
)


@settings(max_examples=30)
@given(ALL, st.integers(1, 17), st.data())
def test_plans_ask_others_in_range(strategy, n, data):
    rank = data.draw(st.integers(0, n - 1))
    plan = strategy.plan(rank, n)
    assert plan.schedule.dtype == np.int32
    assert plan.schedule.flags.c_contiguous
    assert not plan.schedule.flags.writeable
    assert plan.schedule.shape == (plan.rounds, plan.width)
    if n == 1 or strategy == Synchronous():
        assert (plan.width, plan.weight) == (0, 0.0)
        return
    assert plan.schedule.min() >= 0
    assert plan.schedule.max() < n
    assert not (plan.schedule == rank).any()
    assert 0 < plan.weight <= 0.5
    assert all(len(set(row)) == plan.width for row in plan.schedule[:64].tolist())
    assert plan == strategy.plan(rank, n)


@settings(max_examples=150)
@given(ALL, st.integers(1, 17), st.integers(0, 5000))
def test_lock_step_matrices_are_symmetric_and_doubly_stochastic(strategy, n, round_):
    matrix = strategy.mixing_matrix(n, round_)
    assert matrix.shape == (n, n)
    assert matrix.min() >= 0
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-15 * n)
    models = np.random.default_rng(n).normal(size=(n, 7))
    np.testing.assert_allclose((matrix @ models).mean(axis=0), models.mean(axis=0), atol=1e-14)
    assert mixing.consensus_distance(matrix @ models) <= mixing.consensus_distance(models) + 1e-14


@pytest.mark.parametrize("strategy", [FixedRing(), RandomRing(5)])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 9])
def test_ring_plans_of_all_make_the_lock_step_matrix(strategy, n):
    plans = [strategy.plan(rank, n) for rank in range(n)]
    for round_ in (0, 1, plans[0].rounds - 1):
        matrix = np.eye(n)
        for rank, plan in enumerate(plans):
            for partner in plan.schedule[round_ % plan.rounds]:
                matrix[rank, rank] -= plan.weight
                matrix[rank, partner] += plan.weight
        np.testing.assert_allclose(matrix, strategy.mixing_matrix(n, round_), atol=1e-15)


def test_rounds_widths_and_weights():
    shapes = {s.name: s.plan(1, 4).schedule.shape for s in map(parse, STRATEGIES)}
    assert shapes == {
        "random_pairs": (4096, 1),
        "fixed_ring": (1, 2),
        "random_ring": (1024, 2),
        "global_average": (4096, 1),
        "a2cid2": (1, 2),
        **dict.fromkeys(
            ("synchronous", "delay_by_one", "periodic_averaging", "lock_step", "noloco"), (1, 0)
        ),
    }
    assert [FixedRing().plan(0, n).weight for n in (1, 2, 3, 4)] == [0, 1 / 2, 1 / 3, 1 / 3]
    assert [RandomRing().plan(0, n).weight for n in (1, 2, 3, 4)] == [0, 1 / 2, 1 / 3, 1 / 3]
    assert [RandomPairs().plan(0, n).weight for n in (1, 2, 3)] == [0, 1 / 2, 1 / 2]
    assert FixedRing().plan(0, 2).schedule.tolist() == [[1]]
    assert FixedRing().plan(0, 5).schedule.tolist() == [[4, 1]]


def test_random_pairs_over_rounds_reach_everybody():
    n = 6
    total = sum(RandomPairs(1).mixing_matrix(n, round_) for round_ in range(2000)) / 2000
    expected = 0.5 * np.eye(n) + 0.5 * (np.ones((n, n)) - np.eye(n)) / (n - 1)
    np.testing.assert_allclose(total, expected, atol=0.03)


@given(ALL)
def test_spec_is_read_back(strategy):
    again = parse(strategy.spec())
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.spec() == strategy.spec()
    assert eval(repr(strategy)) == strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "strategy", "spec"),
    [
        ("random_pairs", RandomPairs(0), "random_pairs:seed=0"),
        ("random_pairs:seed=3", RandomPairs(3), "random_pairs:seed=3"),
        (" fixed_ring ", FixedRing(), "fixed_ring"),
        ("random_ring: seed = 1", None, None),
        ("random_ring:seed=1", RandomRing(1), "random_ring:seed=1"),
        ("synchronous", Synchronous(), "synchronous"),
    ],
)
def test_parse(text, strategy, spec):
    if strategy is None:
        with pytest.raises(ConfigError, match="seed=<int>"):
            parse(text)
        return
    assert parse(text) == strategy
    assert parse(text).spec() == spec


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        (
            "random_pair",
            "known are random_pairs, fixed_ring, random_ring, .*synchronous.*random_pairs",
        ),
        ("", "Did you mean"),
        ("ring", "fixed_ring"),
        ("fixed_ring:seed=1", "nothing after its name"),
        ("random_pairs:sed=1", "seed=<int>"),
        ("random_pairs:seed=1,seed=2", "each once"),
        ("random_pairs:seed=x", "seed=<int>"),
        ("random_pairs:seed", "seed=<int>"),
        ("random_pairs:seed=-1", ">= 0"),
        ("random_ring:seed=4294967296", "< 4294967296"),
    ],
)
def test_parse_refuses(text, cure):
    with pytest.raises(ConfigError, match=cure):
        parse(text)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", None, True])
@pytest.mark.parametrize("kind", [RandomRing, RandomPairs])
def test_bad_seeds(kind, seed):
    with pytest.raises(ConfigError, match="seed"):
        kind(seed)


def test_seeds_are_plain_and_strategies_frozen():
    strategy = RandomRing(np.uint8(3))
    assert type(strategy.seed) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.seed = 4
    assert RandomRing(3) != RandomRing(4)
    assert RandomRing(3) != RandomPairs(3)


def test_only_synchronous_averages_gradients_globally():
    kinds = {name: kind.averages_gradients_globally for name, kind in STRATEGIES.items()}
    assert [name for name, yes in kinds.items() if yes] == ["synchronous"]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize(("rank", "size"), [(0, 0), (3, 3), (-1, 3)])
def test_plan_of_no_super_learner(name, rank, size):
    with pytest.raises(TopologyError):
        parse(name).plan(rank, size)


@pytest.mark.parametrize(
    ("schedule", "weight"),
    [
        ([1, 2], 0.5),
        (np.empty((0, 1)), 0.5),
        ([[-1]], 0.5),
        ([[1]], 0.0),
        ([[1]], 0.6),
        ([[1]], float("nan")),
        (np.empty((1, 0)), 0.5),
    ],
)
def test_plan_refuses(schedule, weight):
    with pytest.raises(ConfigError, match="Plan got"):
        Plan(np.asarray(schedule), weight)


def test_plan_copies_and_compares():
    table = np.array([[1, 2]], dtype=np.int32)
    plan = Plan(table, 0.5)
    table[0, 0] = 7
    assert plan.schedule.tolist() == [[1, 2]]
    assert plan == Plan([[1, 2]], 0.5)
    assert hash(plan) == hash(Plan([[1, 2]], 0.5))
    assert plan != Plan([[1, 2]], 0.25)
    assert plan != Plan([[1], [2]], 0.5)
    assert plan != "plan"
    assert Plan.nobody().schedule.shape == (1, 0)
