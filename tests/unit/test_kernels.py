"""The C loops against NumPy, for every element type and wire type."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.engine import kernels

SIZES = [0, 1, 7, 1024, 1025, 100_003]
DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
PAIRS = [(d, d) for d in DTYPES] + [
    (d, w) for d in ("float32", "float64") for w in ("bfloat16", "float16")
]


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, by way of 64-bit integers; stored as uint16."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """Real numbers as stored elements of `dtype`."""
    if dtype == "bfloat16":
        return to_bf16(x)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32 if dtype == "float16" else dtype).astype(dtype)


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64 if dtype == "float64" else np.float32)


def raw(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8).reshape(-1)


def draw(rng: np.random.Generator, n: int, dtype: str) -> np.ndarray:
    return encode(rng.standard_normal(n) * 3, dtype)


def arithmetic(*terms: np.ndarray, dtype: str) -> np.ndarray:
    """Sum in the arithmetic type, left to right."""
    total = decode(terms[0], dtype)
    for term in terms[1:]:
        total = total + decode(term, dtype)
    return total


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
@pytest.mark.parametrize("pending", [0, 1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_snapshot_adds_the_pending_corrections(n, dtype, wire, pending, stream):
    rng = np.random.default_rng(n + pending)
    mirror, *corrections = (draw(rng, n, dtype) for _ in range(1 + pending))
    out = encode(np.zeros(n), wire)
    infinite = kernels.snapshot(
        DTYPES[dtype], DTYPES[wire], raw(out), raw(mirror), *map(raw, corrections), stream=stream
    )
    keep, again = encode(np.zeros(n), wire), encode(np.zeros(n), wire)
    kernels.snapshot(
        DTYPES[dtype],
        DTYPES[wire],
        raw(again),
        raw(mirror),
        *map(raw, corrections),
        keep=raw(keep),
        stream=stream,
    )
    np.testing.assert_array_equal(keep, out)
    np.testing.assert_array_equal(again, out)
    expected = encode(arithmetic(mirror, *corrections, dtype=dtype), wire)
    assert not infinite
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_merge_adds_the_weighted_difference(n, dtype, wire, fresh, stream):
    rng = np.random.default_rng(n)
    correction = draw(rng, n, dtype)
    before = correction.copy()
    received, sent = draw(rng, n, wire), draw(rng, n, wire)
    square = kernels.merge(
        DTYPES[dtype], DTYPES[wire], raw(correction), raw(received), raw(sent), 1 / 3, fresh, stream
    )
    wide = np.float64 if dtype == "float64" else np.float32
    difference = decode(received, wire).astype(wide) - decode(sent, wire).astype(wide)
    added = wide(1 / 3) * difference
    total = added if fresh else decode(before, dtype) + added
    np.testing.assert_array_equal(correction, encode(total, dtype))
    assert square == pytest.approx(float((difference.astype(np.float64) ** 2).sum()), rel=1e-5)


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
def test_partners_get_exactly_opposite_corrections(dtype, wire):
    rng = np.random.default_rng(5)
    a, b = draw(rng, 10_001, wire), draw(rng, 10_001, wire)
    mine, theirs = encode(np.zeros(10_001), dtype), encode(np.zeros(10_001), dtype)
    kernels.merge(DTYPES[dtype], DTYPES[wire], raw(mine), raw(b), raw(a), 1 / 3, True)
    kernels.merge(DTYPES[dtype], DTYPES[wire], raw(theirs), raw(a), raw(b), 1 / 3, True)
    np.testing.assert_array_equal(decode(mine, dtype), -decode(theirs, dtype))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_correction", [True, False])
@pytest.mark.parametrize("with_mirror", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_apply_corrects_and_mirrors(n, dtype, with_correction, with_mirror, stream):
    rng = np.random.default_rng(n)
    parameter, correction = draw(rng, n, dtype), draw(rng, n, dtype)
    mirror = encode(np.zeros(n), dtype)
    expected = parameter.copy()
    if with_correction:
        expected = encode(arithmetic(parameter, correction, dtype=dtype), dtype)
    infinite = kernels.apply(
        DTYPES[dtype],
        raw(parameter),
        raw(correction) if with_correction else None,
        raw(mirror) if with_mirror else None,
        stream=stream,
    )
    assert not infinite
    np.testing.assert_array_equal(parameter, expected)
    if with_mirror:
        np.testing.assert_array_equal(mirror, expected)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_mirror", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_apply_replaces_to_the_bit(n, dtype, with_mirror, stream):
    rng = np.random.default_rng(n)
    parameter, mean = draw(rng, n, dtype), draw(rng, n, dtype)
    mirror = encode(np.zeros(n), dtype)
    infinite = kernels.apply(
        DTYPES[dtype],
        raw(parameter),
        raw(mean),
        raw(mirror) if with_mirror else None,
        replace=True,
        stream=stream,
    )
    assert not infinite
    np.testing.assert_array_equal(raw(parameter), raw(mean))
    if with_mirror:
        np.testing.assert_array_equal(raw(mirror), raw(mean))


@pytest.mark.parametrize("dtype", DTYPES)
def test_replacing_by_nothing_leaves_the_parameter(dtype):
    parameter = draw(np.random.default_rng(3), 1025, dtype)
    before = parameter.copy()
    assert not kernels.apply(DTYPES[dtype], raw(parameter), replace=True)
    np.testing.assert_array_equal(raw(parameter), raw(before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_replacement_that_is_not_finite_is_found(dtype, poison):
    values = np.ones(1500)
    values[1400] = poison
    parameter = encode(np.zeros(1500), dtype)
    assert kernels.apply(DTYPES[dtype], raw(parameter), raw(encode(values, dtype)), replace=True)


# ---- the mean of all -----------------------------------------------------------------------------


def sums(dtype: str) -> type:
    """In which sums are made."""
    return np.float64 if dtype == "float64" else np.float32


def widened(stored: np.ndarray, dtype: str) -> np.ndarray:
    return decode(stored, dtype).astype(sums(dtype))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("none", [True, False])
def test_widen_is_the_model_in_the_type_of_sums(n, dtype, none):
    own = draw(np.random.default_rng(n), n, dtype)
    out = np.full(n, 7, sums(dtype))
    kernels.widen(DTYPES[dtype], raw(out), raw(own), none)
    np.testing.assert_array_equal(out, np.zeros(n) if none else widened(own, dtype))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learners", [1, 3, 4])
@pytest.mark.parametrize(
    ("fresh", "replace"), [(True, False), (False, False), (True, True), (False, True)]
)
def test_merge_mean(n, dtype, learners, fresh, replace):
    """slot = mean, or slot (+)= mean - own, rounded once to the model's type."""
    rng = np.random.default_rng([n, learners])
    models = [widened(draw(rng, n, dtype), dtype) for _ in range(learners)]
    total, own = np.sum(models, axis=0, dtype=sums(dtype)), models[0]
    slot = draw(rng, n, dtype)
    before = slot.copy()
    square = kernels.merge_mean(
        DTYPES[dtype], raw(slot), raw(total), raw(own), learners, fresh, replace
    )
    k = sums(dtype)(learners)
    moved = (total - k * own) / k
    if replace:
        np.testing.assert_array_equal(slot, encode(total / k, dtype))
    elif learners == 4:  # 4 own is exact, also where the compiler fuses the two operations
        result = moved if fresh else decode(before, dtype) + moved
        np.testing.assert_array_equal(slot, encode(result, dtype))
    else:
        result = moved if fresh else decode(before, dtype) + moved
        eps = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
        np.testing.assert_allclose(decode(slot, dtype), result, rtol=eps, atol=10 * eps)
    assert square == pytest.approx(float((moved.astype(np.float64) ** 2).sum()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_models_get_no_correction(dtype):
    own = widened(draw(np.random.default_rng(2), 1025, dtype), dtype)
    slot = encode(np.ones(1025), dtype)
    assert kernels.merge_mean(DTYPES[dtype], raw(slot), raw(4 * own), raw(own), 4, True) == 0
    np.testing.assert_array_equal(decode(slot, dtype), np.zeros(1025))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 1024, 1999])
@pytest.mark.parametrize(("fresh", "replace"), [(True, False), (False, False), (True, True)])
def test_a_sum_that_is_not_finite_leaves_the_slot_alone(dtype, poison, place, fresh, replace):
    rng = np.random.default_rng(1)
    slot, own = draw(rng, 2000, dtype), widened(draw(rng, 2000, dtype), dtype)
    before, total = slot.copy(), 3 * own
    total[place] = poison
    assert (
        kernels.merge_mean(DTYPES[dtype], raw(slot), raw(total), raw(own), 3, fresh, replace) == -1
    )
    np.testing.assert_array_equal(raw(slot), raw(before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 513, 1999])
def test_one_element_that_is_not_finite_is_found(dtype, poison, place):
    values = np.ones(2000)
    values[place] = poison
    stored = encode(values, dtype)
    assert kernels.apply(DTYPES[dtype], raw(stored.copy()))
    out = stored.copy()
    assert kernels.snapshot(DTYPES[dtype], DTYPES[dtype], raw(out), raw(stored))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_float16_on_the_wire_rounds_like_numpy(values):
    x = np.array(values, dtype=np.float32)
    out = np.zeros(x.size, dtype=np.float16)
    kernels.snapshot(0, 3, raw(out), raw(x))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, x.astype(np.float16))


def test_every_float16_and_bfloat16_survives_a_round_trip():
    for dtype in ("float16", "bfloat16"):
        bits = np.arange(2**16, dtype=np.uint16)
        stored = bits.view(np.float16) if dtype == "float16" else bits
        finite = np.isfinite(decode(stored, dtype))
        stored = np.ascontiguousarray(stored[finite])
        out = np.zeros_like(stored)
        assert not kernels.snapshot(DTYPES[dtype], DTYPES[dtype], raw(out), raw(stored))
        np.testing.assert_array_equal(raw(out), raw(stored))


def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        kernels.snapshot(0, 0, np.zeros(8, np.uint8), np.zeros(4, np.uint8))
    with pytest.raises(ValueError, match="does not hold elements"):
        kernels.apply(0, np.zeros(7, np.uint8))
    eight, four = np.zeros(8, np.uint8), np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="length"):
        kernels.widen(0, eight, four)
    with pytest.raises(ValueError, match="length"):
        kernels.merge_mean(0, four, eight, four, 2, True)
    with pytest.raises(ValueError, match="length"):
        kernels.merge_mean(3, four, eight, four, 2, True)
