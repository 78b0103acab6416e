"""The engine's C loops, each by itself; kernels.h says what they compute.

Models, slots and messages are arrays of bytes, None where the loop may have none. Lengths are not checked.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine import store

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)

Bytes = NDArray[np.uint8]
_LOOPS = ctypes.CDLL(store.__file__)
for _name in ("merge", "merge_half", "merge_mean"):
    getattr(_LOOPS, f"adpsgd_{_name}").restype = ctypes.c_double


class _Model(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("base", "first", "second")),
    )


def _at(array: Bytes | None) -> int | None:
    return None if array is None else array.ctypes.data


def _call(name: str, *arguments: Any) -> Any:
    """Call a loop, with the addresses of arrays."""
    kinds = {float: ctypes.c_double, np.ndarray: lambda array: ctypes.c_void_p(_at(array))}
    return getattr(_LOOPS, f"adpsgd_{name}")(
        *(kinds.get(type(a), lambda a: a)(a) for a in arguments)
    )


def _count(array: Bytes, dtype: int) -> ctypes.c_int64:
    return ctypes.c_int64(array.size // _LOOPS.adpsgd_itemsize(dtype))


def snapshot(
    dtype: int, wire: int, out: Bytes, mirror: Bytes, first: Any = None, second: Any = None
) -> bool:
    """out = mirror + first + second; return whether out holds an Inf or a NaN."""
    return bool(_call("snapshot", dtype, wire, out, mirror, first, second, _count(mirror, dtype)))


def merge(
    dtype: int, wire: int, correction: Bytes, received: Bytes, sent: Bytes, weight: float,
    fresh: bool, stream: bool = False,
) -> float:  # fmt: skip
    """correction += weight (received - sent); return sum((received - sent)^2)."""
    count = _count(sent, wire)
    how = float(weight), count, int(fresh), int(stream)
    return float(_call("merge", dtype, wire, correction, received, sent, *how))


def half_difference(
    dtype: int,
    wire: int,
    half: Bytes,
    mine: Any,
    theirs: Any,
    keep: Any = None,
    stream: bool = False,
) -> bool:
    """half = (theirs - mine) / 2, each (base, first, second); return whether it holds an Inf or a NaN."""
    models = [ctypes.byref(_Model(dtype, *map(_at, model))) for model in (mine, theirs)]
    how = keep, _count(half, wire), int(stream)
    return bool(
        _call("half_difference", _LOOPS.adpsgd_slot_dtype(dtype), wire, half, *models, *how)
    )


def merge_half(
    dtype: int, wire: int, correction: Bytes, half: Bytes, weight: float, fresh: bool,
    stream: bool = False,
) -> float:  # fmt: skip
    """correction += 2 weight half; return sum((2 half)^2)."""
    how = float(weight), _count(half, wire), int(fresh), int(stream)
    return float(_call("merge_half", dtype, wire, correction, half, *how))


def apply(
    dtype: int, parameter: Bytes, correction: Any = None, mirror: Any = None, back: Any = None,
    replace: bool = False, fresh: bool = True, stream: bool = False,
) -> tuple[bool, bool]:  # fmt: skip
    """parameter += correction; return whether it holds an Inf or a NaN, and whether `back` got an error."""
    how = _count(parameter, dtype), int(replace), int(fresh), int(stream)
    found = _call("apply", dtype, parameter, correction, mirror, back, *how)
    return bool(found & 1), bool(found & 2)


def merge_mean(
    dtype: int, slot: Bytes, total: Bytes, own: Bytes, learners: float, fresh: bool,
    replace: bool = False,
) -> float:  # fmt: skip
    """slot += total / learners - own; return the squared distance, -1 if the mean is not finite."""
    count = _count(slot, _LOOPS.adpsgd_slot_dtype(dtype))
    how = float(learners), count, int(fresh), int(replace)
    return float(_call("merge_mean", dtype, slot, total, own, *how))
