"""The learners of the model-averaging sweep: their law, and that a run leaves nothing to the next."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launcher import ROOT, environment, run_learners

torch = pytest.importorskip("torch")

STUDIES = ROOT / "lab" / "studies"
ENVIRONMENT = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "HVD_ADPSGD_NONFINITE": "skip"}
STATES, UTTERANCES, FRAMES = 7, 12, 64
SIZES = {"layers": 2, "hidden": 12, "batch": 32, "minibatches": 24}

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("tqdm") is None, reason="needs tqdm"),
]


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    """Noise whose states can be heard, in the files that prepare_data.py writes."""
    folder, rng = tmp_path_factory.mktemp("speech"), np.random.default_rng(5)
    (folder / "states.json").write_text(json.dumps([str(i) for i in range(STATES)]))
    np.save(folder / "std.npy", np.ones(120, np.float32))
    centres = rng.normal(size=(STATES, 40))
    for name in ("train", "dev"):
        (folder / name).mkdir()
        labels = rng.integers(STATES, size=UTTERANCES * FRAMES).astype(np.int16)
        noise = rng.normal(size=(len(labels), 40))
        np.save(folder / name / "features.npy", (centres[labels] + noise).astype(np.float16))
        np.save(folder / name / "labels.npy", labels)
        np.save(folder / name / "offsets.npy", np.arange(UTTERANCES + 1) * FRAMES)
        np.save(folder / name / "means.npy", np.zeros((UTTERANCES, 40), np.float32))
    return folder


def one(root: Path, place: int, **fields: object) -> dict:
    folder = root / str(place)
    folder.mkdir(parents=True)
    plain = {
        "period": 1, "optimizer": "sgd", "activation": "sigmoid", "seed": 3, "rate": 0.5,
        "stack": None, "decoded": True, "folder": str(folder), "name": str(place),
    }  # fmt: skip
    return plain | fields


def performed(np: int, speech: Path, root: Path, runs: list[dict]) -> list[dict]:
    """Each run's record with its final weights, in one vector."""
    plan = SIZES | {"learners": np, "data": str(speech), "runs": runs}
    (root / "plan.json").write_text(json.dumps(plan))
    program, args = STUDIES / "averaging_learner.py", [str(root / "plan.json")]
    launcher = "mpirun" if np > 1 else None
    run_learners(np, program, args=args, env=ENVIRONMENT, launcher=launcher).checked()
    found = []
    for run in runs:
        record = json.loads(Path(run["folder"], "run.json").read_text())
        model = torch.load(Path(run["folder"], "model.pt"))["model"]
        found.append(record | {"weights": torch.cat([w.flatten() for w in model.values()])})
    return found


def test_learners_average_as_the_law_says_and_runs_do_not_touch_each_other(speech, tmp_path):
    each = [
        {},
        {"optimizer": "natural", "period": 5, "rate": 1.0},
        {},
        {"period": 5},
        {"period": 1000},
        {"rate": 1e38, "seed": 4},  # diverges
        {"optimizer": "natural", "period": 5, "rate": 1.0},
    ]
    runs = [one(tmp_path, place, **fields) for place, fields in enumerate(each)]
    first, natural, again, fifth, never, lost, natural_again = performed(2, speech, tmp_path, runs)
    torch.testing.assert_close(first["weights"], large_batches(speech, 2), rtol=1e-4, atol=1e-5)
    assert torch.equal(first["weights"], again["weights"])
    assert torch.equal(natural["weights"], natural_again["weights"])
    assert first["steps"] == SIZES["minibatches"] / 2
    distinct = {tuple(r["weights"][:4].tolist()) for r in (first, natural, fifth, never)}
    assert len(distinct) == 4
    assert lost["heldout_loss"] is None or lost["heldout_loss"] > 100
    for record in (first, natural, fifth, never):
        assert record["heldout_loss"] < np.log(STATES) and record["cpu_s"] > 0


def test_one_learner_needs_no_launcher(speech, tmp_path):
    runs = [one(tmp_path, 0, period=0), one(tmp_path, 1, period=0, activation="relu")]
    sigmoid, relu = performed(1, speech, tmp_path, runs)
    torch.testing.assert_close(sigmoid["weights"], large_batches(speech, 1), rtol=1e-4, atol=1e-5)
    assert relu["heldout_loss"] < np.log(STATES)
    assert not torch.equal(relu["weights"], sigmoid["weights"])


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("espeakng_loader") is None, reason="needs espeak-ng")
def test_the_whole_script_in_small(tmp_path):
    command = [sys.executable, "-m", "lab.studies.model_averaging", "--quick"]
    for more in ([], ["--recall"]):
        subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment({}), timeout=800, check=True
        )
    out = tmp_path / "out" / "model_averaging-quick"
    result = json.loads((out / "result.json").read_text())
    assert len(result["runs"]) == 5 + 4 * 2 and len(result["wer"]) == 4
    assert all(record["heldout_loss"] is not None for record in result["runs"])
    assert "NG-SGD" in (out / "table.md").read_text()
    assert (out / "model_averaging.png").stat().st_size > 5000


def large_batches(speech: Path, learners: int) -> torch.Tensor:
    """The same by hand: with a mean after every step, N minibatches are one, at N times the rate."""
    from examples.acoustic_model.speech.model import Shape, make
    from lab.studies import averaging_learner as ours

    layers = SIZES["layers"], SIZES["hidden"], 0, STATES
    model = make(Shape(*layers, inputs=40, kind="dnn", context=5))
    frames = ours.Frames(speech, "train", model.shape)
    ours.begin(model, 3, None)
    steps = SIZES["minibatches"] // learners
    chosen = ours.order(len(frames), SIZES["minibatches"], SIZES["batch"], 3)
    for step, batch in enumerate(chosen.view(steps, -1)):
        model.zero_grad()
        scores = model(frames[batch]).squeeze(1)
        torch.nn.functional.cross_entropy(scores, frames.labels[batch]).backward()
        rate = 0.5 * learners * 0.1 ** (step / steps)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    return torch.cat([w.detach().flatten() for w in model.state_dict().values()])


def test_machines_are_trained_in_step_and_the_guard_keeps_nobody_waiting(
    speech: Path, tmp_path: Path
) -> None:
    """RBMs of two super learners that take the mean every second minibatch; at this rate their guards act."""
    program = ROOT / "examples" / "acoustic_model" / "pretrain_rbm.py"
    args = ["--strategy=periodic_averaging:period=2", f"--data={speech}", f"--out={tmp_path}"]
    args += ["--layers=2", "--hidden=16", "--batch=1", "--first-lr=20", "--lr=0.1"]
    run_learners(2, program, args=args, env=ENVIRONMENT).checked()
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [(entry["layer"], entry["epoch"]) for entry in lines] == [(1, 1), (1, 2), (2, 1)]
    assert lines[0]["guarded"] > 0
    assert lines[1]["error"] < lines[0]["error"]
    stack = torch.load(tmp_path / "stack.pt")["layers"]
    assert all(torch.isfinite(layer["weight"]).all() for layer in stack)
