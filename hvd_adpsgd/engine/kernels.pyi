from typing import Any

FLOAT32: int
FLOAT64: int
BFLOAT16: int
FLOAT16: int

def fence() -> None: ...
def itemsize(dtype: int) -> int: ...
def snapshot(
    dtype: int, wire: int, out: Any, mirror: Any, first: Any = None, second: Any = None
) -> bool: ...
def merge(
    dtype: int,
    wire: int,
    correction: Any,
    received: Any,
    sent: Any,
    weight: float,
    fresh: bool,
    stream: bool = False,
) -> float: ...
def half_difference(
    dtype: int,
    wire: int,
    half: Any,
    mine: tuple[Any, Any, Any],
    theirs: tuple[Any, Any, Any],
    keep: Any = None,
    stream: bool = False,
) -> bool: ...
def merge_half(
    dtype: int,
    wire: int,
    correction: Any,
    half: Any,
    weight: float,
    fresh: bool,
    stream: bool = False,
) -> float: ...
def apply(
    dtype: int,
    parameter: Any,
    correction: Any = None,
    mirror: Any = None,
    back: Any = None,
    replace: bool = False,
    fresh: bool = True,
    stream: bool = False,
) -> tuple[bool, bool]: ...
def merge_mean(
    dtype: int, slot: Any, sum: Any, own: Any, learners: float, fresh: bool, replace: bool = False
) -> float: ...
