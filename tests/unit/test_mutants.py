"""Faults put into the engine on purpose still fit its sources: `make` targets would find out late."""

import pytest

from tests.lab import mutants as simulated
from tests.tsan import __main__ as tsan


@pytest.mark.parametrize(
    "mutant", [*simulated.MUTANTS, *tsan.MUTANTS], ids=lambda mutant: mutant.name
)
def test_its_text_is_in_the_source_once(mutant: simulated.Mutant | tsan.Mutant) -> None:
    source = (simulated.ROOT / simulated.ENGINE / mutant.file).read_text()
    assert source.count(mutant.old) == 1
