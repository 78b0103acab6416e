"""The parts of the study `claim` that compute: curves, rows, goals, table, picture, order, what is kept."""

# The imports come after the check that the packages are there.
# ruff: noqa: E402

import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for needed in ("torch", "espeakng_loader", "kaldi_native_fbank", "matplotlib", "tqdm"):
    pytest.importorskip(needed)

import torch

from lab.studies.claim import __main__ as script
from lab.studies.claim import (
    evaluation,
    learners,
    schemes,
    study,
    table,
    tasks,
)
from lab.studies.claim.curves import Point, at_samples, last_until, time_to
from lab.studies.claim.recorder import Recorder, copied, copy_file, log_file, start_file
from lab.studies.claim.records import Key, Record

DEADLINE_S = 120
CURVE = [Point(1, 10, 4.0), Point(10, 100, 3.0), Point(100, 1000, 2.0)]


# ---- curves


def test_the_time_to_a_loss_is_between_the_points_around_it() -> None:
    at = time_to(CURVE, 2.5)
    assert at is not None and math.isclose(at, 10**1.5)
    assert time_to(CURVE, 2.0) == pytest.approx(100)
    assert time_to(CURVE, 5.0) == 1, "an upper bound"
    assert time_to(CURVE, 1.9) is None
    assert time_to([], 3.0) is None


def test_the_first_time_counts_if_the_loss_rises_again() -> None:
    rising = [Point(1, 1, 4.0), Point(2, 2, 3.0), Point(4, 4, 3.5), Point(8, 8, 2.5)]
    assert time_to(rising, 3.0) == pytest.approx(2)


def test_the_loss_after_samples() -> None:
    loss = at_samples(CURVE, 10**1.5)
    assert loss is not None and math.isclose(loss, 3.5)
    assert at_samples(CURVE, 1000) == 2.0
    assert at_samples(CURVE, 1001) is None
    assert at_samples(CURVE, 9) is None
    assert at_samples([Point(1, 0, 5.0), Point(2, 10, 4.0), Point(3, 10, 4.0)], 10) == 4.0


def test_the_last_point_until_a_time() -> None:
    assert last_until(CURVE, 10) == CURVE[1]
    assert last_until(CURVE, 9.9) == CURVE[1], "a copy is made a little later than at its time"
    assert last_until(CURVE, 0.5) is None


# ---- rows, goals, table


def record(
    scheme: str, seed: int, faster: float = 1.0, situation: str = "1gbit", **changes: Any
) -> Record:
    """A run whose times are those of CURVE, divided."""
    curve = [Point(p.seconds / faster, p.samples, p.loss) for p in CURVE]
    key = Key("text", situation, scheme, seed)
    return dataclasses.replace(Record(key, {"seconds": 100.0}, curve, None, 9.0), **changes)


def test_a_row_compares_equal_seeds() -> None:
    runs = [record("ddp", 0), record("ddp", 1), record("hadpsgd", 0, 4.0), record("hadpsgd", 2)]
    row = table.rows(runs, 100.0)["text", "1gbit", "hadpsgd"]
    assert (row.seeds, row.compared) == (2, 1)
    assert row.part == [pytest.approx(0.25)]
    assert row.equal == [2.0]
    assert row.loss == [2.0, 2.0]
    assert row.speed == [pytest.approx(40.0), pytest.approx(10.0)]


# ---- order, and what is kept


def test_schemes_take_turns_in_another_order_for_each_seed() -> None:
    words = ["--tasks", "text", "--only", "even", "slow", "--schemes", "ddp", "hadpsgd"]
    keys = list(study.turns(script.arguments([*words, "--seeds", "0", "1"])))
    assert [(key.seed, key.situation, key.scheme) for key in keys] == [
        (0, "even", "ddp"), (0, "even", "hadpsgd"), (0, "slow", "ddp"), (0, "slow", "hadpsgd"),
        (1, "even", "hadpsgd"), (1, "even", "ddp"), (1, "slow", "hadpsgd"), (1, "slow", "ddp"),
    ]  # fmt: skip


def options(tmp_path: Path, *words: str) -> Any:
    return script.arguments(["--tasks", "text", "--quick", "--out", str(tmp_path), *words])


def test_what_cannot_run_here_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = schemes.importlib.util.find_spec
    monkeypatch.setattr(
        schemes.importlib.util, "find_spec", lambda name: None if name == "torchft" else find(name)
    )
    monkeypatch.setattr(learners, "unavailable", lambda: "a cluster needs root, this is user 1000")
    found = study.reasons(options(tmp_path))
    assert found["text", "even", "diloco"] == "not installed: pip install torchft"
    assert found["text", "1gbit", "ddp"] == "a cluster needs root, this is user 1000"
    assert ("text", "even", "ddp") not in found


# ---- copies


def test_a_learner_copies_its_model_and_the_mean_is_evaluated(tmp_path: Path) -> None:
    task = tasks.named("text", quick=True)
    torch.manual_seed(0)
    model = task.model()
    start_file(tmp_path).write_text("0.0")  # long ago
    recorder = Recorder(tmp_path, 0, model, [0.0, 0.0])
    recorder.leave()  # else it would end this process, two minutes later
    before = set(threading.enumerate())
    recorder.start()
    records = set(threading.enumerate()) - before
    wait_for = threading.Event()
    for _ in range(100 * DEADLINE_S):
        if copied(tmp_path, 1, 0):
            break
        wait_for.wait(0.01)
    values = np.fromfile(copy_file(tmp_path, 1, 0), np.float32)
    whole = torch.nn.utils.parameters_to_vector(model.parameters())
    assert np.array_equal(values, whole.detach().numpy())
    (values + 1).tofile(copy_file(tmp_path, 1, 1))
    log_file(tmp_path, 1).write_text('{"number": 1, "seconds": 7.0, "steps": 3}\n{"number": 2')
    mean = evaluation.mean([copy_file(tmp_path, 1, rank) for rank in range(2)])
    assert np.allclose(mean, values + 0.5, atol=1e-6)
    points = evaluation.curve(tmp_path, task, [0.0, 0.0, 9.0])
    assert [point.samples for point in points] == [0, 3 * task.samples]
    assert points[0].loss == pytest.approx(task.evaluate(model))
    assert points[1].loss != points[0].loss
    assert copied(tmp_path, 2, 1) is None, "its line is not complete"
    for thread in records:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_training_that_fails_copies_no_more(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 2, torch.nn.Linear(1, 1), [])
    with pytest.raises(ValueError), recorder.until_failure():
        raise ValueError("on purpose")
    assert (tmp_path / "ended-2").exists()
