"""What scripts do beside the straight path (programs/habits.py), through the real engine."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launcher import once, run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "habits.py"
PLACES = ("4x1", "2x2")  # super learners x learners of each
IN_STEP = (
    "delay_by_one",
    "gossip_pga:period=2+random_pairs",
    "synchronous_gossip:order=awc+random_pairs",
)
NOLOCO, BLOCKS = "noloco:period=50", "periodic_averaging:period=50,block_momentum=0.5"


@once
def trained() -> dict[str, list[dict[str, Any]]]:
    return run_learners(4, PROGRAM, args=IN_STEP).checked().by_case()


def said(case: str) -> list[dict[str, Any]]:
    """What each learner said, by rank."""
    learners = trained()[case]
    assert len(learners) == 4, f"{case}: {learners}"
    return learners


@pytest.mark.parametrize("spec", IN_STEP)
@pytest.mark.parametrize("place", PLACES)
def test_a_skipped_step_keeps_nobody_waiting_and_the_mean_exact(place: str, spec: str) -> None:
    """12 gradients, 12 rounds or chances of one, whoever skipped which step."""
    for facts in said(f"{place}/skipped/{spec}"):
        assert facts["rounds"] == 12
        assert facts["error"] < 1e-12
        assert facts["same"], "learners of a super learner differ"


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_used_one_step_late_cannot_be_skipped(place: str) -> None:
    for facts in said(f"{place}/skipped late"):
        assert facts["error"] == "UnsupportedOptimizerError", facts
        assert "delay_by_one" in facts["text"]


@pytest.mark.parametrize("how", ["closure", "synchronize"])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_evaluates_or_synchronizes_twice_is_one_step(place: str, how: str) -> None:
    for facts in said(f"{place}/twice/{how}"):
        assert facts["apart"] == [True, False, True, False], "a mean after every second step"


@pytest.mark.parametrize("place", PLACES)
def test_who_waits_long_for_others_says_so_once(place: str) -> None:
    """One line per wait: the first leader comes when the others have written theirs.

    A step of delay_by_one waits once. On a busy machine other steps may wait as long, and say so.
    """
    k = int(place.split("x")[1])
    leaders = said(f"{place}/waited")[::k]
    for facts in leaders:
        for step in facts["steps"]:
            assert len(step["told"]) <= 1, facts
            assert step["took"] > 0.5 * len(step["told"]), facts
            assert all("has waited 0.5 s for other super learners" in t for t in step["told"])
    for facts in leaders[1:]:
        assert any(step["told"] for step in facts["steps"]), facts


@pytest.mark.parametrize("place", PLACES)
def test_only_the_outer_end_of_a_pause_sets_the_engine_going(place: str) -> None:
    for facts in said(f"{place}/nested"):
        assert facts["paused"] == [True, True, False]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("place", PLACES)
def test_average_model_does_not_spread_what_is_not_finite(place: str, policy: str) -> None:
    n, k = map(int, place.split("x"))
    for facts in said(f"{place}/{policy}/nan/1"):
        if policy == "raise":
            assert facts["error"] == "NonFiniteModelError", facts
            assert f"learner {(n - 1) * k}," in facts["text"] and "(0)" in facts["text"]
            assert facts["kept"]
        else:
            assert "error" not in facts
            assert facts["value"] == pytest.approx(sum(range(1, n)) / (n - 1), rel=1e-15)
    for facts in said(f"{place}/{policy}/nan/{n}"):
        assert facts["error"] == "NonFiniteModelError", "nobody is finite"
        assert math.isnan(facts["value"])
    for facts in said(f"{place}/{policy}/nan/weighted"):
        assert facts["error"] == "NonFiniteModelError", "those that are finite have no weight"
        assert facts["kept"]


@pytest.mark.parametrize("place", PLACES)
def test_a_mean_is_of_what_has_one(place: str) -> None:
    """Infinite buffers, caches and unequal shapes keep their values; the mean of finite numbers is finite."""
    n, k = map(int, place.split("x"))
    single, double = (float(np.finfo(kind).max) for kind in (np.float32, np.float64))
    signs = [-1.0] * (n - 1) + [1.0]
    mean = [(n - 1) / 2, (n + 2) / 2, single * sum(signs) / n, double * (sum(signs) / n), True]
    told = [facts["told"] for facts in said(f"{place}/odd")]
    for facts in said(f"{place}/odd"):
        me = facts["rank"] // k
        own = [
            float(me),
            1.0 + me if me else math.inf,
            signs[me] * single,
            signs[me] * double,
            True,
        ]
        means = facts["means"]
        assert means["averaged"] == pytest.approx(mean, rel=1e-6), facts
        assert means["without buffers"] == pytest.approx([mean[0], *own[1:]], rel=1e-6), facts
        assert means["average_model without buffers"] == means["without buffers"]
        assert means["average_model"] == pytest.approx(mean, rel=1e-6), facts
        assert facts["distance"] == "inf", "their squares are"
    lines = [text for text in told[0] if "shape_" in text or "observed_" in text]
    assert len(lines) == 2 and f"buffers ('shape_{place}') keep their own values" in lines[0], told
    assert f"NaN or Inf in 1 of {n} models; its mean is that of the others" in lines[1]
    assert told[1:] == [[]] * 3, "said once"


@pytest.mark.parametrize(
    "spec", ["periodic_averaging:period=2,block_momentum=0.9,nesterov=1", "noloco:period=2"]
)
@pytest.mark.parametrize("place", PLACES)
def test_buffers_get_the_plain_mean(place: str, spec: str) -> None:
    """Block momentum would carry a variance below zero."""
    n = int(place.split("x")[0])
    everybody = said(f"{place}/buffers/{spec}")
    for step in (1, 3, 5, 7):
        values = [facts["seen"][step] for facts in everybody]
        mine = 1 / (1 + step)
        if spec.startswith("noloco"):  # of pairs
            means = [mine + (i + j) / 2 for i in range(n) for j in range(i)]
            for value in (value for told in values for value in told):
                assert min(abs(value - mean) for mean in means) < 1e-6, values
        else:
            assert values == [pytest.approx([mine + (n - 1) / 2] * 3, rel=1e-6)] * 4


@pytest.mark.parametrize(
    ("spec", "last"),
    [
        ("periodic_averaging:period=2,block_momentum=0.9", 5),
        ("periodic_averaging:period=2,block_momentum=0.9,nesterov=1", 5),
        ("noloco:period=1,rate=1,momentum=0.9", 12),  # until the slow models of all have met
        ("delayed_gradients", 4),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_frozen_in_mid_run_comes_to_rest(place: str, spec: str, last: int) -> None:
    for facts in said(f"{place}/frozen/{spec}"):
        assert any(facts["moved"][:4])
        assert not any(facts["moved"][last + 1 :]), facts["moved"]


@pytest.mark.parametrize(
    "name",
    ["another scheme", "plain", f"4x1 {NOLOCO}", f"4x1 {BLOCKS}", f"older 4x1 {BLOCKS}"]
    + [f"damaged {what}" for what in ("step", "keys", "shapes", "kind")],
)
@pytest.mark.parametrize("spec", [NOLOCO, BLOCKS])
@pytest.mark.parametrize("place", PLACES)
def test_a_state_of_no_use_makes_the_scheme_start_anew(place: str, spec: str, name: str) -> None:
    """All of 5.0 was loaded as the model; what was remembered before is gone, and it is told."""
    for facts in said(f"{place}/loaded/{spec}/{name}"):
        held, told = facts["held"], facts["told"]
        used = name.endswith(spec) and (spec == BLOCKS or place == "4x1")
        assert used != any("starts anew" in line for line in told) or name == "plain", told
        key, still = ("slow", "momentum") if spec == NOLOCO else ("global", "delta")
        assert (held[key] == 5.0) != used, held
        assert (held[still] == 0.0) != used, held
        assert not any("outside" in line for line in told), told


@pytest.mark.parametrize("place", PLACES)
def test_a_state_loaded_in_mid_run_outside_a_pause_is_told_of(place: str) -> None:
    for facts in said(f"{place}/outside"):
        before, between, inside = facts["told"]
        assert not before, "no step was made yet"
        assert ["averaging_paused" in line for line in between] == [True]
        assert not inside


def test_a_step_left_by_an_exception_keeps_nobody_waiting() -> None:
    """One learner's optimizer fails once, its script goes on: the others do not wait for its round."""
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from tests.mpi.programs.learner import retired, step, wrap
        hvd.init()

        class Failing(torch.optim.SGD):
            fails = False

            def step(self, closure=None):
                if self.fails:
                    raise ArithmeticError("on purpose")
                return super().step(closure)

        for spec in ("delay_by_one", "periodic_averaging:period=2"):
            model, failed = torch.nn.Linear(3, 3), 0
            with retired(wrap(model, lambda ps: Failing(ps, lr=0.01), averaging=spec)) as optimizer:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
                for number in range(9):
                    Failing.fails = number == 4 and hvd.rank() == 1
                    try:
                        step(model, optimizer, torch.ones(2, 3) * (1 + hvd.rank()))
                    except ArithmeticError:
                        failed += 1
                hvd.average_model(model)
                distance = hvd.consensus_distance(model)
            say(case=spec, rank=hvd.rank(), failed=failed, distance=distance)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    cases = run_learners(2, program, env=env).checked().by_case()
    assert len(cases) == 2
    for said in cases.values():
        assert [facts["failed"] for facts in said] == [0, 1]
        assert all(facts["distance"] < 1e-7 for facts in said)
