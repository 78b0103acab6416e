"""More seeds than those of test_promises."""

import pytest
from hvd_adpsgd_lab.simulation.campaign import run_block

BLOCK = 500


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("first", range(1000, 6000, BLOCK))
def test_no_seed_breaks_a_promise(first: int) -> None:
    report = run_block(range(first, first + BLOCK))
    assert not report.failures, "\n".join(map(str, report.failures))
