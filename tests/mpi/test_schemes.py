"""Every averaging scheme on real learners, against its law in numpy, in float64.

Each launch runs many cases (programs/schemes.py), and the tests look at what the learners were.
"""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_adpsgd.strategies import STRATEGIES
from tests.launcher import needs_horovod_inside, once, run_learners
from tests.mpi.events import FREE as AT_EVENTS
from tests.mpi.events import STEPS, FreeRun, events
from tests.mpi.simulation import (
    FREE,
    GOSSIP,
    HALF,
    LAWS,
    ONE_OF_A_KIND,
    RESUMED,
    Setting,
    Simulation,
)

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "schemes.py"
UNEVEN = PROGRAM.with_name("uneven.py")
GOLDEN = Path(__file__).parents[1] / "golden"
DEADLINE_S, LEAVE_S = 0.5, 0.25
ALONE = {
    "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
    "HVD_ADPSGD_DEADLINE_S": str(DEADLINE_S),
    "HVD_ADPSGD_LEAVE_DEADLINE_S": str(LEAVE_S),
}
ROUNDING = 1e-13  # of models of size 3 after 14 steps
THREE = pytest.param("3x1", marks=pytest.mark.extended)
PLACES = ("4x1", "2x2", THREE)  # super learners x learners of each

Facts = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """What the learners of a launch said and were.

    Attributes:
        said: by case, then by rank.
        models: by case, shape (learners, steps, elements).
        index: of these elements in the model.
    """

    said: dict[str, list[Facts]]
    models: dict[str, Any]
    index: Any

    def super_learners(self, case: str) -> Any:
        """The models of the leaders, shape (steps, n, elements)."""
        k = int(case.split("/")[0].split("x")[1])
        return self.models[case][::k].swapaxes(0, 1)


@once
def trained(group: str, learners: int) -> Trained:
    """A launch of programs/schemes.py. It prints its seed; SEED=n chooses another."""
    with tempfile.TemporaryDirectory() as folder:
        args = [folder, group, str(learners)]
        result = run_learners(learners, PROGRAM, args=args, timeout=280).checked()
        print(result.stderr)
        files = [np.load(Path(folder) / f"{rank}.npz") for rank in range(learners)]
        models = {name: np.array([file[name] for file in files]) for name in files[0].files}
    return Trained(result.by_case(), models, models.pop("index")[0])


def at(place: str) -> tuple[Trained, int, int]:
    """The laws of that place; n super learners, k learners of each."""
    n, k = map(int, place.split("x"))
    return trained("laws", n * k), n, k


def simulation(place: str, setting: Setting) -> Simulation:
    run, n, k = at(place)
    return Simulation(setting, n, k, run.index)


@pytest.mark.parametrize("spec", [*LAWS, "synchronous"])
@pytest.mark.parametrize("place", PLACES)
def test_models_follow_the_law(place: str, spec: str) -> None:
    run, _, k = at(place)
    case = f"{place}/{spec}"
    momentum = 0.9 if k == 1 or spec == "synchronous" else 0.0
    expected = simulation(place, Setting(spec, momentum=momentum)).run()
    found = run.models[case][::k].swapaxes(0, 1)
    assert found.shape == expected.shape
    assert np.abs(expected[-1]).max() > 0.5, "nothing was trained"
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING)
    assert all(facts["node"] for facts in run.said[case])


@pytest.mark.parametrize("gossip", GOSSIP)
@pytest.mark.parametrize("place", PLACES)
def test_global_average_keeps_the_mean_and_makes_all_alike(place: str, gossip: str) -> None:
    run, _, k = at(place)
    case = f"{place}/gossip_pga:period=4+{gossip}"
    expected = simulation(place, Setting("delay_by_one", curvature=0.0)).run().mean(axis=1)
    for facts in run.said[case]:
        assert facts["alike"] == [True] * 3, facts
        assert [facts["apart"][step] for step in (0, 3, 4, 7, 13)] == [
            True,
            False,
            True,
            False,
            True,
        ]
    leaders = run.said[case][::k]
    assert [facts["means"] for facts in leaders] == [3] * len(leaders)
    assert sum(facts["exchanges"] for facts in leaders) > 0, "no gossip between the means"
    for models in run.models[case]:
        np.testing.assert_allclose(models, expected[3::4], rtol=0, atol=1e-12)


def at_events(spec: str) -> FreeRun:
    return FreeRun(Setting(spec, steps=STEPS, momentum=0.9), trained("laws", 4).index)


@pytest.mark.parametrize("spec", AT_EVENTS)
def test_free_running_schemes_follow_the_law_at_given_events(spec: str) -> None:
    """Exchanges between steps, of peers that are steps apart, and owed until the next step's end."""
    run, case = trained("laws", 4), f"4x1/events/{spec}"
    expected = at_events(spec).run()
    assert np.abs(expected[-1]).max() > 0.5, "nothing was trained"
    np.testing.assert_allclose(run.super_learners(case), expected, rtol=0, atol=ROUNDING)
    met = [sum(i in event for event in events(spec) if None not in event) for i in range(4)]
    assert [facts["exchanges"] for facts in run.said[case]] == met
    assert min(met) > 4


def summaries() -> dict[str, Any]:
    """Of each scheme some of the final models, and a number per step in which all have a part."""
    made = {}
    cases = [f"{place}/{spec}" for place in ("4x1", "2x2") for spec in (*LAWS, "synchronous")]
    for case in [*cases, *(f"4x1/events/{spec}" for spec in AT_EVENTS)]:
        models = trained("laws", 4).super_learners(case)
        weights = np.cos(np.arange(models[0].size)).reshape(models[0].shape)
        digest = (models * weights).sum(axis=(1, 2)).tolist()
        made[case] = {"digest": digest, "final": models[-1][:, ::4].tolist()}
    return made


def test_trajectories_are_those_of_the_golden_file() -> None:
    golden = json.loads((GOLDEN / "schemes.json").read_text())["schemes"]
    found = summaries()
    assert set(found) == set(golden)
    for case, summary in golden.items():
        for what, numbers in summary.items():
            np.testing.assert_allclose(found[case][what], numbers, rtol=0, atol=1e-12, err_msg=case)


def exactly(spec: str) -> Setting:
    return Setting(spec, steps=7, curvature=0.5, exact=True)


@pytest.mark.parametrize("place", ["4x1", "2x2"])
@pytest.mark.parametrize(
    "spec",
    [
        "periodic_averaging:period=1",
        "periodic_averaging:period=2",
        "periodic_averaging:period=2,warm_up=3",
    ],
)
def test_plain_periodic_averaging_is_the_mean_of_the_models_to_the_bit(
    place: str, spec: str
) -> None:
    """With numbers whose sums are exact in any order."""
    run, _, _ = at(place)
    expected = simulation(place, exactly(spec)).run()
    np.testing.assert_array_equal(run.super_learners(f"{place}/exact/{spec}"), expected)


@pytest.mark.parametrize("place", ["4x1", "2x2"])
def test_block_momentum_of_nothing_is_plain_averaging_to_the_bit(place: str) -> None:
    """Through the rule, which a momentum of exactly 0 does not need."""
    run, _, _ = at(place)
    plain, block = (
        run.super_learners(f"{place}/exact/periodic_averaging:period=2{momentum}")
        for momentum in ("", ",block_momentum=1e-300")
    )
    np.testing.assert_array_equal(block, plain)


@pytest.mark.parametrize("place", PLACES)
def test_averaging_after_every_step_is_synchronous_sgd(place: str) -> None:
    """At n times the batch; also with momentum, which is linear in the gradients."""
    run, _, _ = at(place)
    spec = "periodic_averaging:period=1"
    assert all(facts["everybody"] for facts in run.said[f"{place}/exact/{spec}"])
    assert all(facts["everybody"] for facts in run.said[f"{place}/often/{spec}"])
    found, expected = (run.models[f"{place}/{name}"] for name in (f"often/{spec}", "synchronous"))
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)
    if place != "3x1":  # a third is no binary fraction
        found = run.models[f"{place}/exact/{spec}"]
        np.testing.assert_array_equal(found, run.models[f"{place}/exact/synchronous"])
        digests = {f["digest"] for f in run.said[f"{place}/exact/{spec}"]}
        assert digests == {f["digest"] for f in run.said[f"{place}/exact/synchronous"]}


@pytest.mark.parametrize("place", ["4x1", "2x2"])
@pytest.mark.parametrize(
    "spec",
    ["delay_by_one", "periodic_averaging:period=1", "synchronous_gossip:order=awc+random_pairs"],
)
def test_identical_shards_give_the_trajectory_of_one_learner_to_the_bit(
    place: str, spec: str
) -> None:
    run, _, _ = at(place)
    plain = run.said[f"{place}/same shards/plain"]
    averaged = run.said[f"{place}/same shards/{spec}"]
    assert len(plain) == len(averaged) == 4
    assert {facts["digest"] for facts in averaged} == {plain[0]["digest"]}
    np.testing.assert_array_equal(
        run.models[f"{place}/same shards/{spec}"], run.models[f"{place}/same shards/plain"]
    )


def test_super_learners_of_one_are_all_learners() -> None:
    assert {facts["super_size"] for facts in trained("laws", 4).said["size/1"]} == {4}
    assert {facts["super_size"] for facts in trained("laws", 4).said["size/2"]} == {2}
    assert {facts["super_size"] for facts in trained("laws", 4).said["size/4"]} == {1}


PLAIN = needs_horovod_inside("trains by horovod.torch alone")


@PLAIN
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_super_learner_is_plain_horovod(name: str) -> None:
    said = trained("laws", 4).said
    assert [f["digest"] for f in said[f"1x4/{name}"]] == [f["digest"] for f in said["1x4/horovod"]]
    assert len({f["digest"] for f in said["1x4/horovod"]}) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_of_one_super_learner_are_synchronous_training(name: str) -> None:
    """Over any backend: to rounding, as a sum's order may change from run to run."""
    run = trained("laws", 4)
    assert len({facts["digest"] for facts in run.said[f"1x4/{name}"]}) == 1
    synchronous = run.models["4x1/synchronous"]
    np.testing.assert_allclose(run.models[f"1x4/{name}"], synchronous, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", [*STRATEGIES, pytest.param("horovod", marks=PLAIN)])
def test_one_learner_is_the_plain_optimizer(name: str) -> None:
    said = trained("alone", 1).said
    assert said[f"1x1/{name}"][0]["digest"] == said["1x1/torch"][0]["digest"]


@pytest.mark.parametrize("spec", ONE_OF_A_KIND)
def test_learners_of_a_node_stay_the_same_when_nothing_makes_them_wait(spec: str) -> None:
    require_same(trained("later", 4).said[f"2x2/free/{spec}"])


def require_same(said: list[Facts]) -> None:
    assert [facts["same"] for facts in said] == [True] * 4
    assert said[0]["work"] > 0
    assert said[2]["work"] > 0


@pytest.mark.extended
def test_learners_of_a_node_stay_the_same_with_a_second_model() -> None:
    said = trained("nodes", 8).said["4x2/free/a2cid2"]
    assert [facts["same"] for facts in said] == [True] * 8
    assert sum(facts["work"] for facts in said) > 0


HOLDS = {"delayed_gradients": ["late"], "noloco:period=3": ["momentum", "slow"]}


@pytest.mark.parametrize("spec", RESUMED)
def test_a_scheme_in_step_goes_on_from_its_checkpoint_to_the_bit(spec: str) -> None:
    """What a round owes the models when they settle, they have one step early."""
    run = trained("later", 4)
    setting = Setting(spec, steps=2 * HALF, momentum=0.9)
    expected = Simulation(setting, 4, 1, run.index).run(settle_after=HALF - 1)
    saved, resumed = (run.super_learners(f"4x1/{when}/{spec}") for when in ("saved", "resumed"))
    np.testing.assert_allclose(saved, expected, rtol=0, atol=ROUNDING)
    np.testing.assert_array_equal(resumed, saved[HALF:])
    facts = run.said[f"4x1/resumed/{spec}"]
    assert [f["digest"] for f in facts] == [f["digest"] for f in run.said[f"4x1/saved/{spec}"]]
    block = ["delta", "global", "start"] if "block" in spec else []
    assert {f["step"] for f in facts} == {HALF}
    assert [f["holds"] for f in facts] == [HOLDS.get(spec, block)] * 4


def mean_of_known_gradients(run: Trained, first: int, last: int, k: int = 1) -> Any:
    """What the mean model moves by in these steps."""
    setting = Setting("synchronous", curvature=0.0, steps=last)
    mean = Simulation(setting, 4 // k, k, run.index).run()[:, 0]
    return mean[-1] - (mean[first - 1] if first else 0)


@pytest.mark.parametrize("spec", FREE)
def test_nothing_on_its_way_is_lost_when_a_checkpoint_is_saved(spec: str) -> None:
    run = trained("later", 4)
    said = run.said[f"4x1/saved/{spec}"]
    steps = said[0]["steps"]
    assert all(facts["owed"] for facts in said), "nothing was on its way: nothing is shown"
    assert all(facts["exchanges"] > 0 for facts in said)
    settled, ended = run.super_learners(f"4x1/saved/{spec}")
    until = mean_of_known_gradients(run, 0, steps)
    np.testing.assert_allclose(settled.mean(axis=0), until, rtol=0, atol=1e-12)
    assert np.ptp(settled, axis=0).max() > 1e-3, "each super learner has saved its own"
    assert np.ptp(ended, axis=0).max() == 0
    np.testing.assert_allclose(
        ended[0], mean_of_known_gradients(run, 0, steps + HALF), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("spec", "place"),
    [(spec, "4x1") for spec in FREE] + [(spec, "2x2") for spec in ("random_pairs", "random_ring")],
)
def test_the_mean_model_goes_on_from_the_checkpoints(spec: str, place: str) -> None:
    """With four super learners, each from its own file; with two, from the mean of the files."""
    run = trained("later", 4)
    settled = run.super_learners(f"4x1/saved/{spec}")[0].mean(axis=0)
    ended = run.super_learners(f"{place}/resumed/{spec}")[0]
    moved = mean_of_known_gradients(run, 0, 20)
    np.testing.assert_allclose(ended - settled, np.tile(moved, (len(ended), 1)), atol=1e-12)
    assert sum(facts["exchanges"] for facts in run.said[f"{place}/resumed/{spec}"]) > 0


@pytest.mark.parametrize("spec", ["random_pairs", "delay_by_one", "synchronous_gossip"])
@pytest.mark.parametrize("place", PLACES)
def test_consensus_distance_is_that_of_the_models(place: str, spec: str) -> None:
    run, _, k = at(place)
    case = f"{place}/distance/{spec}"
    assert run.said[case][0]["expected"] > 0.1
    for facts in run.said[case]:
        assert facts["measured"] == pytest.approx(facts["expected"], rel=1e-12)
        assert facts["kept"], "parameters changed"
    expected = simulation(place, Setting("synchronous", steps=10, curvature=0.0)).run()[-1]
    found = run.models[case][::k, 1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    if spec == "delay_by_one":  # the mean on its way was not touched
        delayed = simulation(place, Setting(spec, steps=10, curvature=0.0)).run()[-1]
        np.testing.assert_allclose(run.models[case][::k, 0], delayed, rtol=0, atol=1e-12)


REFUSED = {
    "a2cid2": ("ConfigError", ("nothing to accelerate", "4 or more")),
    "0.5 delay_by_one": ("ConfigError", ("exchange_share=0.5 with averaging=delay_by_one",)),
    "auto delay_by_one": ("ConfigError", ("exchange_share=auto with averaging=delay_by_one",)),
    "auto a2cid2": ("ConfigError", ("exchange_share", "random_pairs")),
    "class": ("ConfigError", ("RandomPairs",)),
    "closure": ("UnsupportedOptimizerError", ("closure", "delay_by_one")),
    "group/delayed_gradients": ("UnsupportedOptimizerError", ("add_param_group", "wrap")),
    "group/periodic_averaging:block_momentum=0.5": ("UnsupportedOptimizerError", ("block",)),
    "group/noloco": ("UnsupportedOptimizerError", ("noloco",)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", PLACES)
def test_wrong_use_is_an_error_on_every_learner(place: str, name: str) -> None:
    run, n, k = at(place)
    if name == ("a2cid2" if n > 3 else "auto a2cid2"):
        return
    kind, words = REFUSED[name]
    said = run.said[f"{place}/refused/{name}"]
    assert [facts.get("error") for facts in said] == [kind] * (n * k), said
    for facts in said:
        for word in words:
            assert word in facts["text"]


def finite(models: Any) -> Any:
    return np.isfinite(models).all(axis=-1)


@pytest.mark.parametrize(
    "spec", ["periodic_averaging:period=2", "delay_by_one", "delayed_gradients"]
)
def test_the_mean_is_made_without_a_model_that_is_not_finite(spec: str) -> None:
    run = trained("later", 4)
    models = run.super_learners(f"4x1/nan/{spec}")
    assert not finite(models[1:, 0]).any(), "super learner 0 was to have failed"
    assert finite(models[:, 1:]).all()
    expected = Simulation(Setting(spec, steps=8), 4, 1, run.index)
    after = []
    delayed = spec.startswith("delay")
    for step in range(8):
        expected.alone = (0,) if step >= 1 + delayed else ()  # step 1 takes in what step 0 left
        expected.step(step)
        after.append(expected.W)
    np.testing.assert_allclose(models[:, 1:], np.array(after)[:, 1:], rtol=0, atol=ROUNDING)


def test_a_mean_that_a_script_takes_is_no_local_update_of_gasloc() -> None:
    everybody = trained("later", 4).said["4x1/mean in a block"]
    assert len(everybody) == 4
    for facts in everybody:
        assert facts["apart"] < 1e-12 < 1e-3 < facts["local"], facts


@pytest.mark.parametrize("spec", ["gasloc:period=50", "noloco:period=50", "a2cid2"])
def test_what_belongs_to_an_own_model_is_not_resumed_with_the_mean(spec: str) -> None:
    everybody = trained("later", 4).said[f"4x1/of the mean/{spec}"]
    assert len(everybody) == 4
    for facts in everybody:
        assert facts["of mean"] and facts["anew"], facts
        assert not facts["own"] and facts["again"], facts


@pytest.mark.parametrize(
    "spec",
    [
        "synchronous_gossip:order=awc+random_pairs",
        "synchronous_gossip:order=atc+fixed_ring",
        "noloco:period=2",
        "gossip_pga:period=2",
    ],
)
def test_pairs_go_on_beside_a_model_that_is_not_finite(spec: str) -> None:
    models = trained("later", 4).super_learners(f"4x1/nan/{spec}")
    assert not finite(models[1:, 0]).any()
    assert finite(models[:, 1:]).all()


@functools.cache
def uneven() -> dict[str, list[Facts]]:
    """Three super learners; the first leaves early."""
    return run_learners(3, UNEVEN, env=ALONE).checked().by_case()


@pytest.mark.parametrize(
    ("spec", "period"),
    [
        ("delay_by_one", 1),
        ("delayed_gradients", 1),
        ("periodic_averaging:period=2", 2),
        ("periodic_averaging:period=1,block_momentum=0.5", 1),
        ("gossip_pga:period=2", 2),
    ],
)
def test_who_makes_more_steps_than_a_mean_of_all_can_is_told(spec: str, period: int) -> None:
    first, *others = uneven()[spec]
    assert "error" not in first, first
    assert first["steps"] == 3
    for facts in others:
        assert facts["error"] == "PeerFailedError", facts
        assert "learner 0 has left" in facts["text"]
        assert "the same number of steps" in facts["text"]
        assert 3 <= facts["steps"] <= 3 + period


@pytest.mark.parametrize(
    "spec",
    [
        "synchronous_gossip:order=awc+fixed_ring",
        "synchronous_gossip:order=atc+random_pairs",
        "noloco:period=1",
    ],
)
def test_pairs_go_on_without_the_one_that_left(spec: str) -> None:
    said = uneven()[spec]
    assert [facts["steps"] for facts in said] == [3, 12, 12]
    assert not [facts for facts in said if "error" in facts or not facts["finite"]]


@pytest.mark.parametrize(
    ("spec", "operation"),
    [
        ("delay_by_one", "allreduce_async"),
        ("synchronous_gossip:order=atc+random_pairs", "allreduce"),
    ],
)
def test_an_operation_after_fewer_steps_is_an_error_of_all(spec: str, operation: str) -> None:
    """Learner 0 waits in it for the others, which wait for its fourth step."""
    for rank, facts in enumerate(uneven()[f"{spec}, then an operation"]):
        assert facts["error"] == "CollectiveMismatchError", facts
        assert f"learner 0 is in {operation} at " in facts["text"], facts
        assert "uneven.py" in facts["text"] and " after 3 steps, and learner " in facts["text"]
        assert facts["steps"] in ((3,) if rank == 0 else range(3, 12)), facts


def test_who_ends_early_is_waited_for_and_left_behind() -> None:
    """The process of learner 0 ends: from then on the mean is that of the others."""
    env = {**ALONE, "HVD_ADPSGD_DEADLINE_S": "120"}  # of the end of its process, on a busy machine
    result = run_learners(3, UNEVEN, args=["delay_by_one"], env=env).checked()
    assert result.by_rank() == [{"rank": r, "steps": n} for r, n in enumerate([3, 12, 12])]
