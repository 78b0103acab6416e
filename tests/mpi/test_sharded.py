"""Models of which each learner of a super learner holds a part: fully_shard (FSDP2) inside."""

import functools
import re
import tempfile
from typing import Any

import pytest

from tests.launcher import run_learners
from tests.mpi.test_optimizer import PROGRAMS, SIZE

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

TORCH = {"HVD_ADPSGD_INNER": "torch"}
IMPORTS = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo")
CASES = (
    *("SGD", "AdamW", "accumulation", "mixed precision", "offload", "tensor parallel", "means"),
    *("evaluated", "states", "added", "refusals", "late fully_shard", "late tensor parallel"),
    *("nonfinite", "mean without waiting"),
)
Facts = dict[str, Any]


@functools.cache
def folder() -> str:
    return tempfile.mkdtemp(prefix="sharded")


def said(*cases: str, learners: int = 4, size: int = 2, **env: str) -> dict[str, list[Facts]]:
    result = run_learners(
        learners,
        PROGRAMS / "sharded.py",
        args=[folder(), *cases],
        env={SIZE: str(size), **env},
        imports=IMPORTS,
    )
    found = result.by_case()
    for case in cases:
        assert len(found[case]) == learners - (case == "lost"), result.report()
    assert "lost" in cases or result.returncode == 0, result.report()
    return found


@functools.cache
def first() -> dict[str, list[Facts]]:
    """One launch for most tests; its last learner is killed at the end."""
    return said(*CASES, "checkpoint", "lost", **TORCH)


def require_law(facts: Facts, tolerance: float) -> None:
    """The mean has moved by local updates only, and an engine holds no more than its learner's part."""
    assert facts["error"] < tolerance, facts
    assert facts["own"] < 0.6 * facts["whole"], facts


@pytest.mark.parametrize("case", ["SGD", "AdamW", "accumulation", "offload"])
def test_the_gathered_mean_moves_by_local_updates_only(case: str) -> None:
    for facts in first()[case]:
        require_law(facts, 1e-13)
        tensors = 1 if case == "SGD" else 2  # and the first moments
        assert facts["held"] <= tensors * facts["own"] + 128, facts  # chunks end at 64 bytes


def test_tensor_parallelism_that_replicates_nothing() -> None:
    for facts in first()["tensor parallel"]:
        require_law(facts, 1e-13)


def test_mixed_precision() -> None:
    for facts in first()["mixed precision"]:
        require_law(facts, 1e-6)


def test_means_against_those_of_gathered_values() -> None:
    for facts in first()["means"]:
        assert facts["distance"] < 1e-12 and facts["error"] < 1e-13, facts
        assert facts["after"] < 1e-12
        assert facts["broadcast"], "not the parts of the root's super learner"


def test_a_mean_without_waiting_is_that_of_the_counterparts() -> None:
    for facts in first()["mean without waiting"]:
        assert facts["error"] < 1e-15 and facts["models"] == 2, facts


def test_forward_passes_without_backward() -> None:
    """Of evaluations, inside `averaged` and outside: the mean is the mean, and the own model comes back."""
    for facts in first()["evaluated"]:
        assert all(facts["outputs"]), "learners evaluate different models"
        assert facts["differs"] and facts["kept"]
        assert facts["law"] < 1e-13 and facts["mean"] < 1e-13, facts


def test_the_optimizer_state_of_counterparts() -> None:
    for facts in first()["states"]:
        assert facts["same"], "not the moments of the counterpart in the root's super learner"
        assert facts["rate"] == 0.02


def test_what_is_added_has_to_be_sharded_alike() -> None:
    for facts in first()["added"]:
        assert "ModelMismatchError: add_param_group: its tensors are not sharded" in facts["plain"]
        assert "ModelMismatchError: add_param_group: its tensors are sharded" in facts["sharded"]
        assert "ConfigError: allreduce got a DTensor" in facts["reduced"]
        assert facts["same"] == "nothing raised"


def test_one_super_learner() -> None:
    for facts in said("one super learner", learners=2, size=2, **TORCH)["one super learner"]:
        assert facts["same"]
        require_replaced(facts)


@pytest.mark.parametrize("how", ["fully_shard", "tensor parallel"])
def test_a_model_that_is_cut_after_its_optimizer_is_wrapped(how: str) -> None:
    """torch itself says nothing, and trains nothing."""
    for facts in first()[f"late {how}"]:
        require_replaced(facts)


def require_replaced(facts: Facts) -> None:
    for part in ("ModelMismatchError: parameter '0.weight'", "in no module", "after fully_shard."):
        assert part in facts["error"], facts


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("mixed", ("ModelMismatchError", "is not: every learner", "Use fully_shard on the whole")),
        ("replicated", ("ModelMismatchError", "'allreduce.noname.0.0'", "(Replicate(),)")),
        ("tensor parallel", ("parameter 'allreduce.noname.0.3'", "(Replicate(),)", "bias=False")),
        ("HSDP", ("ModelMismatchError", "Replicate", "HSDP", "mesh of one dimension")),
        ("two dimensions", ("ModelMismatchError", "(2, 1)", "Use fully_shard alone")),
        ("order", ("ModelMismatchError: hvd.DistributedOptimizer: models differ", "[1, 0]")),
        ("DTensor", ("ModelMismatchError: buffers= has 'weight'", "Leave it out")),
        ("elsewhere", ("ModelMismatchError", "are not the learners", "super_learner_group()")),
        ("rounds", ("ConfigError", "averaging=delay_by_one", "use random_pairs")),
        ("buffers", ("ConfigError", "buffers=", "leave buffers out")),
        ("twice", ("ModelMismatchError", "average_gradients=True", "Leave the argument out")),
    ],
)
def test_refused_by_name(case: str, parts: tuple[str, ...]) -> None:
    for facts in first()["refusals"]:
        for part in parts:
            assert part in facts[case], facts


def test_all_learners_of_a_super_learner_raise_if_one_part_is_not_finite() -> None:
    *others, mate, own = first()["nonfinite"]
    for facts in others:
        assert set(facts["errors"]) == {"nothing raised"}, facts
    assert mate["errors"] == own["errors"]
    # a GPU tells one step later, when the other part may be NaN, too
    begins = (
        rf"NonFiniteModelError: step {len(own['errors'])}: .* learner (2, )?3 of super learner 1"
    )
    assert re.match(begins, own["errors"][-1]), own
    assert "clip gradients" in own["errors"][-1]


def test_a_learner_that_is_killed_takes_its_super_learner_and_nobody_else() -> None:
    one, two, mate = first()["lost"]
    of_torch = ("RuntimeError", "DistBackendError")
    assert any(name in mate["error"] for name in ("LearnerFailedError", *of_torch)), mate
    assert one["failed"] == two["failed"] == [2, 3]


def test_a_checkpoint_resumes_with_other_super_learners() -> None:
    """Saved by two learners of super learner 0, a part each; loaded by three super learners of one."""
    saved = first()["checkpoint"]
    found = said("resume", learners=3, size=1, **TORCH)["resume"]
    for facts in found:
        assert facts["mean"] == saved[0]["mean"], "not the averaged model"
        assert facts["rate"] == 0.01
        assert facts["error"] < 1e-6


def require_joined(learners: int, launcher: str = "mpirun", **env: str) -> None:
    result = run_learners(
        learners,
        PROGRAMS / "sharded.py",
        args=[folder(), "joined"],
        env={SIZE: "2", **env},
        launcher=launcher,
        imports=IMPORTS,
    )
    told = result.by_rank()
    assert [facts["new"] for facts in told] == [False] * (learners - 2) + [True] * 2, (
        result.report()
    )
    for facts in told:
        assert facts["new"] or facts["after"] < 1e-13, "what joins changes the mean"
        assert facts["failed"] == []
        assert facts["error"] < 1e-13
        for name in ("exp_avg", "exp_avg_sq"):
            assert facts[name][0] > 0, "no moments"


def test_a_super_learner_joins_in_place_of_a_killed_one() -> None:
    require_joined(4, **TORCH)


@pytest.mark.extended
def test_with_horovod_inside() -> None:
    found = said(*CASES)
    for case in ("SGD", "AdamW", "accumulation"):
        for facts in found[case]:
            require_law(facts, 1e-13)
