"""hvd.average_model_async in jobs: exact over what leaders contributed, and no other learner waits.

The last super learner is late, stopped or killed. The others make 20 steps while the mean is not there, else
it would never end its step: whoever waited for it would wait for good.
"""

import pathlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.launcher import ROOT, Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "async_mean.py"
CHECKPOINTS = PROGRAM.with_name("async_checkpoint.py")
PAGE = (ROOT / "docs" / "evaluate.md").read_text().partition("## Without waiting")[2]
RECIPE, EVALUATOR, RESUME = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)[:3]

# ends, and the job with it, after three means
EVALUATES = """
import pathlib, time, torch, torch.distributed.checkpoint
model, sums = torch.nn.Linear(3, 2), []
def evaluate(model):
    sums.append(float(model.weight.sum()))
    if len(sums) == 3:
        pathlib.Path("enough").touch()
        print(*sums)
        raise SystemExit
"""


def run(folder: Path, what: str, inner: int = 1, **how: Any) -> tuple[Result, dict[str, Any]]:
    """Run 4 learners, and compare the mean with the contributions that it names."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(inner), "HVD_ADPSGD_FAILURE_TIMEOUT_S": "60"}
    result = run_learners(4, PROGRAM, args=[str(folder), what], env=env, **how)
    facts = next((one for one in result.said if "steps" in one), None)
    assert facts is not None, result.report()
    state = torch.load(folder / "state.pt")
    assert list(state) == facts["keys"]  # no moments
    files = [folder / f"{rank}.{step}.npz" for rank, step in facts["steps"].items()]
    contributed = [list(np.load(file).values()) for file in files]
    names = ["tied", "0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"]
    for name, *tensors in zip(names, *contributed, strict=True):
        mean = np.mean(tensors, axis=0, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_almost_equal_nulp(state[name].numpy(), mean, nulp=1)
    assert torch.equal(state["tied"], state["0.bias"])
    assert state["frozen"] == 0  # that of the learner that asks
    assert not np.array_equal(contributed[0][0], contributed[-1][0])
    return result, facts


@pytest.mark.parametrize(
    ("inner", "how"),
    [(1, "mpirun"), pytest.param(1, "gloo", marks=pytest.mark.extended), (2, "mpirun")],
)
def test_the_others_go_on_until_the_last_contributes(tmp_path: Path, inner: int, how: str) -> None:
    result, facts = run(tmp_path, "late", inner, launcher=how)
    assert len(facts["steps"]) == 4 // inner and not facts["left_out"]
    assert facts["polled"] >= 20  # in the steps until then
    compared = [one for one in result.checked().said if "wrong" in one]
    assert len(compared) == 4
    assert all(one["wrong"] < 1e-6 for one in compared), compared


@pytest.mark.extended
def test_a_stopped_learner_contributes_once_it_goes_on(tmp_path: Path) -> None:
    result, facts = run(tmp_path, "resumed", launcher="gloo")
    result.checked()
    assert len(facts["steps"]) == 4 and facts["polled"] >= 20


@pytest.mark.extended
def test_a_super_learner_joins_in_the_middle(tmp_path: Path) -> None:
    result, facts = run(tmp_path, "joined", timeout=200)
    assert {"0", "1", "2"} <= set(facts["steps"])
    assert "super learner 3 has joined" in result.stderr


def test_a_stopped_learner_is_left_out(tmp_path: Path) -> None:
    result, facts = run(tmp_path, "stopped", launcher="gloo")
    result.checked()
    assert sorted(facts["steps"]) == ["0", "1", "2"]
    assert facts["left_out"] == {"3": "late"}


def test_a_learner_killed_as_it_contributes_is_left_out(tmp_path: Path) -> None:
    _, facts = run(tmp_path, "killed")
    assert sorted(facts["steps"]) == ["0", "1", "2"]
    assert facts["left_out"] == {"3": "ended"}


@pytest.mark.parametrize(
    "what", ["late", "stopped0", pytest.param("stopped40", marks=pytest.mark.extended)]
)
def test_the_recipe_saves_and_evaluates_while_all_train(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No learner loses a step: the late or stopped one waits for the others' steps."""
    monkeypatch.chdir(tmp_path)
    Path("steps").write_bytes(bytes(4 * 8))
    code = EVALUATES + EVALUATOR.replace("sleep(10)", "sleep(0.1)")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as evaluator:
        try:
            result = run_learners(
                4,
                CHECKPOINTS,
                args=[str(tmp_path), what, RECIPE],
                env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"},
                launcher="gloo",
                imports=("torch.distributed.checkpoint",),
            ).checked()
            lines = evaluator.communicate(timeout=60)[0].splitlines()
        finally:
            evaluator.kill()
    means = next(one["means"] for one in result.said if one.get("means"))
    assert means == [[4, float(one)] for one in lines[-1].split()]
    assert what == "late" or {"is_under_way": True, "rank": 0} in result.said, result.report()
    names: dict[str, Any] = {"torch": torch, "pathlib": pathlib}
    exec(RESUME, names)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(names["saved"]["optimizer"])
    model.load_state_dict(names["saved"]["model"])
    saved = max(Path("means").glob("*/.metadata")).parent.name
    assert (
        optimizer.state[model.weight]["step"] == int(saved) + 1
    )  # of that moment, though all train on
