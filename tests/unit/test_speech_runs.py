"""The acoustic-model example end to end on seconds of speech: same bytes, same weights."""

# The imports come after the check that the example's packages are there.
# ruff: noqa: E402

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

for needed in ("torch", "espeakng_loader", "kaldi_native_fbank", "scipy", "tqdm", "tensorboard"):
    pytest.importorskip(needed)

import torch

from examples.acoustic_model import prepare_data
from examples.acoustic_model import train as script
from examples.acoustic_model.speech import alone, corpus, journal, voices
from examples.acoustic_model.speech.launch import paths
from examples.acoustic_model.speech.problem import Problem
from examples.acoustic_model.speech.tasks import SPLITS, TASKS

TINY = dataclasses.replace(
    TASKS["easy"], train_hours=0.01, dev_hours=0.002, test_hours=0.002, state_frames=30
)


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("speech") / "two"
    assert prepare_data.prepare(TINY, folder, jobs=2, quiet=True)
    return folder


def test_the_same_bytes_whatever_the_number_of_jobs(speech, tmp_path):
    prepare_data.prepare(TINY, tmp_path / "one", jobs=1, quiet=True)
    assert _digests(tmp_path / "one") == _digests(speech)
    assert len(_digests(speech)) > 15


def test_finished_data_are_kept_and_other_settings_made_anew(speech, monkeypatch):
    assert not prepare_data.prepare(TINY, speech, jobs=1, quiet=True)
    made = []
    monkeypatch.setattr(
        prepare_data, "_make_split", lambda task, folder, split, *_: made.append(split)
    )
    monkeypatch.setattr(prepare_data, "_label", lambda *_: None)
    monkeypatch.setattr(prepare_data, "_finish", lambda *_: None)
    assert prepare_data.prepare(dataclasses.replace(TINY, seed=1), speech, jobs=1, quiet=True)
    assert made == list(SPLITS)
    made.clear()
    (speech / "settings.json").rename(speech / "away")  # all splits done, cut short after them
    try:
        assert prepare_data.prepare(TINY, speech, jobs=1, quiet=True)
    finally:
        (speech / "away").rename(speech / "settings.json")
    assert made == []


def test_installed_voices_split_without_overlap():
    split = voices.split_voices(voices.installed(), seed=0)
    families = {name: {voice.family for voice in split[name]} for name in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not families[one] & families[other]
    for name in SPLITS:
        assert sum(voice.female for voice in split[name]) >= 3
        assert sum(not voice.female for voice in split[name]) >= 3


def test_segments_are_windows_of_their_utterance(speech):
    split = corpus.Split(speech, "train")
    frames, labels = split[[0, 1, len(split) - 1]]
    whole = split.utterance(0)
    np.testing.assert_allclose(frames[0], whole[:21], atol=1e-5)
    np.testing.assert_allclose(frames[1], whole[21:42], atol=1e-5)
    assert labels.shape == (3, 21)
    assert len(split) == (np.diff(split.offsets) // 21).sum()


def test_features_are_normalised(speech):
    split = corpus.Split(speech, "train")
    everything = np.concatenate([split.utterance(i) for i in range(split.utterances)])
    np.testing.assert_allclose(everything.mean(0), 0, atol=0.05)
    np.testing.assert_allclose(everything.std(0), 1, atol=0.01)


def _options(data: Path, out: Path, *more: str):
    out.mkdir(exist_ok=True)
    fixed = ["--strategy", "single", "--data", str(data), "--out", str(out), "--epochs", "3"]
    return script.arguments([*fixed, "--hidden", "8", "--batch", "8", *more])


def _final(folder: Path) -> dict[str, torch.Tensor]:
    return journal.load(folder / "model.pt")["model"]


def _as_horovod_wraps(optimizer, named_parameters=None):
    """A new optimizer over the same parameters, as Horovod's: momentum loaded before has failed."""
    return type(optimizer)(optimizer.param_groups, **optimizer.defaults)


NATURAL = ("--optimizer", "natural", "--schedule", "exponential", "--preset", "dnn")


@pytest.mark.parametrize("wrap", [alone.DistributedOptimizer, _as_horovod_wraps])
@pytest.mark.parametrize("more", [(), NATURAL], ids=["sgd", "natural"])
def test_resuming_gives_the_weights_of_an_uninterrupted_run(
    speech, tmp_path, monkeypatch, wrap, more
):
    if more:
        pytest.importorskip("horovod.torch")
    monkeypatch.setattr(alone, "DistributedOptimizer", wrap)
    script.train(alone, _options(speech, tmp_path / "whole", *more))
    cut = tmp_path / "cut"
    one_epoch = script.Trainer.epoch

    def interrupted(self, epoch):
        if epoch == 2:
            raise KeyboardInterrupt
        return one_epoch(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(script.Trainer, "epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            script.train(alone, _options(speech, cut, *more))
    assert not (cut / "model.pt").exists()
    script.train(alone, _options(speech, cut, "--resume", *more))
    whole = _final(tmp_path / "whole")
    assert all(torch.equal(whole[name], weight) for name, weight in _final(cut).items())
    lines = {name: journal.read(tmp_path / name / "heldout.jsonl") for name in ("whole", "cut")}
    for key in ("epoch", "samples", "heldout_loss", "lr"):
        assert [e[key] for e in lines["whole"]] == [e[key] for e in lines["cut"]]
    assert lines["whole"][-1]["heldout_loss"] < lines["whole"][0]["heldout_loss"]


def test_resuming_with_other_options_is_refused(speech, tmp_path):
    script.train(alone, _options(speech, tmp_path / "run", "--epochs", "1"))
    others = {
        r"has lr 0\.1, this run has 0\.2": ("--lr", "0.2"),
        "has optimizer sgd, this run has natural": ("--optimizer", "natural"),
        "has schedule short, this run has exponential": ("--schedule", "exponential"),
    }
    for told, words in others.items():
        other = _options(speech, tmp_path / "run", "--epochs", "1", *words, "--resume")
        with pytest.raises(Problem, match=told):
            script.train(alone, other)


@pytest.mark.parametrize("how", ["plain", "weighted"])
def test_the_final_model_counts_each_by_its_heldout_loss(speech, tmp_path, monkeypatch, how):
    weights = []
    told = lambda model, weight: weights.append(weight)  # noqa: E731
    monkeypatch.setattr(alone, "average_model", told, raising=False)
    options = _options(speech, tmp_path / how)
    options.combine = how  # refused where there is one model only
    trainer = script.Trainer(alone, options)
    loss, _ = trainer.heldout(trainer.model)
    trainer.combine()
    assert weights == pytest.approx([1.0 if how == "plain" else 1 / loss])


def test_divergence_ends_a_training(speech, tmp_path, monkeypatch):
    losses = iter([(6.0, 1.0), (float("nan"), 1.0)])
    monkeypatch.setattr(script.Trainer, "heldout", lambda *_: next(losses))
    with pytest.raises(Problem, match="loss is nan after epoch 1: training diverged"):
        script.train(alone, _options(speech, tmp_path / "run"))
    lines = (tmp_path / "run" / "heldout.jsonl").read_text()
    assert [entry["heldout_loss"] for entry in map(json.loads, lines.splitlines())] == [6.0, None]
    assert "NaN" not in lines
    assert not (tmp_path / "run" / "model.pt").exists()


def test_the_rate_warms_up_and_is_annealed():
    options = script.arguments(["--epochs", "8", "--lr", "0.1", "--anneal", "5"])
    assert script.rate(options, 4, 0) == pytest.approx(0.1)
    assert script.rate(options, 4, 0.5) == pytest.approx(0.25)
    assert script.rate(options, 4, 4.9) == pytest.approx(0.4)
    assert script.rate(options, 4, 5) == pytest.approx(0.4 / 2**0.5)
    assert script.rate(options, 4, 7.5) == pytest.approx(0.4 / 2**1.5)
    assert script.rate(options, 1, 0.5) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["prepare_data", "--jobs", "0"], "error: --jobs is 0, allowed are 1 to 1024"),
        (["prepare_data", "--out", "taken"], "error: --out taken is a file"),
        (["train", "--strategy", "single", "--data", "nowhere"], "error: no nowhere/states.json"),
        (["decode", "nowhere.pt"], "error: no nowhere.pt"),
    ],
)
def test_mistakes_are_told_in_one_line(command, message, tmp_path):
    (tmp_path / "taken").touch()
    line = [sys.executable, "-m", f"examples.acoustic_model.{command[0]}", *command[1:]]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | paths(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
