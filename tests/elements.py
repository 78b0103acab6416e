"""Arrays of the element types of models, bfloat16 as uint16: their numbers, and numbers as elements."""

import numpy as np

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


def wide(dtype: str) -> str:
    """The type of corrections and of sums."""
    return "float64" if dtype == "float64" else "float32"


def raw(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8).reshape(-1)


def draw(rng: np.random.Generator, n: int, dtype: str) -> np.ndarray:
    return encode(rng.standard_normal(n) * 3, dtype)
