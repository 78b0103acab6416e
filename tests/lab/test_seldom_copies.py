"""Chunks without a correction that are copied to the engine in some steps only: every promise holds."""

from dataclasses import replace

import pytest
from hvd_adpsgd_lab.simulation.scenario import Scenario, rounds_of, run

SEEDS = [
    seed for seed in range(400) if rounds_of(Scenario.random(seed).config.averaging, 4)[0] is None
]


@pytest.mark.parametrize("every", [2, 8])
def test_every_promise_holds_and_the_mirror_lacks_local_updates_only(every: int) -> None:
    """Also beside crashes, joins, shared memory and few bits; the mirror is checked in each step."""
    for seed in SEEDS:
        drawn = replace(Scenario.random(seed), copy_every=every)
        run(drawn.with_options(exchange_share=0.25, max_staleness=None))


def test_every_promise_holds_with_aimed_windows() -> None:
    for seed in range(400):
        run(replace(Scenario.random(seed), aims=True).with_options(exchange_share=0.25))
