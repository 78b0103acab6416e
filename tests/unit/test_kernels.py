"""The C loops against NumPy, for every element type and wire type."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import kernels
from tests.elements import DTYPES, PAIRS, decode, draw, encode, raw, wide

SIZES = [0, 1, 7, 127, 128, 255, 257, 100_003]  # blocks have 256 numbers, 128 of float64


def at_every_length(check: Callable[..., None]) -> Callable[..., None]:
    """Make one test for all SIZES of check(n, ...): pytest takes longer for a test than most of these do."""

    def test(**given: Any) -> None:
        for n in SIZES:
            try:
                check(n, **given)
            except AssertionError as error:
                error.add_note(f"length {n}")
                raise

    first, *others = inspect.signature(check).parameters.values()
    assert first.name == "n"
    test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def arithmetic(model: np.ndarray, *corrections: np.ndarray, dtype: str) -> np.ndarray:
    """Sum in the arithmetic type, left to right."""
    total = decode(model, dtype)
    for correction in corrections:
        total = total + correction
    return total


@pytest.mark.parametrize(
    ("dtype", "wire"), [*PAIRS, ("bfloat16", "float32"), ("float16", "float32")]
)
@pytest.mark.parametrize("pending", [0, 1, 2])
@at_every_length
def test_snapshot_adds_the_pending_corrections(n, dtype, wire, pending):
    rng = np.random.default_rng(n + pending)
    mirror = draw(rng, n, dtype)
    corrections = [draw(rng, n, wide(dtype)) for _ in range(pending)]
    out = encode(np.zeros(n), wire)
    infinite = kernels.snapshot(
        DTYPES[dtype], DTYPES[wire], raw(out), raw(mirror), *map(raw, corrections)
    )
    expected = encode(arithmetic(mirror, *corrections, dtype=dtype), wire)
    assert not infinite
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@at_every_length
def test_merge_adds_the_weighted_difference(n, dtype, wire, fresh, stream):
    rng = np.random.default_rng(n)
    correction = draw(rng, n, wide(dtype))
    before = correction.copy()
    received, sent = draw(rng, n, wire), draw(rng, n, wire)
    square = kernels.merge(
        DTYPES[dtype], DTYPES[wire], raw(correction), raw(received), raw(sent), 1 / 3, fresh, stream
    )
    kind = np.dtype(wide(dtype))
    difference = decode(received, wire).astype(kind) - decode(sent, wire).astype(kind)
    added = kind.type(1 / 3) * difference
    np.testing.assert_array_equal(correction, added if fresh else before + added)
    assert square == pytest.approx(float((difference.astype(np.float64) ** 2).sum()), rel=1e-5)


SCALES = {"float64": (1e-310, 1.0, 1e307), "float16": (1e-7, 1.0, 1e4)}


@pytest.mark.parametrize(("dtype", "wire"), PAIRS)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_partners_get_exactly_opposite_corrections(dtype, wire, size):
    """Denormals and numbers near the largest, too."""
    rng = np.random.default_rng(5)
    scale = SCALES.get(wire, (1e-40, 1.0, 1e37))[size]
    a, b = (encode(scale * rng.standard_normal(10_001), wire) for _ in "ab")
    mine, theirs = np.zeros((2, 10_001), wide(dtype))
    kernels.merge(DTYPES[dtype], DTYPES[wire], raw(mine), raw(b), raw(a), 1 / 3, True)
    kernels.merge(DTYPES[dtype], DTYPES[wire], raw(theirs), raw(a), raw(b), 1 / 3, True)
    np.testing.assert_array_equal(mine, -theirs)
    assert mine.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_correction", [True, False])
@pytest.mark.parametrize("with_mirror", [True, False])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@at_every_length
def test_apply_corrects_or_replaces_and_mirrors(
    n, dtype, with_correction, with_mirror, replace, stream
):
    rng = np.random.default_rng(n)
    parameter, correction = draw(rng, n, dtype), draw(rng, n, wide(dtype))
    mirror = encode(np.zeros(n), dtype)
    expected = parameter.copy()
    if with_correction:
        total = correction if replace else arithmetic(parameter, correction, dtype=dtype)
        expected = encode(total, dtype)
    result = kernels.apply(
        DTYPES[dtype],
        raw(parameter),
        raw(correction) if with_correction else None,
        raw(mirror) if with_mirror else None,
        replace=replace,
        stream=stream,
    )
    assert result == (False, False)
    np.testing.assert_array_equal(raw(parameter), raw(expected))
    if with_mirror:
        np.testing.assert_array_equal(raw(mirror), raw(expected))


@pytest.mark.parametrize("offset", [0, 1, 15, 31])
@pytest.mark.parametrize("n", [1, 20, 241, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mirror_that_begins_within_a_line(offset, n, dtype):
    """The first block is shorter; nothing before or behind the mirror is written."""
    rng = np.random.default_rng(n)
    parameter, correction = draw(rng, n, dtype), draw(rng, n, wide(dtype))
    expected = encode(arithmetic(parameter, correction, dtype=dtype), dtype)
    size = parameter.itemsize
    room = np.full((n + 64) * size + 64, 0x5A, np.uint8)
    start = -room.ctypes.data % 64 + offset * size
    mirror = room[start : start + n * size]
    kernels.apply(DTYPES[dtype], raw(parameter), raw(correction), mirror, stream=True)
    np.testing.assert_array_equal(mirror, raw(expected))
    assert (room[:start] == 0x5A).all()
    assert (room[start + n * size :] == 0x5A).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@at_every_length
def test_what_rounding_to_16_bits_holds_back_is_kept(n, dtype, replace, fresh, stream):
    """parameter + back is the sum in float32, to the bit."""
    rng = np.random.default_rng(n)
    parameter, correction = draw(rng, n, dtype), draw(rng, n, "float32")
    back = draw(rng, n, "float32")
    total = correction if replace else decode(parameter, dtype) + correction
    before = np.zeros(n, np.float32) if fresh else back.copy()
    how = {"back": raw(back), "replace": replace, "fresh": fresh, "stream": stream}
    _, held = kernels.apply(DTYPES[dtype], raw(parameter), raw(correction), **how)
    rest = total - decode(parameter, dtype)
    np.testing.assert_array_equal(back, before + rest)
    np.testing.assert_array_equal(decode(parameter, dtype) + rest, total)
    assert held == rest.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_without_a_finite_16_bit_number_holds_nothing_back(dtype):
    """Else what is held back would be added to the model that is loaded next."""
    parameter = encode(np.array([np.nan, np.inf, 60000.0, 1.0]), dtype)
    correction = np.array([1.0, 1.0, 3.4e38, 0.25], np.float32)
    back = np.ones(4, np.float32)
    assert kernels.apply(DTYPES[dtype], raw(parameter), raw(correction), back=raw(back)) == (
        True,
        False,
    )
    np.testing.assert_array_equal(back, np.zeros(4))


def widened(stored: np.ndarray, dtype: str) -> np.ndarray:
    return decode(stored, dtype).astype(wide(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learners", [1, 3, 4])
@pytest.mark.parametrize(
    ("fresh", "replace"), [(True, False), (False, False), (True, True), (False, True)]
)
@at_every_length
def test_merge_mean(n, dtype, learners, fresh, replace):
    """slot = mean, or slot (+)= mean - own, in the type of sums."""
    rng = np.random.default_rng([n, learners])
    models = [widened(draw(rng, n, dtype), dtype) for _ in range(learners)]
    total, own = np.sum(models, axis=0, dtype=wide(dtype)), models[0]
    slot = draw(rng, n, wide(dtype))
    before = slot.copy()
    square = kernels.merge_mean(
        DTYPES[dtype], raw(slot), raw(total), raw(own), learners, fresh, replace
    )
    k = np.dtype(wide(dtype)).type(learners)
    moved = (total - k * own) / k
    result = total / k if replace else moved if fresh else before + moved
    if replace or learners == 4:  # 4 own is exact, also where the compiler fuses the operations
        np.testing.assert_array_equal(slot, result)
    else:
        eps = {"float32": 1e-6, "float64": 1e-14}[wide(dtype)]
        np.testing.assert_allclose(slot, result, rtol=eps, atol=10 * eps)
    assert square == pytest.approx(float((moved.astype(np.float64) ** 2).sum()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 1024, 1999])
@pytest.mark.parametrize(("fresh", "replace"), [(True, False), (False, False), (True, True)])
def test_a_sum_that_is_not_finite_leaves_the_slot_alone(dtype, poison, place, fresh, replace):
    rng = np.random.default_rng(1)
    slot, own = draw(rng, 2000, wide(dtype)), widened(draw(rng, 2000, dtype), dtype)
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
    stored, mean = encode(values, dtype), encode(values, wide(dtype))
    assert kernels.apply(DTYPES[dtype], raw(stored.copy()))[0]
    assert kernels.apply(DTYPES[dtype], raw(encode(np.ones(2000), dtype)), raw(mean), replace=True)[
        0
    ]
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


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("dtype", "large"), [("float32", 2.5e38), ("float64", 1.5e308), ("bfloat16", 2.5e38)]
)
def test_pairs_of_finite_models_stay_finite(dtype, large, fresh):
    """The difference of two finite numbers may be infinite, half of it is not."""
    here = encode(np.array([large, -large, 1.0]), dtype)
    there = encode(np.array([-large, large, 3.0]), dtype)
    correction = np.zeros(3, wide(dtype))
    code = DTYPES[dtype]
    square = kernels.merge(code, code, raw(correction), raw(there), raw(here), 0.5, fresh)
    met = decode(here, dtype) + correction
    assert met.tolist() == [0.0, 0.0, 2.0]
    assert square > large  # infinite for float64


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_means_of_large_finite_models_leave_nothing_out(dtype, replace):
    """Squares and multiples of values above 1e19 and 1e38 are infinite in float32, the mean is not."""
    own, sums = np.float32([2e38, 1e30, 1.0]), np.float32([3e38, 4e30, 8.0])
    slot = np.zeros(3, np.float32)
    square = kernels.merge_mean(DTYPES[dtype], raw(slot), raw(sums), raw(own), 4.0, True, replace)
    assert np.isfinite(square)
    mean = sums.astype(np.float64) / 4
    assert slot.tobytes() == np.float32(mean if replace else mean - own).tobytes()
