"""If the two sides of an exchange want different formats, both use the one of fewer bits."""

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.formats import BY_NAME, CHOSEN, FORMATS, Format
from tests.members import DEADLINE_S, Member, come_to_rest, connect_all

ELEMENTS = 8 * 1024
EXCHANGES = 40  # one of 16 offers has 16 bits, and the first ones


CODES = {each.bits: each.code for each in CHOSEN}


def bytes_of(bits: tuple[int, int]) -> list[float]:
    """Bytes that each of two engines sends per exchange, in models; the mean of the two stays the same."""
    pair = [Member(rank, ELEMENTS, rate=0.0, chooses_format=True) for rank in (0, 1)]
    mean = sum(member.model.state() for member in pair) / 2
    for member, wanted in zip(pair, bits, strict=True):
        member.loop.use_format(CODES[wanted])
        member.loop.start()
    ends, done = time.monotonic() + DEADLINE_S, [0, 0]
    while sum(done) < EXCHANGES:
        asks = sum(done) % 2  # the passive side has the last word
        pair[asks].loop.ask(1 - asks)
        done[asks] += 1
        while min(member.loop.finished() for member in pair) < sum(done):
            connect_all(pair)
            for member in pair:
                member.step()
            assert time.monotonic() < ends, pair[asks].loop.view()
    counters = come_to_rest(pair)
    np.testing.assert_allclose(sum(m.model.state() for m in pair) / 2, mean, rtol=0, atol=1e-6)
    return [found["bytes_sent"] / EXCHANGES / (4 * ELEMENTS) for found in counters]


@pytest.mark.parametrize(
    ("bits", "least", "most"),
    [((0, 0), 1.0, 1.0), ((8, 0), 0.25, 0.3), ((0, 4), 0.12, 0.18), ((8, 4), 0.12, 0.18)],
)
def test_an_exchange_has_the_fewer_bits(bits: tuple[int, int], least: float, most: float) -> None:
    for each in bytes_of(bits):
        assert least <= each <= most


@pytest.mark.parametrize("wire", ["auto", "int8"])
def test_the_leader_chooses_only_where_it_may(wire: str) -> None:
    shares: list[float] = []
    told: list[int] = []
    engine = Engine.__new__(Engine)
    engine.config = Config(wire_dtype=wire, exchange_share="auto")
    engine.loop = cast(Any, SimpleNamespace(move_share=shares.append, use_format=told.append))
    engine._moves = lambda share: None  # type: ignore[method-assign]
    engine.move_share(0.5, BY_NAME["int4"])
    assert told == ([BY_NAME["int4"].code] if wire == "auto" else []) and shares == [0.5]


@pytest.mark.parametrize("wire_format", [-2, 0, 2, 6, 99])
def test_a_format_that_no_exchange_chooses(wire_format: int) -> None:
    member = Member(0, chooses_format=True)
    with pytest.raises(ValueError, match=f"cannot have the format {wire_format}"):
        member.loop.use_format(wire_format)
    member.wire.close()


@pytest.mark.parametrize("own", FORMATS)
def test_a_fixed_format_does_not_change(own: Format) -> None:
    member = Member(0, wire_format=own.code)
    member.loop.use_format(own.code)
    for other in {*FORMATS} - {own}:
        with pytest.raises(ValueError, match="cannot have the format"):
            member.loop.use_format(other.code)
    member.wire.close()
