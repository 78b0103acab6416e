"""The model-averaging sweep without its trainings: what is run, what is kept, tables, the figure."""

# The imports come after the check that the example's packages are there.
# ruff: noqa: E402

import json
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from examples.acoustic_model import train
from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.model import Shape, make
from examples.acoustic_model.speech.problem import Problem
from lab.studies import averaging_learner as learner
from lab.studies import model_averaging as script
from lab.studies.keeper import keep

# ---- train.py


def test_the_exponential_schedule_is_kaldis():
    line = ["--epochs", "4", "--lr", "0.5", "--schedule", "exponential"]
    options = train.arguments(line)
    rates = [train.rate(options, 4, epoch) for epoch in (0, 2, 4)]
    assert rates == pytest.approx([2.0, 2.0 * math.exp(0.5 * math.log(0.1)), 0.2])
    assert train.rate(train.arguments([*line, "--scale", "1"]), 4, 0) == 0.5


@pytest.mark.parametrize("option", ["--warmup", "--anneal"])
def test_the_exponential_schedule_has_no_plateau(option):
    with pytest.raises(Problem, match=f"^{option} 2 with --schedule exponential: .*leave {option}"):
        train.arguments(["--schedule", "exponential", option, "2"])


def test_optimizers_of_the_script():
    model = torch.nn.Linear(3, 2)
    assert type(train.optimizer_for("sgd", model, 0.1, 0.9)) is torch.optim.SGD
    pytest.importorskip("horovod.torch")
    natural = train.optimizer_for("natural", model, 0.1, 0.9)
    assert type(natural).__name__ == "NaturalGradientSGD"
    assert natural.defaults["momentum"] == 0.9 and natural.defaults["lr"] == 0.1
    natural.remove_hooks()
    with pytest.raises(SystemExit):
        train.arguments(["--optimizer", "adam"])


def test_natural_gradients_without_the_library_are_told_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "hvd_adpsgd.optim.natural_gradient", None)
    with pytest.raises(Problem, match="^--optimizer natural needs hvd_adpsgd"):
        train.optimizer_for("natural", torch.nn.Linear(3, 2), 0.1, 0.9)


# ---- what is kept


@pytest.fixture
def trained(tmp_path) -> script.Sweep:
    data = tmp_path / "speech"
    data.mkdir()
    (data / "settings.json").write_text(json.dumps({"digest": "abc"}))
    return script.Sweep(tmp_path / "out", data, script.QUICK)


def test_what_is_finished_is_not_launched_again(trained, monkeypatch):
    launched = []

    def as_launched(name, words, what, learners=1, **options):
        launched.append((name.split(".")[-1], learners))
        if name.endswith(".pretrain_rbm"):
            return
        plan = json.loads(Path(*words).read_text())
        assert plan["learners"] == learners and plan["hidden"] == script.QUICK["hidden"]
        for one in plan["runs"]:
            assert (one["stack"] is not None) == (one["init"] == "rbm")
            if one["period"] != 10:  # as if interrupted
                keep(Path(one["folder"]), one | {"heldout_loss": 1.0, "seconds": 1.0})

    monkeypatch.setattr(launch, "module", as_launched)
    trained.out.mkdir()
    runs = script.sweep([1, 2], [1, 10], [1])
    trained.perform(runs)
    names = ["pretrain_rbm", "averaging_learner"]
    assert launched == [(names[0], 1), (names[1], 1), (names[0], 1), (names[1], 2)]
    left = [one for one in runs if trained.recall(one) is None]
    assert {one.period for one in left} == {10}
    launched.clear()
    trained.perform(runs)
    assert launched[-1] == ("averaging_learner", 2) and len(launched) == 2


def test_a_module_is_run_and_its_failure_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("module.py").write_text(
        "import os, sys\n"
        "print(os.environ['HVD_ADPSGD_NONFINITE'], os.environ['OMP_NUM_THREADS'])\n"
        "if len(sys.argv) > 1: sys.exit('error: ' + sys.argv[1])\n"
    )
    launch.module("module", [], "a module", HVD_ADPSGD_NONFINITE="skip")
    assert "skip 1" in capsys.readouterr().out
    with pytest.raises(Problem, match="^a module ended with status 1; too much$"):
        launch.module("module", ["too much"], "a module", HVD_ADPSGD_NONFINITE="skip")


def test_other_settings_are_other_runs(trained):
    one = script.sweep([1], [1], [1])[0]
    other = script.Sweep(trained.out, trained.data, script.SETTINGS)
    assert trained.placed(one).folder != other.placed(one).folder
    assert trained.stack(1) != other.stack(1)


# ---- what a learner does besides


def test_minibatches_are_epochs_of_all_frames():
    chosen = learner.order(100, 7, 30, seed=2)
    assert chosen.shape == (7, 30)
    assert sorted(chosen.flatten()[:100].tolist()) == list(range(100))
    assert torch.equal(chosen, learner.order(100, 7, 30, seed=2))
    assert not torch.equal(chosen, learner.order(100, 7, 30, seed=3))


def test_weights_depend_on_the_seed_alone_and_come_from_the_stack(tmp_path):
    shape = Shape(2, 50, 0, 5, inputs=4, kind="dnn", context=1)
    model, other = make(shape), make(shape)
    for one in (model, other):
        learner.begin(one, 7, None)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    bound = 4 * math.sqrt(6 / (50 + 50))
    weight = model.hidden[1].weight
    assert 0.95 * bound < weight.abs().max() <= bound and not model.hidden[1].bias.any()
    layers = [{"weight": torch.full_like(h.weight, 0.5), "bias": h.bias + 1} for h in model.hidden]
    torch.save({"layers": layers}, tmp_path / "stack.pt")
    learner.begin(model, 7, str(tmp_path / "stack.pt"))
    assert (model.hidden[0].weight == 0.5).all() and (model.hidden[1].bias == 1).all()
    assert torch.equal(model.output.weight, other.output.weight)
