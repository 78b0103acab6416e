"""The wrapped optimizer on real learners.

Each launch runs many cases, and the tests look at what the learners said: starting Python, torch
and MPI takes longer than any case.
"""

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_adpsgd.config import Config, environment_name
from hvd_adpsgd.engine.turns import LOOKS
from hvd_adpsgd.errors import DeviceMovedError, ModelMismatchError
from hvd_adpsgd.training.parameters import Parameters
from tests.launcher import Result, horovod_inside, needs_horovod_inside, run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAMS = Path(__file__).with_name("programs")
SIZE = "HVD_ADPSGD_SUPER_LEARNER_SIZE"
OPTIMIZERS = "SGD nesterov Adam AdamW RMSprop Adagrad Adadelta NAdam RAdam".split()
STEPS = 12  # of same_inside.py
BY_HAND = {"as_by_hand": True, "apart": False}

Facts = dict[str, Any]


def launch(np: int, program: str, *args: str, **env: str) -> Result:
    """Run one of the programs; its seed is printed, and SEED=n repeats a run."""
    result = run_learners(np, PROGRAMS / program, args=args, env=env)
    print(program, "seed 7 (SEED=n chooses another)", result.stderr)
    return result.checked()


@functools.cache
def trained_in_pairs() -> dict[str, list[Facts]]:
    return launch(4, "same_inside.py", **{SIZE: "2"}).by_case()


def require_trained(said: Sequence[Facts], learners: int) -> None:
    """Identical in the super learner after every step; the engines exchanged meanwhile."""
    assert [facts["rank"] for facts in said] == list(range(learners))
    for facts in said:
        assert len(facts["same"]) >= STEPS and all(facts["same"]), facts
        assert facts["finite"], facts
        assert facts["warned"] == []
    assert sum(facts["exchanges"] or 0 for facts in said) >= 2, said


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_inside_with_every_optimizer(name: str) -> None:
    require_trained(trained_in_pairs()[name], 4)
    assert all(facts["is_instance"] for facts in trained_in_pairs()[name])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("closure", {"returns_loss": True}),
        ("accumulate", {}),
        ("clip", {"clipped": True}),
        ("changed", BY_HAND),
        ("changed_in_groups", BY_HAND),
        ("rebound", BY_HAND),
        ("changed_parts", BY_HAND),
        ("checkpointed", BY_HAND),
        ("naive_scaler", {"skipped": 3}),
        ("hooks", {"before": STEPS, "after": STEPS, "lr": pytest.approx(0.01 * 0.9**12)}),
        ("scaled", {"skipped": 3}),
        ("dynamic", {}),
        ("growing", {}),
        ("loaded", {"kept": True, "keys": ["averaging", "param_groups", "state"]}),
        ("mixture", {"frozen_kept": True}),
        ("mixture_fp16", {"frozen_kept": True}),
        ("mixture_adam", {"frozen_kept": True}),
        ("fp16", {}),
        ("groups", {}),
        ("list_of_groups", {}),
        ("predivided", {}),
        ("sum", {}),
        pytest.param("adasum", {}, marks=needs_horovod_inside("Adasum")),
        ("inner_set", {}),
        ("fixed_ring", {}),
        ("wire16", {}),
        ("sparse", {}),
        ("sparse_as_dense", {}),
    ],
)
def test_same_inside(name: str, found: Mapping[str, Any]) -> None:
    said = trained_in_pairs()[name]
    require_trained(said, 4)
    for facts in said:
        assert {key: facts[key] for key in found} == dict(found)


@pytest.mark.parametrize("name", ["mixture", "mixture_fp16", "mixture_adam"])
def test_every_kind_of_parameter_is_averaged(name: str) -> None:
    """Super learners begin at a distance of 1 in every element."""
    spread = trained_in_pairs()[name][0]["spread"]
    assert len(spread) == 11
    assert max(spread) < 0.6, spread  # it is trained until then


def test_groups_added_later_are_averaged() -> None:
    require_trained(trained_in_pairs()["growing"], 4)
    assert trained_in_pairs()["growing"][0]["groups"] == 4


def test_buffers_approach_each_other_if_asked() -> None:
    """Statistics of two super learners, once no batch changes them any more."""
    averaged, apart = (trained_in_pairs()[name] for name in ("buffers", "no_buffers"))
    require_trained(averaged, 4)
    require_trained(apart, 4)
    for facts in averaged:
        assert facts["spread"] < 0.1 * facts["frozen"], facts
    for facts in apart:
        assert facts["spread"] == facts["frozen"] > 0, facts


@pytest.mark.parametrize(
    ("np", "k", "names"),
    [(4, 2, ()), (3, 1, ("float64",)), pytest.param(4, 1, (), marks=pytest.mark.extended)],
)
def test_mean_moves_by_gradients_only(np: int, k: int, names: tuple[str, ...]) -> None:
    # a stall of average_model between backward() and step() would last beyond the launch
    env = {SIZE: str(k), "ADPSGD_CHUNK_KIB": "64", "HVD_ADPSGD_DEADLINE_S": "600"}
    cases = launch(np, "mean_of_models.py", *names, **env).by_case()
    beside = cases.pop("equal")
    assert [facts["kept"] for facts in beside] == [True] * np
    for facts in beside:
        assert facts["weighted"] < 1e-12
        assert facts["one"] < 1e-12
        assert facts["finite"], "weights whose sum is none"
        bad = {"negative", "nan", "all 0", "many", "too large"}
        assert set(facts["refusals"]) == bad, "on every learner"
        assert all("weight=" in text for text in facts["refusals"].values())
    exact = {"float64": 1e-12, "random_ring": 1e-12, "synchronized": 1e-12, "between": 1e-12}
    names = names or ("float32", "float16 wire", "bfloat16 wire", "bfloat16", *exact)
    assert set(cases) == set(names)
    bounds = {**exact, "bfloat16": 5e-2}  # there SGD rounds the models to 8 bits in every step
    for name, said in cases.items():
        assert len(said) == np
        assert sum(facts["exchanges"] for facts in said) > 0, "the engines did nothing"
        assert any(facts["apart"] for facts in said), "models were equal before average_model"
        for facts in said:
            assert facts["error"] < bounds.get(name, 1e-6), facts
            assert facts["later"] < bounds.get(name, 1e-6), facts
            assert facts["alike"], "average_model left learners apart"
            assert facts["again"], "average_model changed equal models"
            assert facts["same"], "learners of a super learner differ"


def like_horovod(np: int, *ways: str, **env: str) -> tuple[list[list[Facts]], str]:
    """What the learners said of each way, and what was logged."""
    result = launch(np, "like_horovod.py", *ways, **env)
    cases = result.by_case()
    assert all(len(cases[way]) == 2 * np for way in ways), result.report()
    return [[{**facts, "case": None} for facts in cases[way]] for way in ways], result.stderr


def test_one_super_learner_and_synchronous_are_plain_horovod() -> None:
    np = 4 if horovod_inside() else 2  # more have sums in another order than Horovod's
    ours = f"hvd_adpsgd.torch {SIZE}="
    ways = f"{ours}1 HVD_ADPSGD_AVERAGING=synchronous", f"{ours}1 Synchronous", f"{ours}{np}"
    (plain, _), (wrapped, stderr) = like_horovod(np, "horovod.torch"), like_horovod(np, *ways)
    assert wrapped == plain * 3
    lines = [line for line in stderr.splitlines() if "nothing to average" in line]
    assert len(lines) == 1 and "HVD_ADPSGD_SUPER_LEARNER_SIZE=k" in lines[0], stderr
    assert stderr.index(f"way {ways[2]}\n") < stderr.index(lines[0]), "others are asked for"


def horovod_script(
    np: int, folder: Path, epochs: int, launcher: str | None = "mpirun", **env: str
) -> Facts:
    args = ["--epochs", str(epochs), "--checkpoint-format", str(folder / "{epoch}.pt")]
    result = run_learners(np, PROGRAMS / "horovod_script.py", args=args, env=env, launcher=launcher)
    said = result.checked().by_rank()
    assert [facts["size"] for facts in said] == [np] * np
    assert all(facts["losses"] == said[0]["losses"] for facts in said), (
        "metrics are of all learners"
    )
    return said[0]


OURS = {"HOROVOD_MODULE": "hvd_adpsgd.torch"}


def require_learned(facts: dict[str, Any]) -> None:
    assert facts["resumed"] == 0
    assert facts["at_start"] < 0.7
    assert facts["losses"][-1] < 0.25 * facts["losses"][0]
    assert facts["accuracy"] > 0.95


def test_horovod_script_resumes_what_plain_horovod_has_begun(tmp_path: Path) -> None:
    plain = horovod_script(2, tmp_path, 3)
    require_learned(plain)
    resumed = horovod_script(4, tmp_path, 4, **OURS, **{SIZE: "2"})
    assert resumed["resumed"] == 3
    assert resumed["at_start"] > 0.95
    assert len(resumed["losses"]) == 1
    assert resumed["losses"][0] < 1.2 * plain["losses"][-1]


def test_checkpoint_of_plain_horovod_continues_identically(tmp_path: Path) -> None:
    horovod_script(1, tmp_path, 1, None)
    ours = horovod_script(1, tmp_path, 2, None, **OURS)
    (tmp_path / "2.pt").unlink()
    plain = horovod_script(1, tmp_path, 2, None)
    assert plain["resumed"] == 1
    assert ours == plain


REFUSED = {  # error | words of its text
    "before_init": "NotInitializedError | hvd.init()",
    "clipped_too_early": (
        "GradientOrderError | 'used. | and 1 more | 2 of 4 parameters | 'unused. | synchronize() | freeze"
    ),
    "clipped_too_early_on_one": "GradientOrderError | step 0 | while | averaged",
    "forgotten_broadcast": (
        "ModelMismatchError | step 2 | of the same super learner | hvd.broadcast_parameters"
    ),
    "fewer_steps_on_one": (
        "CollectiveMismatchError | learner 1 is in allreduce at | bad_uses.py | "
        "after 2 steps, and learner 0 waits for step 3 of learner 1 | on all learners of a super learner"
    ),
    "scaled_too_early": "GradientOrderError | 'used. | 2 of 4 | synchronize()",
    "stepped_too_early": "GradientOrderError | skip_synchronize() | its own",
    "changed_by_a_hook": "GradientOrderError | 'weight' | a hook | inside backward()",
    "adasum_of_a_script": "ConfigError | op=Adasum | leave op out",
    "clipped_with_adasum": "GradientOrderError | op=Adasum | without effect | hook",
    "averaged_in_adasum": "WorldError | average_model_async",  # the leaders', too
    "wrong_timeout": "ConfigError | timeout='soon' | seconds",
    "accumulated": "GradientOrderError | more than backward_passes_per_step=1 | zero_grad()",
    "accumulated_too_often": "GradientOrderError | backward_passes_per_step=2",
    "replaced": "GradientOrderError | in the step before | had been replaced | optimizer.zero_grad()",
    "dropped_and_set": "GradientOrderError | in the step before | had been replaced | optimizer.zero_grad()",
    "synchronized_and_replaced": (
        "GradientOrderError | in the step before | had been replaced | optimizer.zero_grad()"
    ),
    "clipped_while_accumulated": (
        "GradientOrderError | and 1 more | backward_passes_per_step=2 | synchronize() | "
        "Nothing was applied"
    ),
    "scaled_while_accumulated": "GradientOrderError | averaged | optimizer.synchronize()",
    "frozen_later": "GradientOrderError | 2 of 4 parameters | 'unused. | freeze",
    "plain_one_stepped": "UnsupportedOptimizerError | plain SGD | step() of what | GradScaler",
    "other_names": "ModelMismatchError | tensor 0 | weightx | learner 3 | same names",
    "other_shapes": "ModelMismatchError | weight float32[2, 3] | learner 2 | [3, 3]",
    "other_shapes_inside": "ModelMismatchError | learner 1 | [3, 3] | Build the same",
    "other_dtypes": "ModelMismatchError | float32 | learner 1 | float64",
    "other_count": "ModelMismatchError | 2 tensors | learner 3 | bias | only on learner 0",
    "other_frozen": "ModelMismatchError | bias | only on learner 0",
    "other_strategies": "StrategyMismatchError | seed=0 | learner 2 | seed=1 | averaging=",
    "other_wires": "StrategyMismatchError | wire_dtype=None | wire_dtype=float16",
    "argument optimizer": "StrategyMismatchError | optimizer=SGD | optimizer=Adam",
    "argument named_parameters": "ModelMismatchError | weight | noname",
    "argument compression": "StrategyMismatchError | =NoneCompressor | =FP16Compressor",
    "argument backward_passes_per_step": "StrategyMismatchError | _step=1 | _step=2",
    "argument op": "StrategyMismatchError | op=Average on learner 0 | op=Sum on learner 3",
    "argument gradient_predivide_factor": "StrategyMismatchError | _factor=1 | _factor=2",
    "argument num_groups": "StrategyMismatchError | num_groups=0 | num_groups=1",
    "argument groups": "StrategyMismatchError | groups=None | groups=[[weight, bias]]",
    "argument sparse_as_dense": "StrategyMismatchError | dense=False | dense=True",
    "argument average_gradients": "StrategyMismatchError | _gradients=True | =False",
    "argument buffers": "ModelMismatchError | 2 tensors | running_mean",
    "complex_numbers": "ModelMismatchError | weight | complex64 | float32 | Convert it",
    "complex_numbers_on_one": "ModelMismatchError | learner 1 | complex64",
    "lbfgs": "UnsupportedOptimizerError | LBFGS | Use SGD",
    "lbfgs_on_one": "UnsupportedOptimizerError | LBFGS | Use SGD",
    "twice": "UnsupportedOptimizerError | SGD | wrapped already | pass the plain",
    "shared_memory": "ModelMismatchError | 'other' | 'weight' | Parameter",
    "part_of_the_learners": "InnerOnlyError | process_set | 2 super learners | Leave",
    "value_on_one": "ConfigError | exchanges_per_step | -1 | > 0",
    "synchronous_beside_another": "StrategyMismatchError | synchronous | one strategy",
    "synchronous_beside_another_on_some": "StrategyMismatchError | synchronous | one strategy",
    "other_moments": "StrategyMismatchError | =None (shared) on learner 0 | =None (own) on",
    "other_group_inside": "ModelMismatchError | add_param_group | [2] | [3]",
    "average_other_models": "ModelMismatchError | average_model | learner 1 | [3, 3]",
    "wire_alone": "ConfigError | wire_dtype=auto | exchange_share=1.0",
    "copy": "CopyError | state_dict()",
    "deepcopy": "CopyError | state_dict()",
    "pickle": "CopyError | state_dict()",
    "a_model_for_names": "ConfigError | named_parameters | Linear | model.named_parameters()",
    "modules_for_names": "ConfigError | named_parameters | Linear | (name, tensor)",
    "number_of_buffers": "ConfigError | buffers | int | model.named_buffers()",
    "a_list_to_reduce": "ConfigError | allreduce | list | torch.as_tensor",
    "init_with_other_options": "AlreadyInitializedError | other arguments | hvd.shutdown()",
    "other_sets": "StrategyMismatchError | process_set | [0, 1] on learner 0 | [2, 3]",
    "ddp_after_wrapping": "ModelMismatchError | DistributedDataParallel | Leave",
    "some_wrapped_again": "NotInitializedError | another optimizer was wrapped around",
    "moved": "DeviceMovedError | 'weight' | meta | cpu | Move the model before",
    "reshaped": "ModelMismatchError | 'bias' | [4] | [2] | Wrap a new optimizer",
    "swapped": "ModelMismatchError | parameter 1 of group 0 | [2] | not in the group | wrap",
    "unfrozen": "ModelMismatchError | parameter 1 of group 0 | [2] | frozen | Wrap first",
    "after_shutdown": "NotInitializedError | hvd.shutdown() | wrapped after that",
    "synchronize_after_shutdown": "NotInitializedError | hvd.shutdown()",
    "group_after_shutdown": "NotInitializedError | hvd.shutdown()",
    "inner": "ConfigError | Config.inner= | was imported with | Set HVD_ADPSGD_INNER= | before the import",
    "no_timeline": "ConfigError | HVD_ADPSGD_TIMELINE | /nowhere | Name a file",
}


@functools.cache
def refused() -> dict[str, list[Facts]]:
    return launch(4, "bad_uses.py", **{SIZE: "2"}).by_case()


HOROVODS = {
    name: pytest.param(name, marks=needs_horovod_inside(name))
    for name in ("other_sets", "clipped_with_adasum", "averaged_in_adasum")
}


@pytest.mark.parametrize("name", [HOROVODS.get(name, name) for name in REFUSED])
def test_wrong_use_is_an_error_on_every_learner(name: str) -> None:
    kind, *words = REFUSED[name].split(" | ")
    said = refused()[name]
    assert [facts.get("error") for facts in said] == [kind] * 4, said
    for facts in said:
        for word in words:
            assert word in facts["text"], facts["text"]


def test_an_option_that_differs_is_an_error_that_names_it() -> None:
    said = refused()
    for name in [option for option in vars(Config()) if f"argument {option}" in said]:
        words = f"{name}=", " on learner 0", " on learner 3", environment_name(name)
        for facts in said[f"argument {name}"]:
            assert facts["error"] == "StrategyMismatchError", facts
            assert all(word in facts["text"] for word in words), facts["text"]


def test_super_learners_that_start_apart_are_told_so_once() -> None:
    found = [facts["found"] for facts in refused()["started apart"]]
    assert found == [[0, 0], [0, 0], [1, 0], [0, 0]]


def test_groups_that_differ_between_super_learners_are_noticed_when_they_exchange() -> None:
    """By each that still has a peer; none waits for others to notice."""
    said = refused()["other_group_elsewhere"]
    assert len(said) == 4
    errors = [facts["error"] for facts in said if "error" in facts]
    assert len(errors) >= 1
    assert set(errors) == {"ModelMismatchError"}, said


CURES: dict[str, Facts] = {
    # no forgotten broadcast: models differ for a while
    "disturbed_for_a_gradient": {"error": None},
    "broadcast_after_a_step": {"error": None},
    "state_loaded_before_the_step": {"error": None},
    "after a load": {"same": True},
    "dropped and set": {"same": True},
    "clipped after it": {"same": True},
    "clipped and refused": {"kept": True},
    "frozen and clipped": {"same": True, "kept": True},
    "after one has clipped": {"same": True},
    "after as many steps": {"same": True, "total": 4},
    "wrapped_again": {"same": True, "retired": "NotInitializedError"},
    "plain one stepped": {
        "found": ["UnsupportedOptimizerError"] * 2,
        "kept": True,
        "hooks": [1, 1],
        "rate": pytest.approx(0.1 * 0.5**2),
    },
}


@pytest.mark.parametrize("case", CURES)
def test_the_cure_of_a_wrong_use_works(case: str) -> None:
    said = refused()[case]
    assert len(said) == 4
    for facts in said:
        assert {key: facts.get(key) for key in CURES[case]} == CURES[case]


def test_what_one_learner_does_to_gradients_is_an_error_of_its_super_learner() -> None:
    said = refused()["clipped_too_early_on_one"]
    assert ["4 parameters got no gradient" in facts["text"] for facts in said] == [0, 1, 0, 1], said
    for mate, facts in ((1, said[0]), (3, said[2])):
        assert f"learner {mate}, of the same super learner, changed gradients" in facts["text"]


def test_who_waits_for_a_closed_optimizer_is_told() -> None:
    said = refused()["closed_on_one"]
    errors = [facts.get("error") for facts in said]
    assert errors == ["CollectiveMismatchError", None, "CollectiveMismatchError", None], said
    assert "learner 3, of the same super learner, makes no more steps with this" in said[2]["text"]


def test_an_optimizer_of_which_a_part_is_wrapped_again_is_named_at_once() -> None:
    assert len(refused()["logged at wrapping"]) == 4
    for lines in (facts["logged"] for facts in refused()["logged at wrapping"]):
        assert len(lines) == 1, "the second optimizer is closed, and trains as much as the first"
        assert "has stopped averaging bias" in lines[0]
        assert "around 1 of its 2 parameters" in lines[0]


def test_model_that_is_not_finite_raises_on_its_super_learner_only() -> None:
    said = [{k: v for k, v in facts.items() if k != "case"} for facts in refused()["not_finite"]]
    raised = [facts for facts in said if "error" in facts]
    assert [facts["rank"] for facts in raised] == [0, 1]
    for facts in raised:
        assert facts["error"] == "NonFiniteModelError"
        for word in ("weight", "bias", "super learner 0", "HVD_ADPSGD_NONFINITE"):
            assert word in facts["text"]
    finite = [facts["finite"] for facts in said if "finite" in facts]
    assert finite == [1, 1], "the others stay whole"


def test_model_that_is_not_finite_raises_when_its_chunk_has_its_turn() -> None:
    """Within LOOKS steps, in the same one on all learners of its super learner; nothing of it was sent."""
    said = refused()["not_finite_in_turn"]
    raised = [facts for facts in said if "error" in facts]
    assert [facts["rank"] for facts in raised] == [0, 1]
    assert {facts["error"] for facts in raised} == {"NonFiniteModelError"}
    steps = {facts["text"].split(":")[0] for facts in raised}
    assert len(steps) == 1 and steps <= {f"step {number}" for number in range(2, 2 + LOOKS)}, steps
    assert [facts["finite"] for facts in said if "finite" in facts] == [1, 1], "others stay whole"


def test_model_that_is_not_finite_stays_out() -> None:
    said = refused()["skip"]
    assert [facts["nonfinite_steps"] for facts in said] == [6, 6, 0, 0]
    assert all(facts["finite"] and facts["same"] for facts in said)


def test_model_that_is_not_finite_stays_out_once_it_is_found() -> None:
    """With small shares it may be found late, then in each step until it is finite again."""
    said = refused()["skip in turn"]
    counts = [facts["nonfinite_steps"] for facts in said]
    # of 3 LOOKS steps, of which the first LOOKS may not look at the chunk
    assert counts[0] == counts[1] and 2 * LOOKS < counts[0] <= 3 * LOOKS and counts[2:] == [0, 0]
    assert all(facts["finite"] and facts["same"] for facts in said)


def test_tensors_that_changed_are_named() -> None:
    first, second = torch.zeros(3), torch.zeros(2, 2)
    parameters = Parameters()
    parameters.add([("first", first), ("second", second)])
    parameters.check()
    torch.utils.swap_tensors(second, torch.zeros(2, 2, device="meta"))
    with pytest.raises(DeviceMovedError, match=r"'second' is on meta, it was on cpu"):
        parameters.check()
    torch.utils.swap_tensors(second, torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ModelMismatchError, match=r"'second' is torch.float64\[2, 2\]"):
        parameters.check()


def test_a_tensor_given_twice_is_averaged_once() -> None:
    tensor, parameters = torch.zeros(3), Parameters()
    assert len(parameters.add([("a", tensor), ("b", tensor), ("empty", torch.zeros(0))])) == 2
    with pytest.raises(ModelMismatchError, match="'a' and 'c' share memory"):
        parameters.add([("c", tensor[1:])])


KEYS_OF_ALL = (
    "steps steps_per_s inner_allreduce_s optimizer_s collect_s offer_s inner_allreduce_ema_s "
    "optimizer_ema_s collect_ema_s offer_ema_s nonfinite_steps"
).split()
KEYS_OF_LEADERS = (
    "exchanges exchanges_active exchanges_passive refused declined parked bytes_sent "
    "bytes_received bytes_shared staleness staleness_mean consensus_distance peers engine_cpu_s"
).split()
CHUNKS, ELEMENTS = 7, 100_000  # of counts.py


@functools.cache
def counted(path: Path) -> dict[str, list[Facts]]:
    return launch(4, "counts.py", str(path)).by_case()


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("counts")) / "trace.json"


def test_metrics_while_training(timeline: Path) -> None:
    said = counted(timeline)["counted"]
    for facts in said:
        live = facts["live"]
        assert live["steps"] == 50
        assert len(live["optimizers"]) == 2
        assert set(KEYS_OF_ALL) | set(KEYS_OF_LEADERS) <= set(live)
        parts = sum(live[f"{part}_s"] for part in "inner_allreduce optimizer collect offer".split())
        assert 0 < parts < 1.2 * live["seconds"] + 1
        assert (live["exchanges"] > 0) == (facts["rank"] in (0, 2))


@pytest.mark.parametrize(("which", "itemsize"), [("first", 4), ("second", 2)])
def test_metrics_add_up(timeline: Path, which: str, itemsize: int) -> None:
    leaders = [facts[which] for facts in counted(timeline)["counted"] if facts["rank"] in (0, 2)]
    for numbers in leaders:
        exchanges = numbers["exchanges"]
        assert exchanges == numbers["exchanges_active"] + numbers["exchanges_passive"] > 0
        assert exchanges == sum(numbers["peers"])
        assert numbers["void_chunks"] == numbers["parked"] == 0
        assert numbers["chunks"] == exchanges * CHUNKS == sum(numbers["staleness"])
        assert numbers["bytes_shared"] == exchanges * ELEMENTS * itemsize
        assert numbers["bytes_received"] == numbers["bytes_sent"] == 0, "no link was used"
        assert numbers["consensus_distance"] >= 0
    for side, other in (("active", "passive"), ("passive", "active")):
        assert leaders[0][f"exchanges_{side}"] == leaders[1][f"exchanges_{other}"]


def test_timeline_shows_trainer_and_engine_of_all(timeline: Path) -> None:
    said = counted(timeline)["counted"]
    folder = timeline.parent
    assert sorted(p.name for p in folder.iterdir()) == [f"trace.{i}.json" for i in range(4)]
    events = [event for file in folder.iterdir() for event in json.loads(file.read_text())]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {(r, t): ("trainer", "engine")[t] for r in range(4) for t in (0, 1)}
    shown = Counter((e["pid"], e["name"]) for e in events if e["ph"] == "X")
    for rank in range(4):
        for part in ("inner_allreduce", "optimizer", "collect", "offer"):
            assert shown[rank, part] == 100  # two optimizers, 50 steps each
    for rank in (0, 2):
        numbers = [said[rank]["first"], said[rank]["second"]]
        for name, side in (("asked", "active"), ("answered", "passive")):
            expected = sum(n[f"exchanges_{side}"] for n in numbers)
            assert shown[rank, f"exchange ({name})"] == expected
        assert shown[rank, "merge"] == sum(n["chunks"] for n in numbers)


def test_waiting_for_fresh_models_ends_at_the_deadline(timeline: Path) -> None:
    """Learner 0 is stopped until the others have made their steps: if they waited for it, none would end."""
    said = counted(timeline)["bounded"]
    assert [facts["rank"] for facts in said] == [1, 2, 3]
    assert all(facts["stopped"] and facts["steps"] == 6 for facts in said), said


def test_an_optimizer_that_could_not_be_wrapped_leaves_nothing() -> None:
    """Its engine has stopped, and no file more is open."""
    program = """
        import gc, torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.training.averaged_tensors import AveragedTensors
        from tests.mpi.programs.learner import outcome, step, wrap
        hvd.init()
        torch.set_num_threads(1)
        model = torch.nn.Linear(10, 10)

        def once():
            step(model, wrap(model), torch.ones(2, 10))

        def held():
            gc.collect()
            hvd.barrier()  # what was dropped stops there
            gc.collect()
            return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]

        def fails(self, memory):
            raise MemoryError("no page can be locked")

        once()
        first, AveragedTensors.bind = held(), fails
        say(rank=hvd.rank(), **outcome(once), first=first, left=held())
    """
    for facts in run_learners(2, program, env={SIZE: "1"}).by_rank():
        assert facts["text"] == "no page can be locked"
        assert facts["left"][0] <= facts["first"][0] and facts["left"][1] <= facts["first"][1], (
            facts
        )
