"""The table of formats beside what is written in C, and what derives from it."""

import re
from pathlib import Path

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine_options import EngineOptions
from hvd_adpsgd.engine.layout import DTYPE_CODES
from hvd_adpsgd.formats import AUTO, CHOSEN, FORMATS, OWN
from hvd_adpsgd.strategies import RandomPairs

HEADER = Path(__file__).parents[2] / "ext/c/kernels.h"


def test_the_numbers_in_c_are_those_of_the_table() -> None:
    (numbers,) = re.findall(r"enum \{ /\* formats.*?\};", HEADER.read_text(), re.DOTALL)
    compiled = {
        name.lower(): int(code) for name, code in re.findall(r"ADPSGD_(\w+) = (-?\d+)", numbers)
    }
    assert compiled.pop("own") == OWN.code
    assert compiled.pop("dtypes") == len(DTYPE_CODES)  # behind the element types
    assert compiled.pop("int16") not in {each.code for each in FORMATS}  # of offers only
    assert compiled == DTYPE_CODES | {each.name: each.code for each in FORMATS if each is not OWN}
    assert all(each.is_coded == (each.code >= len(DTYPE_CODES)) for each in FORMATS)


def test_each_chosen_format_has_fewer_bits_than_the_one_before() -> None:
    assert CHOSEN[0] is OWN and all(each in FORMATS for each in CHOSEN)
    bits = [each.bits for each in CHOSEN[1:]]
    assert bits == sorted(set(bits), reverse=True)


def test_every_name_is_an_option_and_reaches_the_engine() -> None:
    plan = RandomPairs().plan(0, 4)
    for each in FORMATS:
        options = EngineOptions.of(Config(wire_dtype=each.name.upper()), plan)
        assert (options.wire_format, options.chooses_format) == (each.code, False)
    options = EngineOptions.of(Config(wire_dtype=AUTO, exchange_share="auto"), plan)
    assert (options.wire_format, options.chooses_format) == (OWN.code, True)
