"""Benchmark of the engine's loops over memory, against memcpy.

Run by `python -m hvd_adpsgd bench kernels`, in one process. Each round copies an array of --mib MiB with
memcpy and runs every loop over arrays of as many elements, in turn. The result is bytes read and written per
second, divided by memcpy's in the same round: 1 means that the loop is limited by memory bandwidth alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine import kernels
from hvd_adpsgd_lab.bench import machine

DTYPES = {
    "float32": kernels.FLOAT32,
    "float64": kernels.FLOAT64,
    "bfloat16": kernels.BFLOAT16,
    "float16": kernels.FLOAT16,
}
LINE_NBYTES = 64
WARM_UP = 1  # rounds that are not counted: they touch the memory for the first time
Bytes = NDArray[np.uint8]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the median over rounds of each loop's ratio to memcpy, with its minimum and maximum."""
    count = int(args.mib * 2**18)
    loops = {f"{name}.{dtype}": loop for dtype in DTYPES for name, loop in loops_of(dtype, count)}
    source, target = np.ones(count, np.float32), np.empty(count, np.float32)
    copied: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(args.rounds + WARM_UP):
        copied.append(2 * source.nbytes / seconds_of(lambda: np.copyto(target, source)))
        for name, (nbytes, act) in loops.items():
            found[name].append(nbytes / seconds_of(act))
    result: dict[str, Any] = {
        "mib": args.mib,
        "rounds": args.rounds,
        "memcpy_gb_per_s": statistics.median(copied[WARM_UP:]) / 1e9,
    }
    for name, speeds in found.items():
        shares = [a / b for a, b in zip(speeds[WARM_UP:], copied[WARM_UP:], strict=True)]
        kernel, dtype = name.split(".")
        row = result.setdefault(kernel, {})
        row[dtype] = statistics.median(shares)
        row[f"{dtype}_min"], row[f"{dtype}_max"] = min(shares), max(shares)
    return result | {"machine": machine()}


def seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def loops_of(dtype: str, count: int) -> list[tuple[str, tuple[int, Callable[[], object]]]]:
    """Return (name, (bytes read and written, function)) of each loop over `count` numbers of `dtype`."""
    code = DTYPES[dtype]
    wide = kernels.FLOAT64 if dtype == "float64" else kernels.FLOAT32
    own = [array_of(code, count, seed) for seed in range(4)]
    slots = [array_of(wide, count, seed) for seed in range(2)]
    n, w = own[0].nbytes, slots[0].nbytes
    a, b, c, d = own
    first, second = slots
    return [
        ("snapshot", (2 * n, lambda: kernels.snapshot(code, code, c, a))),
        (
            "snapshot_pending",
            (2 * n + w, lambda: kernels.snapshot(code, code, c, a, first)),
        ),
        (
            "merge",
            (2 * n + w, lambda: kernels.merge(code, code, first, a, b, 0.5, True, True)),
        ),
        (
            "merge_more",
            (2 * n + 2 * w, lambda: kernels.merge(code, code, first, a, b, 0.5, False, True)),
        ),
        (
            "half_difference",
            (
                3 * n,
                lambda: kernels.half_difference(
                    code, code, c, (a, None, None), (b, None, None), stream=True
                ),
            ),
        ),
        (
            "merge_half",
            (n + w, lambda: kernels.merge_half(code, code, first, a, 0.5, True, True)),
        ),
        ("apply", (3 * n + w, lambda: kernels.apply(code, d, second, c, stream=True))),
        ("mirror", (2 * n, lambda: kernels.apply(code, d, None, c, stream=True))),
        (
            "merge_mean",
            (5 * w, lambda: kernels.merge_mean(code, first, second, second, 1.0, True)),
        ),
    ]


def array_of(code: int, count: int, seed: int) -> Bytes:
    """Return `count` random numbers of type `code` as bytes, aligned to a cache line as in the engine."""
    rng = np.random.default_rng(seed)
    if code == kernels.FLOAT64:
        return _aligned(rng.standard_normal(count).view(np.uint8))
    numbers = rng.standard_normal(count, dtype=np.float32).view(np.uint8)
    if code == kernels.FLOAT32:
        return _aligned(numbers)
    narrow = np.empty(2 * count, np.uint8)
    kernels.snapshot(kernels.FLOAT32, code, narrow, numbers)
    return _aligned(narrow)


def _aligned(values: Bytes) -> Bytes:
    room = np.empty(values.nbytes + LINE_NBYTES, np.uint8)
    found = room[-room.ctypes.data % LINE_NBYTES :][: values.nbytes]
    found[:] = values
    return found
