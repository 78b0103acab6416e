"""Plans of clusters: against closed forms, and what they cost."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hvd_adpsgd_lab import simulate
from hvd_adpsgd_lab.simulate import units
from hvd_adpsgd_lab.simulation.planner import (
    Cluster,
    failure_times,
    plan,
    synchronous_goodput,
    theoretical_decay,
)

from hvd_adpsgd.errors import ConfigError
from tests.lab.clusters import changed


def fast(n: int, **changes: Any) -> Cluster:
    """Messages take no time beside a step."""
    fields = {
        "parameters": 1e5,
        "step_s": 0.35,
        "bytes_per_s": 1.25e9,
        "latency_s": 50e-6,
        "minutes": 0.25,
    }
    return changed(Cluster(super_learners=n, **fields), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [16, 64, 256])
def test_random_pairs_decay_as_in_theory(n: int) -> None:
    outcome = plan(fast(n))
    low, high = theoretical_decay(n)  # type: ignore[misc]
    assert outcome.decay is not None
    assert 0.95 * low <= outcome.decay <= 1.05 * high
    assert outcome.exchanges_per_step == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("share", [0.5, 0.25, 1 / 16])
def test_a_byte_of_a_share_brings_models_together_as_one_of_whole_exchanges(share: float) -> None:
    n = 64
    whole, outcome = plan(fast(n)), plan(fast(n, exchange_share=share))
    low, high = theoretical_decay(n, share)  # type: ignore[misc]
    assert outcome.decay is not None
    assert 0.95 * low <= outcome.decay <= 1.05 * high
    assert outcome.exchanges_per_step == pytest.approx(1, abs=0.1)
    assert outcome.bytes_per_s[0] == pytest.approx(share * whole.bytes_per_s[0], rel=0.1)


def test_16_bits_on_the_wire_are_half_of_the_bytes() -> None:
    whole, half = plan(fast(8)), plan(fast(8, wire_dtype="bfloat16"))
    assert half.bytes_per_s[0] == pytest.approx(whole.bytes_per_s[0] / 2, rel=0.02)
    assert half.decay is None
    sums = {"averaging": "periodic_averaging:period=2"}  # of all bits
    assert plan(fast(8, wire_dtype="bfloat16", **sums)).bytes_per_s == pytest.approx(
        plan(fast(8, **sums)).bytes_per_s, rel=0.02
    )
    with pytest.raises(ConfigError, match=r"wire_dtype is 'int3', allowed is str float32"):
        fast(8, wire_dtype="int3")


def test_gossip_waits_for_no_slow_one_and_periodic_averaging_does() -> None:
    slow = {"slow": 1, "slow_factor": 5.0}
    gossip = plan(fast(8, **slow))
    assert gossip.steps_kept == pytest.approx((7 + 1 / 5) / 8, abs=0.02)
    means = plan(fast(8, averaging="periodic_averaging:period=2", **slow))
    assert means.steps_kept == pytest.approx(1 / 5, abs=0.05)


def test_a_link_bounds_the_exchanges() -> None:
    outcome = plan(fast(16, parameters=350e6, minutes=4))
    assert outcome.bytes_per_s[0] == pytest.approx(1.25e9, rel=0.1)
    sent_per_exchange = 4 * 350e6
    steps_per_s = 1 / 0.35
    assert outcome.exchanges_per_step * steps_per_s * sent_per_exchange == pytest.approx(
        1.25e9, rel=0.2
    )


@pytest.mark.parametrize("changes", [{}, {"failures_per_hour": 60.0}])
def test_no_more_is_sent_than_the_link_carries(changes: dict[str, float]) -> None:
    """What still waits for the link is not sent; one that has failed has sent while it lived."""
    outcome = plan(fast(8, parameters=3e9, minutes=2, **changes))
    assert bool(outcome.failed) == bool(changes)
    assert outcome.bytes_per_s[0] <= outcome.bytes_per_s[1] < 1.001 * 1.25e9
    assert outcome.bytes_per_s[0] > 0.8 * 1.25e9
    assert outcome.steps_kept <= 1


def test_synchronous_training_is_not_planned_as_if_nobody_waited() -> None:
    with pytest.raises(ConfigError, match="the line 'synchronous'"):
        fast(8, averaging="synchronous")


def test_who_fails_stops_and_the_others_go_on() -> None:
    outcome = plan(fast(16, minutes=4, failures_per_hour=5))
    expected = 16 * (1 - math.exp(-4 / 60 * 5))
    assert 1 <= outcome.failed <= 3 * expected
    survivors = sorted(outcome.steps)[outcome.failed :]
    assert min(survivors) > 0.97 * 4 * 60 / 0.35


def test_each_fails_at_a_time_of_its_own() -> None:
    times = [at_s for _, at_s in failure_times(fast(2**14, failures_per_hour=0.5))]
    assert len(set(times)) == 2**14 and min(times) > 0
    assert sum(times) / 2**14 == pytest.approx(7200, rel=0.03)
    assert sum(at_s < 7200 for at_s in times) / 2**14 == pytest.approx(1 - math.exp(-1), abs=0.02)


def test_synchronous_goodput_is_that_of_its_model() -> None:
    quiet = fast(2, parameters=1.0, spread=0.0, latency_s=0.0)
    assert synchronous_goodput(quiet) == pytest.approx(1)
    failing = fast(2, parameters=1.0, spread=0.0, latency_s=0.0, failures_per_hour=0.5)
    rate, interval = 1 / 3600, math.sqrt(2 * 30 * 3600)
    expected = 1 / ((1 + 30 / interval) * (1 + rate * (300 + interval / 2)))
    assert synchronous_goodput(failing) == pytest.approx(expected)


def test_an_engine_does_as_much_per_step_however_many_there_are() -> None:
    turns = [plan(fast(n)).turns / sum(plan(fast(n)).steps) for n in (16, 256)]
    assert turns[1] == pytest.approx(turns[0], rel=0.1)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    arguments = (
        "--super-learners 8 --model 1M --step 100ms --network 1Gb/s,1ms --slow 1x2 --fail 1/h"
    )
    assert simulate.main([*arguments.split(), "--minutes", "0.2", "--json", str(path)]) == 0
    assert "steps kept" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["cluster"]["bytes_per_s"] == 125e6
    assert len(found["steps"]) == 8


@pytest.mark.parametrize(
    "arguments",
    [
        "--super-learners 0",
        "--step 0s",
        "--slow 1x0",
        "--slow 1xnan",
        "--slow 9x10",
        "--network 0Gb/s,50us",
        "--random-seed -1",
        *(f"--minutes {value}" for value in ("nan", "0", "inf")),
        "--options exchange_share=2",
        "--options max_staleness=-1",
    ],
)
def test_a_number_out_of_its_bound_is_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(["--super-learners", "4", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert arguments.split()[-1].split("=")[0] in printed.err or arguments.split()[0] in printed.err
    assert "allowed is" in printed.err


@pytest.mark.parametrize(
    "option", ["--json /nowhere/file", "--json .", "--figure /nowhere/a.png", "--figure plan.xyz"]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_plan(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "plan", lambda *_: pytest.fail("it was simulated"))
    assert simulate.main(["--super-learners", "4", *option.split()]) == 2
    assert "Name a file" in capsys.readouterr().err


def test_less_than_a_step_is_not_planned() -> None:
    with pytest.raises(ConfigError, match=r"0\.001 minutes \(--minutes\) are less than a step"):
        fast(4, minutes=0.001)
    fast(4, minutes=0.35 / 60)


def test_a_plan_tells_how_far_it_is() -> None:
    """And is the same plan."""
    told: list[float] = []
    watched = plan(fast(4), told.append)
    assert told == sorted(told) and told[0] < 0.1 and told[-1] == pytest.approx(1)
    assert watched.steps == plan(fast(4)).steps


def test_units() -> None:
    assert units.model("350M") == 350e6
    assert units.network("10Gb/s,50us") == (1.25e9, pytest.approx(50e-6))
    assert units.slow("1x10") == (1, 10.0)
    assert units.failures("0.24/d") == pytest.approx(0.01)
    for bad in (
        lambda: units.model("3Q"),
        lambda: units.slow("ten"),
        lambda: units.slow("1x1.2.3"),
        lambda: units.network("fast"),
    ):
        with pytest.raises(ConfigError, match="Pass"):
            bad()
