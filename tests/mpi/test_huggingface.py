"""Trainings by Transformers' Trainer and by Accelerate: the scripts of docs/huggingface.md, and more."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.launcher import Result, run_learners
from tests.uneven import time_over_ideal

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("accelerate") is None,
        reason="no Transformers",
    ),
]

PROGRAM = Path(__file__).with_name("programs") / "huggingface.py"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
IMPORTS = ("accelerate", "transformers.trainer", "transformers.models.gpt2")


def run(
    folder: Path, *parts: str, size: int = 2, launcher: str = "mpirun", learners: int = 4
) -> Result:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size), **QUIET}
    args = [str(folder), *parts]
    return run_learners(learners, PROGRAM, args=args, env=env, launcher=launcher, imports=IMPORTS)


def test_trainer_and_accelerate(tmp_path: Path) -> None:
    """One launch: both scripts of the page, then what they do not show."""
    of_trainer = ("page_trainer", "best_and_resume", "stopped", "first_step")
    of_accelerate = ("page_accelerate", "page_local_sgd", "operations", "slow_loop")
    learners = run(tmp_path, *of_trainer, *of_accelerate).checked().by_rank()
    assert len(learners) == 4
    check_page(learners)
    check_local_sgd(learners)
    for facts in learners:
        check_best_and_resume(facts)
        check_first_step(facts)
        check_operations(facts)
        assert facts["stopped_at"] == 4  # the second of three epochs
    check_held_together([facts["clipped"] for facts in learners])
    check_divided([facts["seen"] for facts in learners])
    assert sum(facts["after"] for facts in learners) >= 206


def check_divided(seen: list[list[list[int]]]) -> None:
    """Epochs of 206 rows: super learner 1 comes late to two, and gets less; a step may be filled up."""
    for epoch in range(3):  # the last with hvd.DynamicBatchSampler
        rows = [one[epoch] for one in seen]
        assert epoch == 2 or len(rows[0]) == len(rows[1]) > 51 >= len(rows[2]) == len(rows[3])
        counted = Counter(row for own in rows for row in own)
        assert set(counted) == set(range(206)) and counted.total() <= 208


def check_page(learners: list[dict]) -> None:
    """The page's own scripts: models, checkpoints, metrics."""
    steps = [facts["steps"] for facts in learners]
    assert steps[0] == steps[1]  # bit-identical in a super learner, after each step
    assert steps[2] == steps[3]
    assert 10 <= len(steps[0]) + len(steps[2]) <= 12  # 5 of an epoch, or two that end it are short
    assert any(a != b for a, b in zip(steps[0], steps[2], strict=False))
    for facts in learners:
        assert list(facts["checkpoints"]) == ["3", "6"]
        assert max(facts["checkpoints"].values()) < 1e-6  # each is the mean
        assert facts["final"] == 0.0
        assert facts["metrics"]["eval_rows"] == 20
        assert facts["metrics"]["eval_loss"] == pytest.approx(facts["loss"], rel=1e-5)
        assert facts["metrics"]["eval_accuracy"] == pytest.approx(facts["accuracy"], rel=1e-6)
        assert max(facts["norms"]) > 0.5  # max_grad_norm: gradients were clipped
        assert facts["main"] == (facts["rank"] == 0)
        assert (facts["held_out"], facts["right"]) == (60, facts["expected"])
        assert facts["apart"] == 0.0
        assert facts["file"] and facts["last_state"]


def check_local_sgd(learners: list[dict]) -> None:
    """A script with LocalSGD whose imports change: each block of 6 batches leaves the mean."""
    for facts in learners:
        assert facts["imports"] == 2
        before, after, again, last = facts["exits"]
        assert before > 0.0 and again > 0.0
        assert after == last == 0.0
        assert facts["counted"] == 6
        assert facts["accuracy_of_mean"] == learners[0]["accuracy_of_mean"] > 0.5
        assert facts["kept"] > 0.0 and facts["unchanged"]
        assert "accelerator=object" in facts["refused"]


def test_backward_leaves_out_an_optimizer_whose_parameters_were_wrapped_anew() -> None:
    """A second prepare() of the same model; Accelerate keeps the optimizer of the first."""
    from hvd_adpsgd.integrations.accelerate import _Optimizer

    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    calls: list[str] = []
    for stopped in ("another optimizer was wrapped around its parameters", ""):
        one = _Optimizer.__new__(_Optimizer)
        one.optimizer = SimpleNamespace(
            param_groups=[{"params": [parameter]}],
            synchronize=lambda stopped=stopped: calls.append(stopped),
            _averaging=SimpleNamespace(stopped=stopped),
        )
        one.average()
        assert one.averaged is not bool(stopped)
    assert calls == [""]


def check_best_and_resume(facts: dict) -> None:
    """23 rows: if all are equally fast, 3 batches per learner and epoch, 2 steps."""
    assert facts["best"] == "checkpoint-2"
    assert facts["best_apart"] == 0.0
    assert facts["best_saved"] == 0.0
    assert facts["last_apart"] > 0.0
    check_resumed(facts)


def check_resumed(facts: dict) -> None:
    assert facts["resumed_to"] == 6 and facts["resumed_steps"] > 0
    assert facts["optimizer_steps"] == [facts["scheduler_steps"]]
    assert facts["resumed_rows"]
    assert max(facts["resumed_checkpoints"].values()) < 1e-6
    assert min(facts["losses"]) <= facts["train_loss"] + 1e-6 <= max(facts["losses"]) + 2e-6


def check_first_step(facts: dict) -> None:
    assert sorted(facts["step_rows"]) == list(range(16))  # each row on one learner
    assert facts["step_error"] < 1e-3 * facts["step_size"]


def check_operations(facts: dict) -> None:
    def row(n: int, first: bool) -> list[float]:
        own, filled = [float(n)] * (n + 1), [-1.0] * (3 - n)
        return filled + own if first else own + filled

    rank = facts["rank"]
    assert facts["padded"] == [row(rank, False)] * 2
    assert facts["first"] == [row(rank, True)] * 2
    assert facts["numbers"] == list(range(13))
    assert facts["names"] == [str(i) for i in range(13)]
    assert [sorted(epoch) for epoch in facts["epochs"]] == [list(range(16))] * 2
    assert facts["epochs"][0] != facts["epochs"][1]
    assert facts["parts"] == [2, 2, 1, 1]
    assert (facts["mean"], facts["highest"]) == (1.5, 3)
    assert facts["once"] == (0 if rank == 0 else None)
    assert len(set(facts["started"])) == 1  # all with the model of the first
    for told in facts["norms_by_super"]:
        (first, second) = ({norm for of, norm in told if of == k} for k in (0, 1))
        assert len(first) == len(second) == 1 and first != second


def check_held_together(clipped: list[list]) -> None:
    assert clipped[0] == clipped[1]
    assert clipped[2] == clipped[3]


@pytest.mark.extended
def test_rank_0_is_killed(tmp_path: Path) -> None:
    result = run(tmp_path, "killed")
    assert result.returncode != 0
    ended = result.by_rank()
    assert [facts["rank"] for facts in ended] == [2, 3], result.report()
    for facts in ended:
        assert facts["failed"] == [0, 1]
        assert facts["step"] == 18
        assert facts["rows"] == 7  # of all data, by the survivors
        assert facts["main"] == (facts["rank"] == 2)
        assert facts["final"] == 0.0 and facts["finite"]
        assert "checkpoint-18" in facts["checkpoints"]


@pytest.mark.extended
@pytest.mark.alone
def test_a_slow_learner_gets_less(tmp_path: Path) -> None:
    """Epochs take the time of the summed speeds; with equal numbers of steps it would be 2.5 times."""
    learners = run(tmp_path, "slow", size=1).checked().by_rank()
    assert time_over_ideal(learners) < 1.1
    counted = Counter(row for facts in learners for row in facts["rows"])
    assert counted == dict.fromkeys(range(8, 4000), 3)  # the first rows are evaluated, too
    for facts in learners:  # counts and the rate follow the job, a second late
        assert facts["counted"] == 600 and facts["rate"] < 0.2e-3, facts
        assert facts["saved"] == ["checkpoint-200", "checkpoint-400", "checkpoint-600"], facts
        assert 0 < len(facts["logged"]) == len(set(facts["logged"])) <= 60, facts
        assert facts["loss"] == pytest.approx(learners[0]["loss"], rel=0.1)


@pytest.mark.extended
@pytest.mark.alone
def test_a_slow_learner_gets_less_of_an_accelerate_loop(tmp_path: Path) -> None:
    learners = run(tmp_path, "uneven_loop", size=1).checked().by_rank()
    assert time_over_ideal(learners) < 1.1
    assert Counter(i for one in learners for i in one["rows"]) == dict.fromkeys(range(4000), 3)


@pytest.mark.extended
def test_evaluations_and_checkpoints_by_steps_of_the_job_and_a_resume_in_mid_epoch(
    tmp_path: Path,
) -> None:
    tens, saved = [*range(10, 81, 10)], ["checkpoint-30", "checkpoint-60", "checkpoint-80"]
    for part, rows, evaluated in (
        ("by_steps", 1600, tens),
        ("resume_by_steps", 1000, tens[3:]),  # the other 50 of 80 steps
        ("cut", 860, [*range(7, 43, 7), 43]),  # by max_steps
        ("each_step", 80, [1, 2, 3, 4]),
    ):
        learners = run(tmp_path, part, size=1).checked().by_rank()
        counted = Counter(row for facts in learners for row in facts["rows"])
        assert max(counted.values()) == 1 and rows - 8 <= len(counted) <= rows
        for facts in learners:
            assert (facts["evaluated"][-len(evaluated) :], facts["saved"]) == (evaluated, saved), (
                facts
            )
            assert facts["counted"] == evaluated[-1]
        assert learners[0]["shown"] == [evaluated[-1]]  # in its bar


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["torchrun", "gloo", "horovodrun"])
def test_scripts_of_the_page_under_other_launchers(launcher: str, tmp_path: Path) -> None:
    parts = ("page_trainer", "page_accelerate")
    check_page(run(tmp_path, *parts, launcher=launcher).checked().by_rank())


@pytest.mark.extended
def test_more_learners_resume_and_iterable_data_are_divided(tmp_path: Path) -> None:
    """What was step 6 of 9 is step 4 of 6; losses are logged from there on."""
    run(tmp_path, "best_and_resume", size=1, learners=2).checked()
    for facts in run(tmp_path, "resume", "iterable", "refusals", size=1).checked().by_rank():
        check_resumed(facts)
        assert facts["rows_of_all"] == list(range(40))
        assert "dispatch_batches=true" in facts["refused"][0]
        assert "Pass these" in facts["refused"][1]


LATE = """
import accelerate
import hvd_adpsgd.torch as hvd
accelerate.Accelerator(cpu=True)
from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator
try:
    AdpsgdAccelerator()
except RuntimeError as error:
    say(rank=hvd.rank(), name=type(error).__name__, told=str(error))
"""


@pytest.mark.extended
def test_a_process_group_of_accelerate_is_refused() -> None:
    late = run_learners(2, LATE, launcher="torchrun", imports=("accelerate",)).checked()
    for facts in late.by_rank():
        assert facts["name"] == "WorldError"
        assert "Accelerate runs 2 processes of its own" in facts["told"]


@pytest.mark.extended
def test_one_super_learner_is_plain_horovod(tmp_path: Path) -> None:
    plain = run(tmp_path, "best_and_resume", "first_step", "operations", size=4).checked()
    for facts in plain.by_rank():
        check_best_and_resume(facts)
        check_first_step(facts)
