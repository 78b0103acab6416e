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
from examples.acoustic_model.speech import launch, strategy
from examples.acoustic_model.speech.problem import Problem
from lab.studies import compare, figure, large_batch, sweep
from lab.studies.keeper import left, recall

NAN, INF = math.nan, math.inf


# ---- names of strategies and the papers' schedule


def test_a_spec_of_the_library_is_a_strategy_and_a_folder():
    options = train.arguments(["--strategy", "random_ring:seed=3"])
    assert options.out == Path("out/runs/random_ring-seed-3")
    assert train.averaging(None, "random_ring:seed=3", 7) == {"averaging": "random_ring:seed=3"}
    assert train.horovod_for("random_ring:seed=3").__name__ == "hvd_adpsgd.torch"


@pytest.mark.parametrize("name", strategy.NAMES)
def test_short_names_still_are(name):
    assert train.arguments(["--strategy", name]).out == Path("out/runs") / name


@pytest.mark.parametrize("spec", ["ring", "random_pairs:sed=3", ""])
def test_a_wrong_spec_is_told_in_one_line(spec):
    with pytest.raises(Problem, match=r"^--strategy: .*random-pairs") as told:
        train.arguments(["--strategy", spec])
    assert "\n" not in str(told.value)


def test_the_schedule_of_the_papers():
    line = ["--epochs", "16", "--lr", "0.1", "--scale", "10", "--schedule", "papers"]
    options = train.arguments(line)
    rates = [train.rate(options, 4, epoch) for epoch in (0, 5, 10, 11, 15)]
    assert rates == pytest.approx([0.1, 0.55, 1 / 2**0.5, 0.5, 1 / 2**3])
    assert train.rate(options, 4, 9.999) == pytest.approx(1.0, rel=1e-3)
    assert train.arguments([*line, "--warmup", "2"]).warmup == 2


def test_no_warm_up_is_the_whole_rate_from_the_start():
    options = train.arguments(["--lr", "0.5", "--scale", "4", "--warmup", "0"])
    assert train.rate(options, 1, 0) == 2.0


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


@pytest.mark.parametrize(
    ("took", "todo", "told"),
    [
        ([], 3, "3 runs left"),
        ([20.0], 1, "1 run left, about 20 s"),
        ([20.0, 40.0], 4, "4 runs left, about 2 min"),
    ],
)
def test_time_left(took, todo, told):
    assert left(took, todo) == told


def test_unknown_schemes_are_named_with_the_reason():
    fine, refused = sweep.known(["fixed_ring", "no_such_scheme:period=10", "synchronous"])
    assert fine == ["fixed_ring", "synchronous"]
    assert list(refused) == ["no_such_scheme:period=10"]
    assert "unknown strategy" in refused["no_such_scheme:period=10"]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (["[1,0]<stderr>: error: no data", "[1,1]<stderr>: error: later"], "no data"),
        (["[1,2]<stderr>: a.b.SomeError: step 3: NaN", "x"], "a.b.SomeError: step 3: NaN"),
        (["epoch 1/6  frame errors 3 %", "  a.SomeError: quoted"], ""),
    ],
)  # fmt: skip
def test_the_first_error_that_a_learner_tells_is_the_cause(said, cause):
    assert launch._show(said) == cause


# ---- comparing schemes


def _outcome(scheme: str, seed: int, errors: list[int], loss: float | None) -> sweep.Outcome:
    run = compare.training(scheme, seed, 2)
    if loss is None:
        return sweep.Outcome(run, None)
    curve = [
        {"epoch": e, "samples": 100 * e, "heldout_loss": loss + 2 - e, "seconds": 5.0 * e}
        for e in range(3)
    ]
    wer = sum(errors) / 20
    decoded = {"wer": wer, "utterance_errors": errors, "utterance_words": [5, 5, 5, 5]}
    return sweep.Outcome(run, {"seconds": 9.0, "curve": curve, "decoded": decoded})


def _outcomes() -> list[sweep.Outcome]:
    return [
        _outcome("synchronous", 0, [1, 0, 1, 0], 1.0),
        _outcome("synchronous", 1, [1, 2, 1, 0], 1.2),
        _outcome("fixed_ring", 0, [2, 1, 2, 1], 1.5),
        _outcome("fixed_ring", 1, [2, 3, 2, 1], 1.7),
        _outcome("random_ring", 0, [0, 0, 0, 0], 1.1),
        _outcome("random_ring", 1, [], None),
    ]


def test_the_table_of_schemes():
    found = compare.complete(_outcomes())
    assert {one.run.scheme for one in found} == {"synchronous", "fixed_ring"}
    rows = compare.table(compare.results(found)).splitlines()
    assert len(rows) == 4
    assert rows[2].startswith("| `synchronous` | 15.0 |")
    assert "| 10.0, 20.0 |  | 1.100 | 1.000 to 1.200 | 10 |" in rows[2]
    assert rows[3].startswith("| `fixed_ring` | 35.0 |")
    # one more error in each utterance, whichever are drawn
    assert "| 30.0, 40.0 | +20.0 (+20.0 to +20.0) | 1.600 |" in rows[3]
    assert len({row.count("|") for row in rows}) == 1


def test_without_the_baseline_there_are_no_differences():
    found = compare.results([one for one in _outcomes() if one.run.scheme == "fixed_ring"])
    assert found["minus_baseline"] == {}
    assert "| 30.0, 40.0 |  |" in compare.table(found)


def test_every_scheme_is_in_one_panel():
    panels = compare.panels([*compare.SCHEMES, "random_pairs:seed=5"])
    assert panels.pop(compare.OTHERS) == ["random_pairs:seed=5"]
    assert [s for family in panels.values() for s in family] == list(compare.SCHEMES[1:])
    assert compare.panels(["synchronous"]) == {"": []}


def test_quick_runs_leave_the_results_of_long_ones_alone():
    assert compare.arguments(["--quick"]).out != compare.arguments([]).out
    assert compare.arguments(["--quick"]).epochs == 1


def test_pictures_are_drawn(tmp_path):
    compare.draw(compare.complete(_outcomes()), "title", tmp_path / "a.png")
    found = _found()
    figure.draw_batches({"t": {s: found[s]["none"] for s in found}}, 1.05, "t", tmp_path / "b.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "ab")


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


@pytest.mark.parametrize("limit", [INF, NAN])
def test_a_baseline_that_diverged_or_failed_holds_nothing(limit):
    assert large_batch.largest({64: 1.0, 128: INF}, limit) is None


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


def test_the_table_of_batches():
    found = _found()
    rows = large_batch.table(found, large_batch.results(found)).splitlines()
    assert rows[0].startswith("| scheme | warm-up | 64 | 128 | 256 | largest")
    assert rows[2] == (
        "| `synchronous` | none | **1.100** | 1.170 | diverged 1 of 2 | 64 | 128, 64 |"
    )
    assert rows[3] == (
        "| `fixed_ring` | none | **1.150** | **1.100** | failed 1 of 2 | 128 | none, 256 |"
    )


def _options(*words: str):
    return large_batch.arguments(list(words))


def test_batch_and_rate_grow_together_and_the_first_batch_is_trained_once():
    options = _options()
    for factor in options.factors:
        one = large_batch.training("fixed_ring", "papers", factor, 1, options)
        told = train.arguments(["--strategy", "fixed_ring", *one.options])
        assert told.batch * one.learners == large_batch.SETTINGS["base_batch"] * factor
        peak = train.rate(told, one.learners, told.anneal - 1e-9)
        assert peak == pytest.approx(large_batch.SETTINGS["base_rate"] * factor, rel=1e-3)
    first = {large_batch.training("x", w, 1, 1, options).options for w in large_batch.WARMUPS}
    second = {large_batch.training("x", w, 2, 1, options).options for w in large_batch.WARMUPS}
    assert (len(first), len(second)) == (1, 2)


def test_one_learner_stands_for_the_synchronous_ones():
    alone = large_batch.training("synchronous", "none", 2, 1, _options())
    four = large_batch.training("synchronous", "none", 2, 1, _options("--launch-synchronous"))
    assert (alone.strategy, alone.learners) == ("single", 1)
    assert (four.strategy, four.learners) == ("synchronous", 4)
    batch = [int(one.options[one.options.index("--batch") + 1]) for one in (alone, four)]
    assert batch[0] == 4 * batch[1]


def test_the_exploring_seed_does_not_confirm():
    assert not set(large_batch.EXPLORING) & set(_options().seeds)
    assert large_batch.BASELINE in _options("--schemes", "fixed_ring").schemes


def _measured(tmp_path, monkeypatch, curve: list[dict], problem: Problem | None) -> dict:
    one = dataclasses.replace(
        large_batch.training("fixed_ring", "none", 2, 1, _options()), folder=tmp_path
    )

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
