"""The benchmarks without their trainings: what is kept, how long it takes, tables, the largest batch."""

# The imports come after the check that the example's packages are there.

import dataclasses
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from examples.acoustic_model import train
from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.problem import Problem
from lab.studies import compare, large_batch, sweep
from lab.studies.keeper import recall

NAN, INF = math.nan, math.inf


# ---- names of strategies and the papers' schedule


def test_a_spec_of_the_library_is_a_strategy_and_a_folder():
    options = train.arguments(["--strategy", "random_ring:seed=3"])
    assert options.out == Path("out/runs/random_ring-seed-3")
    assert train.averaging(None, "random_ring:seed=3", 7) == {"averaging": "random_ring:seed=3"}
    assert train.horovod_for("random_ring:seed=3").__name__ == "hvd_adpsgd.torch"


def test_the_schedule_of_the_papers():
    line = ["--epochs", "16", "--lr", "0.1", "--scale", "10", "--schedule", "papers"]
    options = train.arguments(line)
    rates = [train.rate(options, 4, epoch) for epoch in (0, 5, 10, 11, 15)]
    assert rates == pytest.approx([0.1, 0.55, 1 / 2**0.5, 0.5, 1 / 2**3])
    assert train.rate(options, 4, 9.999) == pytest.approx(1.0, rel=1e-3)
    assert train.arguments([*line, "--warmup", "2"]).warmup == 2


# ---- what is kept


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "speech"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"digest": "abc"}))
    return folder


def _runs(tmp_path: Path, data: Path, seeds=(0, 1, 2)) -> list[launch.Training]:
    return [
        sweep.placed(compare.training("noloco:period=10", seed, 6), tmp_path / "runs", data)
        for seed in seeds
    ]


def test_folders_tell_settings_apart(tmp_path, data):
    one = compare.training("noloco:period=10", 0, 6)
    place = sweep.placed(one, tmp_path, data).folder
    assert place.name.startswith("noloco-period-10--seed-0-")
    assert sweep.placed(one, tmp_path, data).folder == place
    others = [
        dataclasses.replace(one, **change)
        for change in (
            {"seed": 1},
            {"strategy": "x"},
            {"learners": 2},
            {"options": ("--epochs", "7")},
            {"options": {}},
        )
    ]
    (data / "settings.json").write_text(json.dumps({"digest": "other"}))
    places = {sweep.placed(other, tmp_path, data).folder for other in [one, *others]}
    assert len(places | {place}) == len(others) + 2


def test_finished_runs_are_kept_and_failed_ones_repeated(tmp_path, data, capsys):
    runs = _runs(tmp_path, data)
    acted = []

    def act(one, fails):
        acted.append(one.seed)
        assert not any(one.folder.iterdir())
        (one.folder / "left").touch()
        if one.seed in fails:
            raise Problem(f"seed {one.seed} is unlucky")
        return {"heldout_loss": one.seed}

    root = tmp_path / "runs"
    first, failed = sweep.perform(runs, root, data, lambda one: act(one, {1}))
    assert [outcome.record is None for outcome in first] == [False, True, False]
    assert failed == ["noloco:period=10, seed 1: seed 1 is unlucky"]
    assert first[0].record["settings"]["seed"] == 0
    second, failed = sweep.perform(runs, root, data, lambda one: act(one, ()))
    assert acted == [0, 1, 2, 1]
    assert [outcome.record["heldout_loss"] for outcome in second] == [0, 1, 2]
    assert failed == []
    assert second[0].record == json.loads(json.dumps(first[0].record))
    assert "3 runs, 2 finished before" in capsys.readouterr().out


def test_an_interrupted_run_is_not_finished(tmp_path, data):
    runs = _runs(tmp_path, data, seeds=(0,))

    def interrupted(one):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.perform(runs, tmp_path / "runs", data, interrupted)
    assert runs[0].folder.exists()
    assert recall(runs[0].folder) is None
    (runs[0].folder / "run.json").write_text('{"settings": {}, "sec')
    assert recall(runs[0].folder) is None
    (again,), _ = sweep.perform(runs, tmp_path / "runs", data, lambda one: {})
    assert again.record["seconds"] >= 0


# ---- the largest batch


@pytest.mark.parametrize(
    ("losses", "held"),
    [
        ({64: 1.0, 128: 1.05, 256: 1.06}, 128),
        ({256: 1.06, 64: 1.0, 128: 1.05}, 128),
        ({64: 1.0, 128: 1.2, 256: 1.0}, 64),
        ({64: 1.1, 128: 1.0}, None),
        ({64: 1.0, 128: INF, 256: 1.0}, 64),
        ({64: 1.0, 128: NAN}, 64),
        ({64: 0.9, 128: 0.9}, 128),
        ({}, None),
    ],
)
def test_the_largest_batch_up_to_which_all_are_within_the_limit(losses, held):
    assert large_batch.largest(losses, 1.05) == held


def _found() -> large_batch.Found:
    return {
        "synchronous": {"none": {64: [1.0, 1.2], 128: [1.04, 1.3], 256: [INF, 1.3]}},
        "fixed_ring": {"none": {64: [1.1, 1.2], 128: [1.0, 1.2], 256: [NAN, 1.0]}},
    }


def test_answers_by_the_means_and_by_seed():
    result = large_batch.results(_found())
    assert result["baseline"] == pytest.approx(1.1)
    assert result["bound"] == pytest.approx(1.155)
    assert result["largest"]["synchronous"]["none"] == {"largest": 64, "by_seed": [128, 64]}
    assert result["largest"]["fixed_ring"]["none"] == {"largest": 128, "by_seed": [None, 256]}
    assert result["losses"]["synchronous"]["none"]["256"] == ["diverged", 1.3]
    assert result["losses"]["fixed_ring"]["none"]["256"] == [None, 1.0]
    json.loads(json.dumps(result), parse_constant=pytest.fail)  # no NaN, no Infinity


def _options(*words: str):
    return large_batch.arguments(list(words))


def test_batch_and_rate_grow_together_and_the_first_batch_is_trained_once():
    options = _options()
    for factor in options.factors:
        one = large_batch.training("fixed_ring", "papers", factor, 1)
        told = train.arguments(["--strategy", "fixed_ring", *one.options])
        assert told.batch * one.learners == large_batch.SETTINGS["base_batch"] * factor
        peak = train.rate(told, one.learners, told.anneal - 1e-9)
        assert peak == pytest.approx(large_batch.SETTINGS["base_rate"] * factor, rel=1e-3)
    first = {large_batch.training("x", w, 1, 1).options for w in large_batch.WARMUPS}
    second = {large_batch.training("x", w, 2, 1).options for w in large_batch.WARMUPS}
    assert (len(first), len(second)) == (1, 2)


def test_one_learner_stands_for_the_synchronous_ones():
    alone = large_batch.training("synchronous", "none", 2, 1)
    four = large_batch.training("fixed_ring", "none", 2, 1)
    assert (alone.strategy, alone.learners) == ("single", 1)
    assert (four.strategy, four.learners) == ("fixed_ring", 4)
    batch = [int(one.options[one.options.index("--batch") + 1]) for one in (alone, four)]
    assert batch[0] == 4 * batch[1]


def _measured(tmp_path, monkeypatch, curve: list[dict], problem: Problem | None) -> dict:
    one = dataclasses.replace(large_batch.training("fixed_ring", "none", 2, 1), folder=tmp_path)

    def trained(*_):
        (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(e) + "\n" for e in curve))
        (tmp_path / "model.pt").touch()
        if problem:
            raise problem

    monkeypatch.setattr(launch, "train", trained)
    return large_batch.measure(one, tmp_path)


def test_divergence_is_a_result_and_a_failure_is_not(tmp_path, monkeypatch):
    fine, lost = {"epoch": 1, "heldout_loss": 1.5}, {"epoch": 2, "heldout_loss": None}
    record = _measured(tmp_path, monkeypatch, [fine], None)
    assert large_batch.loss_of(record) == 1.5
    assert not (tmp_path / "model.pt").exists()
    record = _measured(tmp_path, monkeypatch, [fine, lost], Problem("status 2"))
    assert large_batch.loss_of(record) == INF
    record = _measured(tmp_path, monkeypatch, [fine], Problem("x.NonFiniteModelError: NaN"))
    assert large_batch.loss_of(record) == INF
    with pytest.raises(Problem, match="status 3"):
        _measured(tmp_path, monkeypatch, [fine], Problem("status 3"))
    assert math.isnan(large_batch.loss_of(None))
