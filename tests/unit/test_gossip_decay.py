"""Gossip in continuous time against brute force: integration, Kronecker products, simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError, TopologyError
from hvd_adpsgd.theory import gossip, topology
from tests.theorems import complete_edges, complete_event_contraction, pair_matrix


def star(n):
    return [(0, i) for i in range(1, n)]


def path(n):
    return [(i, i + 1) for i in range(n - 1)]


def exponential(n):
    """Neighbours at distances 1, 2, 4, ...: circulant and not complete."""
    pairs = ((i, (i + 2**k) % n) for i in range(n) for k in range(n.bit_length() - 1))
    return sorted({tuple(sorted(pair)) for pair in pairs})


GRAPHS = {
    "ring": topology.ring_edges,
    "complete": complete_edges,
    "star": star,
    "path": path,
    "exponential": exponential,
}


def acceleration_gain(n, edges):
    """How many times faster squared disagreement decays with A2CiD2."""
    fast = gossip.gossip_decay(n, edges, gossip.acceleration(n, edges))
    return fast / gossip.gossip_decay(n, edges)


# ---- gossip, plain and accelerated


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["ring", "complete"])
def test_laplacian_of_regular_graphs(n, name):
    edges = GRAPHS[name](n)
    neighbours = np.zeros((n, n))
    for i, j in edges:
        neighbours[i, j] = neighbours[j, i] = 1
    uniform = neighbours / neighbours.sum(axis=1)
    np.testing.assert_allclose(
        gossip.laplacian(n, edges, 1.7), 1.7 * (np.eye(n) - uniform), atol=1e-15
    )


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_laplacian_counts_one_exchange_each(name):
    """On average over the learners, at `rate`; and half of it is the drift of the mean model."""
    n, rate, generator = 6, 0.8, np.random.default_rng(1)
    edges = GRAPHS[name](n)
    pull = gossip.laplacian(n, edges, rate)
    assert np.trace(pull) / n == pytest.approx(rate)
    neighbours = [[j for e in edges for j in e if i in e and j != i] for i in range(n)]
    drawn, draws = np.zeros((n, n)), 20000
    for i in generator.integers(0, n, size=draws):
        drawn += pair_matrix(n, i, generator.choice(neighbours[i])) - np.eye(n)
    # n learners, each asking at rate / 2: so many exchanges per unit of time
    np.testing.assert_allclose(-0.5 * pull, drawn / draws * n * rate / 2, atol=0.02)


@pytest.mark.parametrize(
    ("n", "eta", "alpha_tilde", "chi1", "gain"),
    [(8, 0.2893, 0.988, 3.41, 2.2), (16, 0.1425, 1.872, 13.1, 5.6), (32, 0.0704, 3.665, 52, 17),
     (64, 0.0350, 7.262, 208, 60)],
)  # fmt: skip
def test_acceleration_table_of_the_ring(n, eta, alpha_tilde, chi1, gain):
    constants = gossip.acceleration(n, topology.ring_edges(n))
    assert constants.eta == pytest.approx(eta, abs=5e-5)
    assert constants.alpha_tilde == pytest.approx(alpha_tilde, abs=5e-4)
    assert constants.chi1 == pytest.approx(chi1, rel=5e-3)
    assert constants.chi2 == pytest.approx(1 - 1 / n)  # resistance of n - 1 edges beside one
    assert gossip.drift_gain(constants) == pytest.approx(gain, rel=0.03)


@given(st.integers(2, 9), st.sampled_from(sorted(GRAPHS)), st.floats(0.1, 10))
def test_acceleration_by_the_pseudoinverse(n, name, rate):
    edges = GRAPHS[name](n)
    pull = gossip.laplacian(n, edges, rate)
    resistances = [edge @ np.linalg.pinv(pull) @ edge
                   for edge in (np.eye(n)[i] - np.eye(n)[j] for i, j in edges)]  # fmt: skip
    chi1, chi2 = 1 / np.sort(np.linalg.eigvalsh(pull))[1], max(resistances) / 2
    got = gossip.acceleration(n, edges, rate)
    expected = (chi1, chi2, 1 / (2 * (chi1 * chi2) ** 0.5), 0.5 * (chi1 / chi2) ** 0.5)
    np.testing.assert_allclose((got.chi1, got.chi2, got.eta, got.alpha_tilde), expected, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_nothing_to_accelerate_on_complete_graphs(n):
    edges = complete_edges(n)
    assert acceleration_gain(n, edges) == pytest.approx(1)
    with pytest.raises(ConfigError, match=r"nothing to accelerate: among \d+ .* chi1 > chi2"):
        gossip.require_acceleration(n, edges)


@pytest.mark.parametrize("name", ["ring", "star", "path", "exponential"])
def test_something_to_accelerate_elsewhere(name):
    edges = GRAPHS[name](6)
    assert gossip.require_acceleration(6, edges) == gossip.acceleration(6, edges)
    assert acceleration_gain(6, edges) > 1


def test_drift_gain_by_integration():
    """Expected models under a constant drift, plain and accelerated, until they rest."""
    n, dt = 5, 0.05
    edges = topology.ring_edges(n)
    constants, pull = gossip.acceleration(n, edges), gossip.laplacian(n, edges)
    drift = np.array([1.0, -2.0, 0.5, 1.5, -1.0])
    plain, fast, shadow = np.zeros(n), np.zeros(n), np.zeros(n)
    for _ in range(4000):
        plain = plain + dt * (drift - 0.5 * pull @ plain)
        moved = constants.eta * (shadow - fast)
        pulled = pull @ fast
        fast, shadow = (
            fast + dt * (moved + drift - 0.5 * pulled),
            shadow + dt * (-moved + drift - constants.alpha_tilde * pulled),
        )
    assert np.sum(plain**2) / np.sum(fast**2) == pytest.approx(gossip.drift_gain(constants))


def kronecker_decay(n, edges, eta, weights):
    """Decay from the moments of z = (x, xt) in a basis of disagreement, as one Kronecker matrix."""
    basis = np.linalg.qr(np.hstack([np.ones((n, 1)), np.eye(n)[:, : n - 1]]))[0][:, 1:]
    size, copies = len(weights) * (n - 1), len(weights)
    coupling = eta * (np.ones((copies, copies)) - copies * np.eye(copies))
    drift, one = np.kron(coupling, np.eye(n - 1)), np.eye(size)
    system = np.kron(drift, one) + np.kron(one, drift)
    degrees = np.bincount(np.ravel(edges), minlength=n)
    for i, j in edges:
        edge = basis.T @ (np.eye(n)[i] - np.eye(n)[j])
        from_first = np.outer(weights, np.eye(copies)[0])
        jump = one - np.kron(from_first, np.outer(edge, edge))
        system += 0.5 * (1 / degrees[i] + 1 / degrees[j]) * (np.kron(jump, jump) - np.eye(size**2))
    return -np.linalg.eigvals(system).real.max()


@pytest.mark.parametrize("n", [2, 3, 5, 6])
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_decay_by_the_kronecker_product(n, name):
    edges = GRAPHS[name](n)
    constants = gossip.acceleration(n, edges)
    plain = kronecker_decay(n, edges, 0.0, [0.5])
    fast = kronecker_decay(n, edges, constants.eta, [0.5, constants.alpha_tilde])
    assert gossip.gossip_decay(n, edges) == pytest.approx(plain, abs=1e-9)
    assert gossip.gossip_decay(n, edges, constants) == pytest.approx(fast, abs=1e-9)


@pytest.mark.parametrize("n", [4, 5, 8, 16])
@pytest.mark.parametrize("accelerated", [False, True])
def test_slowest_disagreement_keeps_its_shape(n, accelerated):
    """Moved by one exchange at random and by the coupling, moments shrink by the decay alone."""
    edges = topology.ring_edges(n)
    constants = gossip.acceleration(n, edges) if accelerated else None
    decay = gossip.gossip_decay(n, edges, constants)
    weights = [0.5, constants.alpha_tilde] if constants else [0.5]
    moments = gossip.slowest_disagreement(n, edges, constants)
    copies = len(weights)
    flat = moments.transpose(0, 2, 1, 3).reshape(copies * n, copies * n)
    assert np.trace(moments[0, 0]) == pytest.approx(n)
    assert np.linalg.eigvalsh(flat).min() > -1e-12
    eta = constants.eta if constants else 0.0
    drift = np.kron(eta * (np.ones((copies, copies)) - copies * np.eye(copies)), np.eye(n))
    changed = drift @ flat + flat @ drift.T
    for i, j in edges:
        edge = np.eye(n)[i] - np.eye(n)[j]
        jump = np.eye(copies * n) - np.kron(
            np.outer(weights, np.eye(copies)[0]), np.outer(edge, edge)
        )
        changed += (jump @ flat @ jump.T - flat) / 2
    np.testing.assert_allclose(changed, -decay * flat, atol=1e-9)


def simulated_square(n, edges, constants, times, seed, runs=40000):
    """E[sum_i |x_i - m|^2] at the given times, over many runs of Poisson exchanges (rate 1)."""
    generator, total = np.random.default_rng(seed), n / 2  # regular graphs: all edges alike
    eta, tilde = (constants.eta, constants.alpha_tilde) if constants else (0.0, 0.5)
    models = np.tile(generator.normal(size=n), (runs, 1))
    models -= models.mean(axis=1, keepdims=True)
    shadow, now, every = models.copy(), 0.0, np.arange(runs)
    i, j = np.array(edges).T
    for time in times:
        left = np.full(runs, time - now)
        while (left > 0).any():
            wait = np.minimum(generator.exponential(1 / total, runs), left)
            mean, half = (models + shadow) / 2, (models - shadow) / 2
            half *= np.exp(-2 * eta * wait)[:, np.newaxis]
            models, shadow = mean + half, mean - half
            left -= wait
            edge = generator.integers(0, len(edges), runs)
            gap = models[every, i[edge]] - models[every, j[edge]]
            gap[left <= 0] = 0  # the next exchange is after `time`
            for each, weight in ((models, 0.5), (shadow, tilde)):
                each[every, i[edge]] -= weight * gap
                each[every, j[edge]] += weight * gap
        now = time
        yield np.mean(np.sum((models - models.mean(axis=1, keepdims=True)) ** 2, axis=1))


@pytest.mark.parametrize("n", [4, 6])
def test_decay_by_simulation(n):
    edges = topology.ring_edges(n)
    for used in (None, gossip.acceleration(n, edges)):
        expected = gossip.gossip_decay(n, edges, used)
        early, late = simulated_square(n, edges, used, (6.0, 10.0), seed=7)
        assert np.log(early / late) / 4 == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_decay_on_complete_graphs_by_single_exchanges(n):
    expected = n / 2 * (1 - complete_event_contraction(n))
    assert gossip.gossip_decay(n, complete_edges(n)) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "gain"), [(4, 1.01), (8, 1.34), (16, 2.63), (32, 5.57)])
def test_acceleration_gain_of_the_ring(n, gain):
    assert acceleration_gain(n, topology.ring_edges(n)) == pytest.approx(gain, abs=0.01)


def test_decay_does_not_depend_on_the_order_of_ranks():
    """Relabelled, the ring is not seen as circulant, and the general way is taken."""
    relabelled = [(0, 3), (3, 1), (1, 5), (5, 2), (2, 4), (4, 0)]
    ring = topology.ring_edges(6)
    for constants in (None, gossip.acceleration(6, ring)):
        found = gossip.gossip_decay(6, relabelled, constants)
        assert found == pytest.approx(gossip.gossip_decay(6, ring, constants))


def test_wrong_constants_make_gossip_slower_or_unstable():
    edges = topology.ring_edges(8)
    good = gossip.acceleration(8, edges)
    mild = gossip.Acceleration(good.chi1, good.chi2, good.eta, 0.5)
    wild = gossip.Acceleration(good.chi1, good.chi2, good.eta, 20 * good.alpha_tilde)
    best = gossip.gossip_decay(8, edges, good)
    assert gossip.gossip_decay(8, edges, mild) < best
    assert gossip.gossip_decay(8, edges, wild) < 0


def test_a_cut_graph_does_not_decay():
    assert gossip.gossip_decay(4, [(0, 1), (2, 3)]) == pytest.approx(0, abs=1e-12)


# ---- refusals


@pytest.mark.parametrize(
    "call",
    [
        lambda: gossip.laplacian(3, [(0, 1)], 0.0),
        lambda: gossip.acceleration(3, [(0, 1)], float("inf")),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(ConfigError, match=r"got .*, allowed is .*\. "):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: gossip.laplacian(1, []),
        lambda: gossip.laplacian(3, []),
        lambda: gossip.laplacian(3, [(0, 3)]),
        lambda: gossip.acceleration(4, [(0, 1), (2, 3)]),
        lambda: gossip.gossip_decay(3, [(0, 3)]),
        lambda: gossip.gossip_decay(65, topology.ring_edges(65)),
        lambda: gossip.gossip_decay(25, path(25)),
    ],
)
def test_wrong_sizes(call):
    with pytest.raises(TopologyError):
        call()
