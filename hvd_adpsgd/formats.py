"""Formats in which models travel between super learners: a row for each.

The option wire_dtype and its help, reports, the simulator and the choice of `wire_dtype="auto"` derive from
the rows; tests/unit/test_formats.py compares the compiled engine with them.
"""

from typing import NamedTuple

AUTO = "auto"  # in place of a name: each super learner chooses among CHOSEN


class Format(NamedTuple):
    """One format.

    Attributes:
        name: as the option wire_dtype has it.
        code: its number in messages and in the compiled engine (ext/c/kernels.h).
        bits: per element; 0: as many as the model has.
        is_coded: codes of the difference of two models travel (ext/c/codes.h), between hosts only; else
            numbers.
        meaning: for the documentation.
    """

    name: str
    code: int
    bits: int
    is_coded: bool
    meaning: str


OWN = Format("float32", -1, 0, False, "the model's own, as None")
FORMATS = (
    OWN,
    Format("bfloat16", 2, 16, False, "at most 16 bits, with the range of float32"),
    Format("float16", 3, 16, False, "at most 16 bits"),
    Format("int8", 4, 8, True, "differences in 8 bits between hosts"),
    Format("int4", 5, 4, True, "differences in 4 bits between hosts"),
)
BY_NAME = {each.name: each for each in FORMATS}
# by "auto", each with fewer bits than the one before
CHOSEN = (OWN, BY_NAME["int8"], BY_NAME["int4"])


def first_format(wire_dtype: str | None) -> Format:
    """Return the format of the first exchanges: with a fixed format, of all."""
    return OWN if wire_dtype in (None, AUTO) else BY_NAME[wire_dtype]
