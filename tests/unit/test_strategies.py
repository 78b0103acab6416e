"""Plans never ask oneself, all super learners agree, lock-step matrices keep the mean."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.strategies import (
    STRATEGIES,
    A2CiD2,
    DelayByOne,
    DelayedGradients,
    FixedRing,
    GASLoC,
    GossipPGA,
    NoLoCo,
    PeriodicAveraging,
    Plan,
    RandomPairs,
    RandomRing,
    Rounds,
    Synchronous,
    SynchronousGossip,
    parse,
    same,
)
from hvd_adpsgd.strategies.plan import AFTER, DURING, NOBODY
from tests.theorems import mixing_matrix

SEEDS = st.integers(0, 2**32 - 1)
PERIODS = st.integers(1, 1000)
MOMENTA = st.floats(0, 1, exclude_max=True)
RATES = st.floats(0, 10, exclude_min=True, exclude_max=True)
GOSSIP = st.one_of(st.just(FixedRing()), SEEDS.map(RandomRing), SEEDS.map(RandomPairs))
ALL = st.one_of(
    GOSSIP,
    st.just(Synchronous()),
    st.just(A2CiD2()),
    st.sampled_from([DelayByOne(), DelayedGradients()]),
    st.builds(PeriodicAveraging, PERIODS, MOMENTA, RATES, st.booleans()),
    st.builds(GossipPGA, PERIODS, GOSSIP),
    st.builds(GASLoC, PERIODS, RATES, MOMENTA, GOSSIP),
    st.builds(SynchronousGossip, st.sampled_from([DURING, AFTER]), GOSSIP),
    st.builds(NoLoCo, PERIODS, RATES, MOMENTA, SEEDS),
)
KINDS = (FixedRing, RandomRing, RandomPairs)
IN_PAIRS = (SynchronousGossip, NoLoCo)
TOO_FEW = {A2CiD2: (2, 3)}  # super learners


@given(ALL, st.integers(1, 17), st.data())
def test_plans_ask_others_in_range(strategy, n, data):
    rank = data.draw(st.integers(0, n - 1))
    if n in TOO_FEW.get(type(strategy), ()):
        with pytest.raises(ConfigError, match="nothing to accelerate"):
            strategy.plan(rank, n)
        return
    plan = strategy.plan(rank, n)
    assert plan is strategy.plan(rank, n)
    assert plan.schedule.dtype == np.int32 and plan.schedule.flags.c_contiguous
    assert not plan.schedule.flags.writeable
    assert plan.schedule.shape == (plan.rounds, plan.width)
    if n > 1 and isinstance(strategy, IN_PAIRS):
        assert plan.width == 0
        assert 0 < plan.weight <= 0.5
        require_rounds_of_pairs(plan, rank, n)
        return
    if n == 1 or not isinstance(
        strategy, FixedRing | RandomRing | RandomPairs | A2CiD2 | GossipPGA | GASLoC
    ):
        assert (plan.width, plan.weight) == (0, 0.0)
        return
    assert plan.schedule.min() >= 0
    assert plan.schedule.max() < n
    assert not (plan.schedule == rank).any()
    assert 0 < plan.weight <= 0.5
    assert all(len(set(row)) == plan.width for row in plan.schedule[:64].tolist())


def require_rounds_of_pairs(plan, rank, n):
    table = plan.in_step.peers
    assert table.dtype == np.int32
    assert not table.flags.writeable
    assert table.shape[1] == 2
    assert table.min() >= NOBODY
    assert table.max() < n
    assert not (table == rank).any()


@pytest.mark.parametrize("of", [FixedRing(), RandomRing(3), RandomPairs(4)])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_rounds_in_lock_step_make_the_matrix(of, n):
    """Who asks whom is known on both sides, and the exchanges together are T."""
    plans = [SynchronousGossip(AFTER, of).plan(rank, n) for rank in range(n)]
    for round_ in (0, 1, 1023, 1024):
        matrix = np.eye(n)
        for rank, plan in enumerate(plans):
            asked, asker = plan.in_step.row(round_)
            if asked != NOBODY:
                assert plans[asked].in_step.row(round_)[1] == rank
                matrix[rank, rank] -= plan.weight
                matrix[asked, asked] -= plan.weight
                matrix[rank, asked] += plan.weight
                matrix[asked, rank] += plan.weight
            if asker != NOBODY:
                assert plans[asker].in_step.row(round_)[0] == rank
        np.testing.assert_allclose(
            matrix, mixing_matrix(SynchronousGossip(AFTER, of), n, round_), atol=1e-15
        )


def test_what_is_done_in_step():
    """Who with whom, when, and what each does then to its own model."""
    plans = {spec: parse(spec).plan(0, 4) for spec in SCHEDULED}
    assert {spec: (p.in_step.period, p.in_step.order) for spec, p in plans.items()} == SCHEDULED
    paired = [spec for spec, p in plans.items() if p.in_step.peers is not None]
    assert paired == ["synchronous_gossip", "synchronous_gossip:order=atc+random_pairs", "noloco"]
    rules = {spec: p.rule for spec, p in plans.items() if p.rule is not None}
    ruled = ("delayed_gradients", "noloco", *(spec for spec in SCHEDULED if ":block_" in spec))
    assert rules == {spec: parse(spec) for spec in ruled}
    for name in ("random_pairs", "fixed_ring", "random_ring", "synchronous", "a2cid2"):
        assert parse(name).plan(0, 4).in_step is None


SCHEDULED = {
    "delay_by_one": (1, DURING),
    "delayed_gradients": (1, DURING),
    "periodic_averaging": (10, AFTER),
    "periodic_averaging:block_momentum=0.75,nesterov=1": (10, AFTER),
    "periodic_averaging:block_rate=0.5": (10, AFTER),
    "gossip_pga:period=7+fixed_ring": (7, AFTER),
    "synchronous_gossip": (1, DURING),
    "synchronous_gossip:order=atc+random_pairs": (1, AFTER),
    "noloco": (50, AFTER),
}


@pytest.mark.parametrize("strategy", [FixedRing(), RandomRing(5)])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 9])
def test_ring_plans_of_all_make_the_lock_step_matrix(strategy, n):
    plans = [strategy.plan(rank, n) for rank in range(n)]
    for round_ in (0, 1, plans[0].rounds - 1):
        matrix = np.eye(n)
        for rank, plan in enumerate(plans):
            for peer in plan.schedule[round_ % plan.rounds]:
                matrix[rank, rank] -= plan.weight
                matrix[rank, peer] += plan.weight
        np.testing.assert_allclose(matrix, mixing_matrix(strategy, n, round_), atol=1e-15)


def test_rounds_widths_and_weights():
    shapes = {s.name: s.plan(1, 4).schedule.shape for s in map(parse, STRATEGIES)}
    assert shapes == {
        "random_pairs": (4096, 1),
        "fixed_ring": (1, 2),
        "random_ring": (1024, 2),
        "gossip_pga": (4096, 1),
        "a2cid2": (1, 2),
        "gasloc": (4096, 1),
        **dict.fromkeys(
            "synchronous delay_by_one delayed_gradients periodic_averaging synchronous_gossip noloco".split(),
            (1, 0),
        ),
    }
    assert [FixedRing().plan(0, n).weight for n in (1, 2, 3, 4)] == [0, 1 / 2, 1 / 3, 1 / 3]
    assert [RandomRing().plan(0, n).weight for n in (1, 2, 3, 4)] == [0, 1 / 2, 1 / 3, 1 / 3]
    assert [RandomPairs().plan(0, n).weight for n in (1, 2, 3)] == [0, 1 / 2, 1 / 2]
    assert FixedRing().plan(0, 2).schedule.tolist() == [[1]]
    assert FixedRing().plan(0, 5).schedule.tolist() == [[4, 1]]


def test_random_pairs_over_rounds_reach_everybody():
    n = 6
    total = sum(mixing_matrix(RandomPairs(1), n, round_) for round_ in range(2000)) / 2000
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


SPECS = {  # as it may be written: the strategy, and how it writes itself
    "random_pairs": (RandomPairs(0), "random_pairs:seed=0,prefer_fast=0.0"),
    "random_pairs:seed=3": (RandomPairs(3), "random_pairs:seed=3,prefer_fast=0.0"),
    " fixed_ring ": (FixedRing(), "fixed_ring"),
    "random_ring:seed=1": (RandomRing(1), "random_ring:seed=1,prefer_fast=0.0"),
    "synchronous": (Synchronous(), "synchronous"),
    "delay_by_one": (DelayByOne(), "delay_by_one"),
    "delayed_gradients": (DelayedGradients(), "delayed_gradients"),
    "periodic_averaging:period=20,nesterov=True": (
        PeriodicAveraging(20, nesterov=True),
        "periodic_averaging:period=20,block_momentum=0.0,block_rate=1.0,nesterov=1,warm_up=0",
    ),
    "synchronous_gossip": (SynchronousGossip(), "synchronous_gossip:order=awc+fixed_ring"),
    "synchronous_gossip:order=atc + random_pairs:seed=2": (
        SynchronousGossip(AFTER, RandomPairs(2)),
        "synchronous_gossip:order=atc+random_pairs:seed=2,prefer_fast=0.0",
    ),
    "a2cid2": (A2CiD2(), "a2cid2+fixed_ring"),
    "gossip_pga:period=5+random_ring:seed=1": (
        GossipPGA(5, RandomRing(1)),
        "gossip_pga:period=5+random_ring:seed=1,prefer_fast=0.0",
    ),
    "gasloc:period=9,rate=1,momentum=0+fixed_ring": (
        GASLoC(9, 1.0, 0.0, FixedRing()),
        "gasloc:period=9,rate=1.0,momentum=0.0+fixed_ring",
    ),
    "noloco:period=3": (NoLoCo(3), "noloco:period=3,rate=0.7,momentum=0.5,seed=0"),
}


@pytest.mark.parametrize("text", SPECS)
def test_parse(text):
    strategy, spec = SPECS[text]
    assert parse(text) == strategy
    assert parse(text).spec() == spec


REFUSED = """
random_pair | known are random_pairs, fixed_ring, random_ring, .*synchronous.*random_pairs
| Did you mean
ring | fixed_ring
random_pairs:sed=1 | seed=<int>
random_pairs:seed=1,seed=2 | each once
random_pairs:seed | seed=<int>
random_pairs:seed=-1 | >= 0
random_ring:seed=4294967296 | < 4294967296
random_pairs+fixed_ring | random_pairs in averaging spec .* not on top of another
noloco+fixed_ring | Put it last
synchronous_gossip+ | Did you mean
synchronous_gossip+rings | fixed_ring
synchronous_gossip:order=act | bad order .*'awc'.*'atc'
synchronous_gossip:base=fixed_ring | order=<str>
synchronous_gossip+synchronous | on top of gossip, not of 'synchronous'
gossip_pga:period=2+gossip_pga:period=3 | on top of gossip
gossip_pga:period=0 | period.*int >= 1
a2cid2+random_pairs | sparse graphs.*all pairs
delay_by_one:reading=a | no arguments
periodic_averaging:period=1.5 | period=<int>
periodic_averaging:warm_up=-1 | warm_up.*>= 0
periodic_averaging:block_momentum=1 | block_momentum.*< 1
periodic_averaging:block_rate=0 | block_rate.*> 0
periodic_averaging:nesterov=yes | nesterov=<bool>
noloco:rate=inf | rate
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_parse_refuses(line):
    text, _, cure = line.partition("| ")
    with pytest.raises(ConfigError, match=cure):
        parse(text.removesuffix(" "))


def test_equal_numbers_give_equal_specs():
    for whole, real in ((0, 0.0), (np.float32(0.5), 0.5)):
        assert PeriodicAveraging(2, block_momentum=whole).spec() == (
            PeriodicAveraging(2, block_momentum=real).spec()
        )
    assert PeriodicAveraging(2, block_rate=1).spec() == PeriodicAveraging(2).spec()
    assert NoLoCo(rate=1, momentum=0).spec() == NoLoCo(rate=1.0, momentum=0.0).spec()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", None, True])
@pytest.mark.parametrize("kind", [RandomRing, RandomPairs])
def test_bad_seeds(kind, seed):
    with pytest.raises(ConfigError, match="seed"):
        kind(seed)


def test_seeds_are_plain():
    assert type(RandomRing(np.uint8(3)).seed) is int
    assert RandomRing(3) != RandomPairs(3)


def test_what_others_must_know_of_a_strategy():
    averages = {name: kind.averages for name, kind in STRATEGIES.items()}
    others = {name: what for name, what in averages.items() if what != "models"}
    assert others == {"synchronous": "nothing", "delayed_gradients": "gradients"}
    assert {n for n, kind in STRATEGIES.items() if kind.is_gossip} == {s.name for s in KINDS}
    for n in (2, 3, 8):
        for strategy in map(parse, STRATEGIES):
            if n > 3 or strategy.name != "a2cid2":
                assert strategy.plan(0, n).weight == strategy.pair_weight(n)
    with pytest.raises(
        ConfigError, match=r"op=Adasum with averaging=delayed_gradients: .*delay_by_one"
    ):
        DelayedGradients().refuse("op=Adasum")
    assert DelayByOne().refuse("op=Adasum") is None


def test_a_strategy_is_read_and_planned_once(monkeypatch):
    drawn = []
    monkeypatch.setattr(RandomRing, "_plan", lambda self, rank, n: drawn.append((rank, n)))
    for _ in range(3):
        parse("random_ring:seed=77").plan(1, 4)
        RandomRing(77).plan(1, 4)
    assert drawn == [(1, 4)]
    assert parse("random_ring:seed=77") is parse("random_ring:seed=77")


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize(("rank", "size"), [(0, 0), (3, 3), (-1, 3)])
def test_plan_of_no_super_learner(name, rank, size):
    with pytest.raises(TopologyError):
        parse(name).plan(rank, size)


@pytest.mark.parametrize(
    ("schedule", "weight"),
    [
        ([1, 2], 0.5),
        ([[-1]], 0.5),
        ([[1]], 0.0),
        ([[1]], float("nan")),
        (np.empty((1, 0)), 0.6),
    ],
)
def test_plan_refuses(schedule, weight):
    with pytest.raises(ConfigError, match="Plan got"):
        Plan(np.asarray(schedule), weight)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, AFTER, None), "period 0"),
        ((1, "later", None), "order 'later'"),
        ((2, DURING, None), "one step later"),
        ((1, AFTER, np.empty((0, 2))), "peers of shape"),
        ((1, AFTER, [1, 2]), "peers of shape"),
    ],
)
def test_rounds_refuse(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Rounds(*arguments)


def test_plans_and_rounds_copy_and_repeat():
    table = np.array([[1, 2]], dtype=np.int32)
    plan = Plan(table, 0.5)
    table[0, 0] = 7
    assert plan.schedule.tolist() == [[1, 2]]
    table = np.array([[1, NOBODY], [NOBODY, 2]], dtype=np.int32)
    rounds = Rounds(3, AFTER, table)
    table[0, 0] = 7
    assert [rounds.row(r) for r in (0, 1, 2)] == [(1, NOBODY), (NOBODY, 2), (1, NOBODY)]
    assert [step for step in range(9) if Rounds(2, warm_up=4).is_due(step)] == [5, 7]


@pytest.mark.parametrize(
    ("in_step", "weight"),
    [(Rounds(1, AFTER, [[1, 0]]), 0.0), (Rounds(1, AFTER, [[1, 0]]), 0.6), (Rounds(), -0.5)],
)
def test_weights_of_rounds_are_those_of_pairs(in_step, weight):
    with pytest.raises(ConfigError, match="bad weight"):
        Plan.nobody(in_step, weight)


@pytest.mark.parametrize("name", ["delay_by_one", "periodic_averaging", "synchronous"])
def test_rounds_of_pairs_only_where_there_are_pairs(name):
    with pytest.raises(ConfigError, match="no rounds of pairs"):
        parse(name).round_peers(4, 0, 0)


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: SynchronousGossip(AFTER, "fixed_ring"), "bad base.*'fixed_ring'"),
        (lambda: GossipPGA(3, None), "None, allowed is a strategy"),
        (lambda: PeriodicAveraging(True), "period"),
        (lambda: PeriodicAveraging(2, "0.5"), "block_momentum"),
        (lambda: PeriodicAveraging(2, nesterov="no"), "nesterov.*True and False"),
        (lambda: NoLoCo(rate=True), "rate"),
    ],
)
def test_arguments_of_the_wrong_kind(make, cure):
    with pytest.raises(ConfigError, match=cure):
        make()


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (  # as written before there was warm_up
            "periodic_averaging:period=10,block_momentum=0.5,block_rate=1.0,nesterov=0",
            PeriodicAveraging(10, block_momentum=0.5).spec(),
            True,
        ),
        ("periodic_averaging:warm_up=1", "periodic_averaging", False),
        ("synchronous_gossip:order=atc", "synchronous_gossip:order=awc", False),
        ("mine", "mine", True),
        ("mine", "fixed_ring", False),
        ("None", "fixed_ring", False),
    ],
)
def test_specs_are_the_same_if_their_strategies_are(one: str, other: str, equal: bool) -> None:
    assert same(one, other) == equal
    assert same(other, one) == equal


@pytest.mark.parametrize("strategy", [RandomPairs, RandomRing])
def test_fast_peers_are_preferred_by_plain_gossip_alone(strategy):
    assert strategy(prefer_fast=0.95).plan(1, 4).prefer_fast == 0.95
    assert parse(f"{strategy.name}:prefer_fast=0.5") == strategy(prefer_fast=0.5)
    for bad in (-0.1, 0.951, math.nan, True):
        with pytest.raises(ConfigError, match=r"bad prefer_fast .* allowed is number >= 0"):
            strategy(prefer_fast=bad)
    for above in (GossipPGA, GASLoC, SynchronousGossip):
        with pytest.raises(ConfigError, match="only plain gossip prefers fast peers"):
            above(base=strategy(prefer_fast=0.5))
