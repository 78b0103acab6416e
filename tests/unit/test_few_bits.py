"""Differences of two models in 4 or 8 bits per element, which both sides merge with opposite signs."""

import numpy as np
import pytest
from hvd_adpsgd_lab.simulation import engine_calls
from hypothesis import given
from hypothesis import strategies as st

from hvd_adpsgd.formats import BY_NAME
from tests.elements import decode
from tests.shown import Shown

BITS = (8, 4)
CODES = {8: BY_NAME["int8"].code, 4: BY_NAME["int4"].code}
REFRESH = 16  # of store.pxd: one of so many offers has 16 bits


def side(values: np.ndarray, dtype: str = "float32") -> Shown:
    """A super learner of one learner, whose model has one chunk."""
    return Shown(values, dtype, chunk_nbytes=65536)


def exchange(a: Shown, b: Shown, bits: int, weight: float = 0.5) -> tuple[int, float]:
    """`a` offers its chunk, `b` answers. Returns the bytes each way, 0 if nothing was merged; the square."""
    offer, answer = (np.zeros(8 * len(a.model) + 64, np.uint8) for _ in range(2))
    nbytes = engine_calls.offer(a.memory.store, 0, CODES[bits], offer)
    if nbytes == 0:
        return 0, 0.0
    answered, square = engine_calls.answer(
        b.memory.store, 0, CODES[bits], weight, offer[:nbytes], answer
    )
    if answered:
        assert answered == nbytes
        assert (
            engine_calls.merge_answer(a.memory.store, 0, CODES[bits], weight, answer[:nbytes])
            == square
        )
    return answered, square


def pair(n: int, dtype: str, distance: float, seed: int = 0) -> tuple[Shown, Shown]:
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(n)
    return tuple(side(common + distance * rng.standard_normal(n), dtype) for _ in range(2))  # type: ignore[return-value]


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if len(x) else 0.0


@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", BITS)
def test_the_mean_is_kept_and_the_models_meet(n: int, dtype: str, bits: int) -> None:
    """Both sides offer in turn; some corrections are pending, some applied."""
    a, b = pair(n, dtype, 0.01)
    mean, far = (a.state() + b.state()) / 2, rms(a.state() - b.state())
    for i in range(24):
        exchange(*((a, b) if i % 2 else (b, a)), bits)
        if i % 3 == 0:
            a.apply()
        tolerance = 1e-15 if dtype == "float64" else 1e-6
        np.testing.assert_allclose((a.state() + b.state()) / 2, mean, rtol=0, atol=8 * tolerance)
    assert rms(a.state() - b.state()) < 0.01 * far + 1e-7


@given(
    n=st.integers(1, 700),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(["float32", "float64"]),
    scale=st.sampled_from([1e-38, 1e-12, 1e-3, 1.0, 1e6, 1e35]),
    seed=st.integers(0, 2**32 - 1),
    acts=st.lists(st.sampled_from(["ask a", "ask b", "apply a", "apply b", "move a", "move b"])),
)
def test_the_sum_moves_by_local_updates_only(
    n: int, bits: int, dtype: str, scale: float, seed: int, acts: list[str]
) -> None:
    """Whatever the distance of the models, also if it grows between exchanges until numbers wrap."""
    rng = np.random.default_rng(seed)
    sides = dict(zip("ab", pair(n, dtype, scale, seed), strict=True))
    expected = sum(side.state() for side in sides.values())
    largest = np.abs(expected).max()
    for what, name in map(str.split, acts):
        side, other = sides[name], sides["ba"["ab".index(name)]]
        if what == "ask":
            exchange(side, other, bits, weight=rng.choice([0.25, 0.5]))
        elif what == "apply":
            side.apply()
        else:
            update = (scale * 10.0 ** rng.integers(-3, 3) * rng.standard_normal(n)).astype(dtype)
            before = side.model.astype(np.float64)
            side.model += update
            expected = expected + (side.model - before)
            side.apply()
        largest = max(largest, *(np.abs(s.state()).max() for s in sides.values()))
    tolerance = (1e-15 if dtype == "float64" else 5e-7) * (len(acts) + 1)
    found = sum(side.state() for side in sides.values())
    denormal = 0 if dtype == "float64" else 1e-44 * (len(acts) + 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest + denormal)


@pytest.mark.parametrize("bits", BITS)
def test_bytes(bits: int) -> None:
    """Two bytes, two for each 256 elements, then codes; the first offer, and one of 16, have 16 bits."""
    n = 5000
    a, b = pair(n, "float32", 0.01)
    found = [exchange(a, b, bits)[0] for _ in range(2 * REFRESH + 1)]
    steps = 2 + 2 * -(-n // 256)
    assert set(found) == {steps + 2 * n, steps + n * bits // 8}
    assert [i for i, nbytes in enumerate(found) if nbytes > 2 * n] == [0, REFRESH, 2 * REFRESH]


@pytest.mark.parametrize("bits", BITS)
def test_one_exchange_leaves_little_of_a_distance(bits: int) -> None:
    """With models that move on between exchanges, as in training: what rounding leaves is a small part."""
    rng = np.random.default_rng(3)
    a, b = pair(5000, "float32", 0.01)
    left = []
    for i in range(40):
        for side in (a, b):
            side.model += (0.01 * rng.standard_normal(len(side.model))).astype(np.float32)
            side.apply()
        before = rms(a.state() - b.state())
        exchange(*((a, b) if i % 2 else (b, a)), bits)
        left.append(rms(a.state() - b.state()) / before)
    assert np.median(left) < (0.08 if bits == 8 else 0.5), left
    assert max(left) < (0.2 if bits == 8 else 0.8), "numbers that have wrapped are few"


@pytest.mark.parametrize("bits", BITS)
def test_a_block_that_has_moved_far_is_passed_over_until_its_step_fits(bits: int) -> None:
    a, b = pair(512, "float32", 1e-4)
    for _ in range(4):
        exchange(a, b, bits)
    a.apply()
    a.model[:256] += np.random.default_rng(1).standard_normal(256).astype(np.float32)
    a.apply()
    mean = (a.state() + b.state()) / 2
    untouched = rms((a.state() - b.state())[256:])
    far = rms((a.state() - b.state())[:256])
    exchange(a, b, bits)
    assert rms((a.state() - b.state())[:256]) == pytest.approx(far, rel=0.01), (
        "wrapped numbers were merged"
    )
    for _ in range(REFRESH):
        exchange(a, b, bits)
        np.testing.assert_allclose((a.state() + b.state()) / 2, mean, rtol=0, atol=1e-5)
    assert rms((a.state() - b.state())[:256]) < 0.01 * far
    assert rms((a.state() - b.state())[256:]) <= untouched


@pytest.mark.parametrize("bits", BITS)
def test_a_single_number_that_has_wrapped_is_found_by_16_bits(bits: int) -> None:
    a, b = pair(512, "float32", 1e-4)
    for _ in range(4):
        exchange(a, b, bits)
    a.apply()
    a.model[7] += 3.0
    a.apply()
    for _ in range(REFRESH):
        exchange(a, b, bits)
    assert abs((a.state() - b.state())[7]) < 0.1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("offers", [True, False])
def test_nothing_is_merged_that_is_not_finite(bits: int, bad: float, offers: bool) -> None:
    a, b = pair(300, "float32", 0.01)
    for _ in range(3):
        exchange(a, b, bits)
        a.apply()
        b.apply()
    (a if offers else b).model[5] = bad
    a.apply()
    b.apply()
    sides = [side.model.copy() for side in (a, b)]
    assert exchange(a, b, bits)[0] == 0
    for side, before in zip((a, b), sides, strict=True):
        side.apply()
        np.testing.assert_array_equal(side.model, before)


LARGEST = {"float32": 3e38, "float64": 1e308}
SMALLEST = {"float32": 1e-41, "float64": 1e-319}  # of 13 bits, both


def halves(side: Shown) -> np.ndarray:
    """Half of the model, with all corrections."""
    side.apply()
    return side.model.astype(np.float64) / 2


def one_step_of_adam(rng: np.random.Generator, n: int) -> np.ndarray:
    return 1.5e-3 * rng.choice([-1.0, 1.0], n)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [0.0, 1e-36, 1e-20, 1.0, 1e20, np.inf])
@pytest.mark.parametrize("n", [1, 257])
@pytest.mark.parametrize("other", ["opposite", "far smaller", "zero", "one step of Adam"])
def test_models_of_any_distance_and_size_meet(
    bits: int, dtype: str, scale: float, n: int, other: str
) -> None:
    """The first exchange leaves 1/4096 of the largest number, whatever the two models are."""
    rng = np.random.default_rng(5)
    scale = min(max(scale, SMALLEST[dtype]), LARGEST[dtype])
    u = scale * rng.uniform(0.5, 1, n) * rng.choice([-1.0, 1.0], n)
    v = {"opposite": -u, "far smaller": 1e-9 * u, "zero": 0 * u}.get(other)
    if v is None:
        u, v = (scale * one_step_of_adam(rng, n) for _ in "uv")
    for first, second in ((u, v), (v, u)):
        a, b = side(first, dtype), side(second, dtype)
        mean, largest = halves(a) + halves(b), np.abs(u).max()
        rounding = max(1e-6 * largest, 16 * SMALLEST[dtype] / 2**13)
        assert exchange(a, b, bits)[0], "not finite"
        assert np.abs(halves(a) - halves(b)).max() < largest / 4096 + rounding
        for i in range(REFRESH):
            exchange(*((a, b) if i % 2 else (b, a)), bits)
        np.testing.assert_allclose(halves(a) + halves(b), mean, rtol=0, atol=rounding)
        assert np.abs(halves(a) - halves(b)).max() < largest / 4096 + rounding


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sum_is_kept_to_the_last_bit(bits: int, dtype: str) -> None:
    """Of numbers for which every sum is exact: both sides merge exactly opposite terms."""
    rng = np.random.default_rng(7)
    u, v = rng.integers(-1023, 1024, (2, 300)) / 1024
    for other in (v, -u):
        a, b = side(u, dtype), side(other, dtype)
        for i in range(2 * REFRESH):
            assert exchange(*((a, b) if i % 2 else (b, a)), bits)[0]
            if i % 3 == 0:
                a.apply()
            np.testing.assert_array_equal(a.state() + b.state(), u + other)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("step", [0, 0xFFFF])
def test_a_garbled_message_merges_nothing_infinite(bits: int, dtype: str, step: int) -> None:
    """Steps that no engine sends; with the largest differences beside them."""
    n = 300
    for asks in range(REFRESH):
        a, b = pair(n, dtype, 0.01)
        message, answer = (np.zeros(8 * n + 64, np.uint8) for _ in range(2))
        for _ in range(asks):
            exchange(a, b, bits)
        before = a.state(), b.state()
        nbytes = engine_calls.offer(a.memory.store, 0, CODES[bits], message)
        message[2:6].view(np.uint16)[:] = step
        engine_calls.answer(b.memory.store, 0, CODES[bits], 0.5, message[:nbytes], answer)
        assert np.isfinite(b.state()).all()
        answer[2:6].view(np.uint16)[:] = step
        answer[6:nbytes] = np.full(nbytes, 0x77, np.uint8)[6:]
        engine_calls.merge_answer(a.memory.store, 0, CODES[bits], 0.5, answer[:nbytes])
        a.apply()
        assert np.isfinite(a.state()).all()
        if step and dtype == "float32":
            np.testing.assert_array_equal(a.state(), before[0])


def test_equal_models_stay_as_they_are() -> None:
    values = np.random.default_rng(0).standard_normal(700)
    for bits in BITS:
        a, b = side(values), side(values)
        for _ in range(20):
            exchange(a, b, bits)
        np.testing.assert_array_equal(decode(a.model, "float32"), decode(b.model, "float32"))
        np.testing.assert_array_equal(a.state(), b.state())


@pytest.mark.parametrize("bits", BITS)
def test_what_is_passed_over_counts_in_the_distance(bits: int) -> None:
    a, b = pair(256, "float32", 1e-4)
    for _ in range(3):
        exchange(a, b, bits)
    a.apply()
    a.model += np.random.default_rng(1).standard_normal(256).astype(np.float32)
    a.apply()
    far = rms(a.state() - b.state())
    _, square = exchange(a, b, bits)
    assert rms(a.state() - b.state()) == pytest.approx(far), "not passed over"
    assert square > 0
