"""Chunks without a correction that are copied to the engine in some steps only: every promise holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_adpsgd.simulation import shrink
from hvd_adpsgd.simulation.scenario import Scenario, rounds_of, run

SEEDS = [seed for seed in range(400) if rounds_of(Scenario.random(seed).strategy, 4)[0] is None]


@pytest.mark.parametrize("every", [2, 8])
def test_every_promise_holds_and_the_mirror_lacks_local_updates_only(every: int) -> None:
    """Also beside crashes, joins, shared memory and few bits; the mirror is checked in each step."""
    for seed in SEEDS:
        drawn = replace(Scenario.random(seed), copy_every=every, share=0.25, max_staleness=0)
        run(drawn)


def test_seeds_of_the_campaign_copy_seldom() -> None:
    drawn = [Scenario.random(seed) for seed in range(2000, 2400)]
    assert {s.copy_every for s in drawn} == {1, 2, 4, 8}
    assert all(s.share < 1 for s in drawn if s.copy_every > 1)
    assert any("chunks copied every 4th step" in str(s) for s in drawn)
    assert all(Scenario.random(seed).copy_every == 1 for seed in range(0, 2000, 7))


def test_seeds_of_the_campaign_have_few_bits() -> None:
    drawn = [Scenario.random(seed) for seed in range(3000, 3400)]
    few = [s for s in drawn if s.wire.startswith("int")]
    assert {s.wire for s in few} == {"int8", "int4"}
    assert any(not s.hosts for s in few), "all on one host, where messages have all bits"
    assert not any(Scenario.random(seed).wire.startswith("int") for seed in range(0, 3000, 7))


def test_seeds_of_the_campaign_change_bits() -> None:
    drawn = [Scenario.random(seed) for seed in range(5000, 5400)]
    chosen = [s for s in drawn if s.wire == "auto"]
    assert any(not s.hosts for s in chosen), "all on one host, where messages have all bits"
    bits = {fault.value for s in chosen for fault in s.faults if fault.kind == "bits"}
    assert bits == {0, 4, 8}
    assert not any(Scenario.random(seed).wire == "auto" for seed in range(0, 5000, 7))
    for s in chosen[:5]:
        assert all(isinstance(each, Scenario) for each in shrink._smaller(s))


def test_every_promise_holds_with_aimed_windows() -> None:
    for seed in range(400):
        run(replace(Scenario.random(seed), aims=True, share=0.25))


def test_seeds_of_the_campaign_aim() -> None:
    drawn = [Scenario.random(seed) for seed in range(4000, 4400)]
    assert {s.aims for s in drawn} == {False, True}
    assert all(s.share < 1 for s in drawn if s.aims)
    assert any(str(s).count("aimed windows") for s in drawn)
    assert not any(Scenario.random(seed).aims for seed in range(0, 4000, 7))


def test_a_failing_scenario_is_first_tried_with_whole_copies() -> None:
    drawn = replace(Scenario.random(3), copy_every=8)
    assert any(s.copy_every == 1 for s in shrink._plainer(drawn))
