"""The online Fisher estimate against dense matrices: every invariant of its law."""

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.errors import ConfigError

pytest.importorskip("horovod.torch")
from hvd_adpsgd.optim.natural_gradient import OnlineFisher
from hvd_adpsgd.optim.natural_gradient.fisher import DELTA, EPSILON
from hvd_adpsgd.optim.natural_gradient.rows import Patches, Rows

F64 = torch.float64


def rows(seed, n, dim, scale=1.0, condition=1e3, dtype=F64):
    """n rows with a covariance of that condition number, along directions that `dim` decides."""
    turn, _ = torch.linalg.qr(
        torch.randn(dim, dim, generator=torch.Generator().manual_seed(dim), dtype=F64)
    )
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -math.log10(condition) / 2, dim, dtype=F64)
    x = torch.randn(n, dim, generator=generator, dtype=F64) * spread @ turn
    return (scale * x).to(dtype)


def started(dim, rank, minibatches, **options):
    """An estimate that has seen some minibatches."""
    fisher = OnlineFisher(dim, rank, **options)
    for x in minibatches:
        fisher.precondition(x)
    return fisher


def dense_update(fisher, x):
    """F after x, and its floors, by dense matrices; the law as the docstring has it."""
    n, dim, rank = len(x), fisher.dim, fisher.rank
    x = x.to(F64)
    eta = min(0.9, 1 - math.exp(-n / fisher.history))
    before, scatter = fisher.dense(), x.T @ x / n
    mixed = eta * scatter + (1 - eta) * before
    y = fisher.directions @ mixed
    values, vectors = torch.linalg.eigh(y @ y.T)
    values = values.clamp(min=(fisher.floor * (1 - eta)) ** 2)
    new = torch.diag(values.rsqrt()) @ vectors.T @ y
    rho = float(mixed.trace() - values.sqrt().sum()) / (dim - rank)
    least = max(EPSILON * float(mixed.trace()) / dim, DELTA * float(values.sqrt().max()))
    d = (values.sqrt() - rho).clamp(min=least)
    return new.T @ torch.diag(d) @ new + max(rho, least) * torch.eye(dim, dtype=F64)


shapes = st.tuples(st.integers(2, 40), st.integers(1, 50), st.integers(1, 60))  # D, R, n
seeds = st.integers(0, 10**6)
scales = st.sampled_from([1e-12, 1e-5, 1.0, 1e7])


@given(shapes, seeds, scales, st.sampled_from([0.0, 0.1, 4.0]))
def test_rows_are_multiplied_by_the_smoothed_inverse_and_keep_their_norm(shape, seed, scale, alpha):
    dim, rank, n = shape
    fisher = started(dim, rank, [rows(seed + k, n, dim, scale) for k in range(3)], alpha=alpha)
    x, before = rows(seed + 9, n, dim, scale), fisher.dense()
    smoothed = before + alpha / dim * before.trace() * torch.eye(dim, dtype=F64)
    expected = x @ torch.linalg.inv(smoothed)
    found, gamma = fisher.precondition(x)
    assert float(found.norm() / x.norm()) == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(found / found.norm(), expected / expected.norm())
    assert gamma >= 1 - 1e-9


@given(shapes, seeds, scales)
def test_an_update_is_that_of_dense_matrices(shape, seed, scale):
    dim, rank, n = shape
    fisher = started(dim, rank, [rows(seed, 50, dim, scale)])
    for k in range(1, 4):
        x = rows(seed + k, n, dim, scale)
        expected = dense_update(fisher, x)
        fisher.precondition(x)
        torch.testing.assert_close(fisher.dense() / scale**2, expected / scale**2)


@given(shapes, seeds, st.sampled_from([1.0, 1e4, 1e10, 1e16]))
def test_directions_stay_orthonormal(shape, seed, condition):
    dim, rank, n = shape
    fisher = OnlineFisher(dim, rank)
    for k in range(15):
        fisher.precondition(rows(seed + k // 5, n, dim, 10.0 ** (k // 5), condition))
        error = fisher.directions @ fisher.directions.T - torch.eye(fisher.rank, dtype=F64)
        assert float(error.abs().max()) < 1e-8
        assert fisher.floor > 0 and bool((fisher.strengths > 0).all())


def test_strong_directions_are_found_and_suppressed():
    """10 of 60 directions of variance 1000 to 10, the rest 1, rank 10."""
    generator = torch.Generator().manual_seed(0)
    variance = torch.ones(60, dtype=F64)
    variance[:10] = torch.logspace(3, 1, 10, dtype=F64)
    turn, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=F64))

    def draw(n):
        return torch.randn(n, 60, generator=generator, dtype=F64) * variance.sqrt() @ turn

    fisher = started(60, 10, (draw(128) for _ in range(300)), update_period=1)
    assert float(fisher.dense().trace()) == pytest.approx(float(variance.sum()), rel=0.1)
    assert fisher.floor == pytest.approx(1.0, rel=0.05)
    torch.testing.assert_close(fisher.strengths[:3] + 1, variance[:3], rtol=0.25, atol=0)
    x = draw(20000)
    found, _ = fisher.precondition(x)
    condition = torch.linalg.cond(found.T @ found)
    assert torch.linalg.cond(x.T @ x) > 900 and condition < 70


def test_the_first_ten_minibatches_then_every_fourth():
    fisher, counts = OnlineFisher(12, 4, update_period=4), []
    for k in range(20):
        fisher.precondition(rows(k, 30, 12))
        counts.append(fisher.updates)
    assert counts == [*range(1, 11), 10, 10, 10, 11, 11, 11, 11, 12, 12, 12]


def test_a_frozen_estimate_gives_the_same_bits():
    fisher = started(12, 4, [rows(k, 30, 12) for k in range(10)], update_period=math.inf)
    x = rows(99, 30, 12, dtype=torch.float32)
    first, gamma = fisher.precondition(x)
    for k in range(20):
        fisher.precondition(rows(k, 30, 12, scale=100.0))
    second, again = fisher.precondition(x)
    assert torch.equal(first, second) and gamma == again
    moving = started(12, 4, [rows(k, 30, 12) for k in range(10)], update_period=1)
    assert not torch.equal(moving.precondition(x)[0], moving.precondition(x)[0])


def state_bits(fisher):
    file = io.BytesIO()
    torch.save(fisher.state_dict(), file)
    return file.getvalue()


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_zeros_and_rows_that_are_not_finite_leave_the_estimate_alone(bad):
    fisher = started(12, 4, [rows(k, 30, 12) for k in range(3)])
    before = state_bits(fisher)
    x = torch.zeros(30, 12, dtype=F64) if bad == 0 else rows(5, 30, 12)
    x[3, 4] = bad
    found, _ = fisher.precondition(x)
    assert state_bits(fisher) == before
    assert torch.equal(found, x) if bad == 0 else bool(found.isnan().any())
    fisher.precondition(rows(6, 30, 12))
    assert state_bits(fisher) != before


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_it_does_not_begin_with_zeros_or_nan(bad):
    fisher = OnlineFisher(12, 4)
    fisher.precondition(torch.full((30, 12), bad))
    assert fisher.directions is None
    fisher.precondition(rows(0, 30, 12))
    assert bool(fisher.directions.isfinite().all())


def test_one_dimension_is_left_alone():
    fisher = OnlineFisher(1, 20)
    x = torch.randn(7, 1)
    found, gamma = fisher.precondition(x)
    assert torch.equal(found, x) and gamma == 1 and fisher.updates == 0


def test_a_resumed_estimate_gives_the_same_bits():
    one = started(12, 4, [rows(k, 30, 12) for k in range(11)])
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other = OnlineFisher(12, 4)
    other.load_state_dict(torch.load(file, weights_only=True))
    for k in range(11, 20):
        x = rows(k, 30, 12, dtype=torch.float32)
        assert torch.equal(one.precondition(x)[0], other.precondition(x)[0])
    assert state_bits(one) == state_bits(other)


def test_a_state_of_other_dimensions_is_refused():
    state = started(12, 4, [rows(0, 30, 12)]).state_dict()
    with pytest.raises(ConfigError, match=r"\(4, 12\) must be \(3, 12\)"):
        OnlineFisher(12, 3).load_state_dict(state)


def test_memory_is_a_basis_not_a_matrix():
    fisher = started(500, 6, [rows(k, 20, 500, dtype=torch.float32) for k in range(3)])
    tensors = [v for v in vars(fisher).values() if isinstance(v, torch.Tensor)]
    assert sum(t.numel() for t in tensors) <= 2 * 6 * 500 + 6


def test_rows_of_another_width():
    with pytest.raises(ConfigError, match=r"\(3, 4\) must be \(rows, 5\)"):
        OnlineFisher(5, 2).precondition(torch.zeros(3, 4))


@given(st.integers(1, 9), st.integers(1, 7), st.booleans(), seeds)
def test_products_of_rows_with_a_one(n, dim, one, seed):
    x = rows(seed, n, dim)
    whole = torch.cat([x, torch.ones(n, 1, dtype=F64)], 1) if one else x
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(3, whole.shape[1], generator=generator, dtype=F64)
    h = torch.randn(n, 3, generator=generator, dtype=F64)
    found = Rows(x, one)
    torch.testing.assert_close(found.project(w), whole @ w.T)
    torch.testing.assert_close(found.moment(h), h.T @ whole)
    torch.testing.assert_close(found.trace(), whole.square().sum())
    rest, ones = found.without(h, w)
    parts = rest if ones is None else torch.cat([rest, ones.unsqueeze(1)], 1)
    torch.testing.assert_close(parts, whole - h @ w)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2),
    st.booleans(), seeds,
)  # fmt: skip
def test_products_of_patches_are_those_of_the_unfolded_input(
    batch, kernel, stride, padding, dilation, one, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 2, 7, 8, generator=generator, dtype=F64)
    unfold = torch.nn.Unfold(kernel, dilation, padding, stride)
    whole = unfold(x).transpose(1, 2).reshape(-1, 2 * kernel**2)
    n = len(whole)
    whole = torch.cat([whole, torch.ones(n, 1, dtype=F64)], 1) if one else whole
    pair = [(v, v) for v in (stride, padding, dilation)]
    found = Patches(x, (2, kernel, kernel), *pair, one=one)
    w = torch.randn(3, whole.shape[1], generator=generator, dtype=F64)
    h = torch.randn(n, 3, generator=generator, dtype=F64)
    assert (found.count, found.dim) == whole.shape
    torch.testing.assert_close(found.project(w), whole @ w.T)
    torch.testing.assert_close(found.moment(h), h.T @ whole)
    torch.testing.assert_close(found.trace(), whole.square().sum())
