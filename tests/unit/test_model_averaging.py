"""The model-averaging sweep without its trainings: what is run, what is kept, tables, the figure."""

# The imports come after the check that the example's packages are there.
# ruff: noqa: E402

import json
import math
import sys
from collections import Counter
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


# ---- what is run


def test_the_sweep_holds_every_cell_once_per_seed():
    options = script.arguments([])
    runs = script.sweep(options.learners, options.periods, options.seeds)
    assert len({one.name for one in runs}) == len(runs)
    of_one = [one for one in runs if one.rate != _rate(one)]
    assert {(one.learners, one.period, one.decoded) for one in of_one} == {(4, 10, False)}
    assert len(of_one) == 4 * 3 and all(one.rate * 4 == _rate(one) for one in of_one)
    runs = [one for one in runs if one not in of_one]
    sigmoid = Counter(one.learners for one in runs if one.activation == "sigmoid")
    assert sigmoid == {1: 4 * 3, 2: 4 * 7 * 3, 4: 4 * 7 * 3}
    relu = [one for one in runs if one.activation == "relu"]
    assert len(relu) == 3 and all(one.learners == 1 for one in relu)
    decoded = Counter((one.learners, one.period, one.seed) for one in runs if one.decoded)
    assert decoded == {(1, 0, 1): 4, (4, 10, 1): 4, (4, 100, 1): 4}
    few = script.sweep([4], [10], [1], ["natural"], ["rbm"])
    assert [(one.optimizer, one.init) for one in few] == [("natural", "rbm")] * 2


def _rate(one: script.Run) -> float:
    return script.RATES[one.activation, one.optimizer, one.init]


@pytest.mark.parametrize("words", ["--learners 0", "--periods 0", "--seeds -1", "--learners 2 3"])
def test_options_out_of_range(words):
    with pytest.raises(Problem, match=f"^{words.split()[0]}"):
        script.arguments(words.split())


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


# ---- what it shows


def _records() -> list[dict]:
    losses = {(1, 0): (1.0, 1.1), (2, 1): (1.05, 1.06), (2, 10): (1.2, None), (4, 1): (1.3, 1.5)}
    kind = {"activation": "sigmoid", "optimizer": "sgd", "init": "random"}
    kind["rate"] = script.RATES["sigmoid", "sgd", "random"]
    return [
        kind | {"learners": n, "period": k, "seed": seed, "heldout_loss": loss, "cpu_s": 2.0 * n}
        for (n, k), row in losses.items()
        for seed, loss in enumerate(row)
    ]


def test_the_table_of_periods():
    rows = script.table(script.losses_of(_records()), [1, 10]).splitlines()
    alone = "1.050 (1.000 to 1.100)"
    assert f"{alone} | **1.055** (1.050 to 1.060) | diverged 1 of 2 |" in rows[2]
    assert f"{alone} | 1.400 (1.300 to 1.500) |  |" in rows[3]


def test_the_other_tables():
    scaled = [r | {"learners": 4, "period": 10} for r in _records() if r["learners"] == 4]
    unscaled = [r | {"rate": r["rate"] / 4, "heldout_loss": 1.1} for r in scaled]
    records = _records() + scaled + unscaled
    main, of_one = script.losses_of(records), script.losses_of(records, scaled=False)
    assert main["sigmoid", "sgd", "random", 4, 10] == [1.3, 1.5]
    assert "**1.100** (1.100 to 1.100)" in script.unscaled_table(main, of_one)
    stacked = main | {("sigmoid", "sgd", "rbm", 1, 0): [0.525]}
    assert " | 0.525 | 0.500 |" in script.pretraining_table(stacked)
    wer = {("sgd", "random", 1, 0): 0.2, ("sgd", "random", 4, 10): 0.25, ("sgd", "rbm", 1, 0): 0.1}
    assert "| SGD | random | 20.0 % | 25.0 % |" in script.wer_table(wer)


def test_the_figure_is_drawn_of_what_there_is(tmp_path):
    one_seed = _records()[2] | {"period": 20}
    script.draw(script.losses_of([*_records(), one_seed]), "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
