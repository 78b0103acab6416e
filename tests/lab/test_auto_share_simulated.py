"""Shares that change while engines run, and exchange_share="auto" in virtual time."""

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hvd_adpsgd_lab import simulate
from hvd_adpsgd_lab.learning import faults
from hvd_adpsgd_lab.simulate import units
from hvd_adpsgd_lab.simulation.calibration import Calibration
from hvd_adpsgd_lab.simulation.job import Job
from hvd_adpsgd_lab.simulation.planner import PATIENT, Cluster, job_of
from hvd_adpsgd_lab.simulation.scenario import CODES, Fault, Scenario
from hvd_adpsgd_lab.simulation.steering import Choice, Steering

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.strategies.share_control import FLOOR, LINK
from tests.lab.clusters import changed

BOUND = 0.03
AUTO = PATIENT.replace(exchange_share="auto", max_overhead=BOUND)
GB, MB = 1.25e9, 1.25e6  # bytes/s of 10 Gb/s and of 10 Mb/s


@pytest.mark.parametrize(("bits", "wire"), [(5, "auto"), (8, ""), (4, "int8")])
def test_bits_that_no_exchange_can_have(bits: int, wire: str) -> None:
    with pytest.raises(ConfigError, match="allowed are 0, 8, 4 with wire_dtype 'auto'"):
        scenario = Scenario.random(0).with_options(wire_dtype=wire or None)
        replace(scenario, faults=(Fault(1.0, "bits", 0, (), bits),))


def test_who_trains_in_virtual_time_chooses_its_bits_by_itself() -> None:
    fault = Fault(1.0, "bits", 0, (), 4.0)
    with pytest.raises(ConfigError, match="has no such fault"):
        faults.checked([fault], 2, faults.KINDS, "random_pairs")


def steered(joins: int = 0, **changes: Any) -> tuple[Job, Steering]:
    """Eight super learners of 2.5 M parameters, whose steps differ by a third, at 10 Gb/s."""
    calibration = Calibration(2e-10, 1e-9)  # an exchange of the whole model costs a tenth of a step
    cluster = Cluster(8, 2.5e6, 0.1, GB, 5e-5, AUTO, spread=0.3, calibration=calibration)
    cluster = changed(cluster, **changes)
    draw = np.random.default_rng(0)
    models = [draw.standard_normal((cluster.chunks, 8)) for _ in range(8)]
    scale = cluster.model_nbytes / models[0].nbytes
    joining = (lambda *_: np.zeros_like(models[0])) if joins else None
    job = job_of(cluster, models, bytes_scale=scale, joining=joining, most=max(1, joins))
    assert isinstance(job.steer, Steering)
    return job, job.steer


def between(steering: Steering, first_s: float, last_s: float) -> list[Choice]:
    return [choice for choice in steering.choices if first_s <= choice.at_s < last_s]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def settled(choices: list[Choice], factor: float = 3.0) -> float:
    """The mean share, of choices that do not swing by more than a factor, and keep both bounds."""
    shares = [choice.share for choice in choices]
    assert max(shares) / min(shares) < factor
    assert mean([choice.overhead for choice in choices]) < BOUND
    assert mean([choice.demand for choice in choices]) < LINK
    return mean(shares)


def test_a_link_that_becomes_a_thousandth_and_recovers() -> None:
    job, steering = steered()
    for i in range(8):
        job.strike(60, "link", i, MB)
        job.strike(180, "link", i, GB)
    job.run_for(240)
    before = settled(between(steering, 20, 60))
    slow = settled(between(steering, 75, 180))
    assert FLOOR <= slow < before / 3
    after = settled(between(steering, 195, 240))
    assert before / 1.5 < after < 1.5 * before
    assert max(c.share for c in between(steering, 180, 240)) < 3 * before


@pytest.mark.parametrize("rate", [10 * MB, MB])
def test_a_slow_link_gets_few_bits_and_all_of_them_again(rate: float) -> None:
    shares = []
    for wire in ("", "auto"):
        job, steering = steered(wire_dtype=wire or None)
        for i in range(8):
            job.strike(60, "link", i, rate)
            job.strike(180, "link", i, GB)
        job.run_for(240)
        late = between(steering, 90, 180)
        shares.append(settled(late, 4.0))
    assert {choice.bits for choice in between(steering, 0, 60)} == {0}
    # one whose peers ask for few bits anyway may have given up its own trial
    assert sum(choice.bits > 0 for choice in late) > 0.7 * len(late)
    assert shares[1] > 2 * shares[0]
    assert {choice.bits for choice in between(steering, 210, 240)} == {0}


def test_the_use_of_a_link_counts_bytes_whatever_their_bits() -> None:
    cluster = Cluster(2, 2.5e6, 0.1, 10 * MB, 5e-5, AUTO.replace(wire_dtype="auto"))
    models = [np.full((cluster.chunks, 8), i, np.float32) for i in range(2)]
    job = job_of(cluster, models, bytes_scale=cluster.model_nbytes / models[0].nbytes)
    bits = itertools.cycle((0, 0, 4, 4))
    job.steer = lambda job, i: job.loop_of(i).use_format(CODES[next(bits)])
    job.run_for(60)
    counters = job.loop_of(0).counters()
    assert counters["link_s"] > 0.9 * counters["busy_s"]


@pytest.mark.parametrize("wire", ["", pytest.param("auto", marks=pytest.mark.extended)])
def test_exchanges_through_memory_do_not_count_as_the_link(wire: str) -> None:
    """Two super learners on each of two hosts: what the engines measure is what their links carry."""
    cluster = Cluster(
        4, 2.5e7, 0.1, 100 * MB, 5e-5, AUTO.replace(wire_dtype=wire or None), spread=0.3
    )
    models = [np.full((cluster.chunks, 256), i, np.float32) for i in range(4)]
    job = job_of(cluster, models, bytes_scale=cluster.model_nbytes / models[0].nbytes)
    job.share((0, 0, 1, 1), models[0].strides[0])
    assert isinstance(job.steer, Steering)

    def so_far() -> np.ndarray:
        sent = sum(nbytes for nbytes, *_ in job.traffic())
        return np.array([sent, sum(job.exchanges_of()), sum(job.summary()["steps"])])

    job.run_for(40)
    before = so_far()
    job.run_for(40)
    sent, exchanges, steps = so_far() - before
    used = sent / (4 * 40 * cluster.bytes_per_s)
    demand = mean([choice.demand for choice in between(job.steer, 40, 80)])
    assert 0.9 * demand < used < 1.1 * demand < LINK
    assert exchanges > 0.97 * steps  # one is due per step


def test_one_slow_link_slows_nobody_else() -> None:
    """The share of an exchange is the smaller one, so those with a peer behind the link cost little."""
    job, steering = steered()
    job.strike(0, "link", 0, MB)
    job.run_for(120)
    late = between(steering, 40, 120)
    slow = mean([choice.share for choice in late if choice.engine == 0])
    others = mean([choice.share for choice in late if choice.engine != 0])
    assert slow < others / 2
    assert mean([choice.demand for choice in late]) < LINK
    steps = job.summary()["steps"]
    assert min(steps) > 0.95 * max(steps)


def test_a_straggler_and_failures() -> None:
    job, steering = steered()
    job.strike(30, "slow", 0, 10.0)
    job.strike(40, "crash", 1)
    job.strike(50, "stop", 2, 10.0)
    job.run_for(120)
    before = mean([choice.share for choice in between(steering, 15, 30)])
    late = [choice for choice in between(steering, 70, 120) if choice.engine not in (0, 1)]
    assert {choice.engine for choice in late} == set(range(2, 8))
    assert before / 2 < settled(late) < 2 * before
    assert (
        mean([choice.overhead for choice in between(steering, 70, 120) if choice.engine == 0])
        < BOUND
    )


def test_one_joins_in_place_of_one_that_has_failed() -> None:
    """All have new engines then, which take the shares that the old ones had."""
    job, steering = steered(joins=1)
    job.strike(30, "crash", 1)
    job.strike(50, "join", 8)
    job.run_for(120)
    before, late = between(steering, 15, 30), between(steering, 60, 120)
    assert len({choice.engine for choice in late}) == 8
    assert {choice.engine for choice in late}.isdisjoint(choice.engine for choice in before)
    assert settled(before) / 1.5 < settled(late) < 1.5 * settled(before)


def test_few_exchanges_and_the_same_run_again() -> None:
    job, steering = steered(exchanges_per_step=0.1)
    job.run_for(200)
    late = between(steering, 100, 200)
    assert mean([choice.share for choice in late]) > 0.5  # each costs ten steps' bound
    again, other = steered(exchanges_per_step=0.1)
    again.run_for(200)
    assert repr(other.choices) == repr(steering.choices)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert units.fault("link,1,5s,10Mb/s") == Fault(5.0, "link", 1, (), MB)
    assert units.fault("share,1,5s,0.5") == Fault(5.0, "share", 1, (), 0.5)
    assert units.fault("bits,1,5s,4") == Fault(5.0, "bits", 1, (), 4.0)
    plan = ["--super-learners", "4", "--model", "1M", "--minutes", "0.1", "--options"]
    auto = [*plan, "exchange_share=auto"]
    assert simulate.main(auto) == 0
    told = capsys.readouterr().out
    assert "exchange_share=auto" in told
    assert "consensus decay" in told and "in theory" not in told  # that of a given share
    assert simulate.main([*auto, "wire_dtype=auto"]) == 0
    capsys.readouterr()
    for options, message in (
        ("wire_dtype=auto", "Set exchange_share=auto too"),
        ("max_overhead=2", "bad value for max_overhead"),
        ("max_overhead=x", "bad value for max_overhead"),
        ("exchange_shar=auto", "unknown option exchange_shar .*exchange_share"),
    ):
        assert simulate.main([*plan, options]) == 2
        assert re.search(message, capsys.readouterr().err)
