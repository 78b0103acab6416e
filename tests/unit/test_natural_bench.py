"""The benchmark of natural-gradient SGD in small: it runs, repeats itself and says what it found."""

import json
import math

import pytest
import torch

pytest.importorskip("horovod.torch")

from lab.studies import natural


def test_learners_take_the_mean():
    models = [natural.network(seed) for seed in range(3)]
    expected = [
        sum(p.detach() for p in same) / 3
        for same in zip(*(m.parameters() for m in models), strict=True)
    ]
    natural.take_mean(models)
    for model in models:
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected)


def test_every_minibatch_is_of_other_samples_until_the_epoch_ends():
    task = natural.Task(1, 1000)
    batches = task.minibatches(2)
    assert len(batches) == 14
    assert len(torch.cat(batches[:7]).unique()) == 7 * 128


def test_inputs_are_ill_conditioned_and_classes_apart():
    task = natural.Task(1, 40_000)
    covariance = task.train[0].T.cov()
    assert 3e3 < float(torch.linalg.cond(covariance)) < 3e4
    assert float(covariance.trace()) / natural.DIM == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=pytest.mark.extended) if m.startswith("sgd") else m
        for m in natural.METHODS
    ],
)
def test_a_run_repeats_itself_and_learns(method):
    losses = [natural.train(1, 8 * 128 * 2, "8, every 40", method, 1.6) for _ in range(2)]
    assert losses[0] == losses[1] < math.log(natural.CLASSES)
    assert natural.train(1, 8 * 128 * 2, "1 learner", "sgd", 1e6) == math.inf


@pytest.mark.extended
def test_the_table_holds_the_best_rate_of_the_grid(tmp_path, capsys):
    base = ["toy", "--samples", "2048", "--seeds", "1", "2", "--settings", "1 learner"]
    arguments = [*base, "--rates", "1e-6", "0.4", "--out", str(tmp_path)]
    assert natural.main(arguments) == 0
    kept = json.loads((tmp_path / "toy.json").read_text())
    table = (tmp_path / "toy.md").read_text()
    assert len(kept) == 3 * (2 + 2) and table in capsys.readouterr().out
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| 1 learner")]
    assert [row[1] for row in rows] == list(natural.METHODS)
    assert all(row[2] == "0.4" for row in rows)
    assert natural.main(arguments) == 0  # everything is kept
    assert "2048 0" not in capsys.readouterr().out


def test_the_cost_of_a_step_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(natural, "dnn", lambda layers, hidden: torch.nn.Linear(440, 256))
    assert natural.main(["overhead", "--rounds", "3", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "overhead.md").read_text().count("| CPU |") == 1
    assert len(json.loads((tmp_path / "overhead.json").read_text())) == 3


def test_the_gain_is_a_ratio_of_means_where_neither_diverged():
    assert natural.gain([0.1, math.inf, 0.5], [0.1, 0.2, 0.2]) == "2.00"
    assert natural.gain([], [0.1]) == natural.gain([math.inf], [0.1]) == ""


def test_options_out_of_range(capsys):
    for name in ("samples", "rounds", "layers", "hidden", "threads"):
        with pytest.raises(SystemExit):
            natural.arguments(["overhead", f"--{name}", "0"])
        assert f"--{name} is 0" in capsys.readouterr().err
