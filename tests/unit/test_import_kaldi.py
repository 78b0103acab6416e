"""The import of features and alignments of Kaldi into the acoustic model's corpus."""

# The imports come after the check that the example's packages are there.
# ruff: noqa: E402

from pathlib import Path

import numpy as np
import pytest

kaldi = pytest.importorskip("kaldi_native_io")

from examples.acoustic_model import import_kaldi, train
from examples.acoustic_model.speech import corpus
from examples.acoustic_model.speech.problem import Problem

FRAMES = {"u0": 70, "u1": 45, "u2": 64, "unaligned": 30}


def features(width: int = 40) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(5, 2, (n, width)).astype(np.float32) for name, n in FRAMES.items()}


def pdfs() -> dict[str, list[int]]:
    random = np.random.default_rng(1)
    aligned = [name for name in FRAMES if name != "unaligned"]
    return {name: random.integers(0, 300, FRAMES[name]).tolist() for name in aligned}


def written(
    folder: Path, frames: dict[str, np.ndarray], numbers: dict[str, list[int]], text: str = ""
) -> list[str]:
    """Write data as Kaldi does; return the arguments of both splits, which are the same here."""
    folder.mkdir(exist_ok=True)
    with kaldi.FloatMatrixWriter(f"ark,scp:{folder}/feats.ark,{folder}/feats.scp") as writer:
        for name, matrix in frames.items():
            writer.write(name, matrix)
    with kaldi.Int32VectorWriter(f"ark{text}:{folder}/pdf.ark") as writer:
        for name, row in numbers.items():
            writer.write(name, row)
    pair = [f"{folder}/feats.scp", f"{folder}/pdf.ark"]
    return ["--train", *pair, "--dev", *pair, "--out", f"{folder}/out"]


def imported(words: list[str]) -> dict:
    return import_kaldi.imported(import_kaldi.arguments(words))


@pytest.mark.parametrize("text", ["", ",t"], ids=["binary", "text"])
def test_frames_and_labels_are_those_of_kaldi(text: str, tmp_path: Path) -> None:
    frames, numbers = features(), pdfs()
    told = imported(written(tmp_path / "data", frames, numbers, text))
    total = sum(map(len, numbers.values()))
    counts = {"without an alignment": 1, "without features": 0}
    assert told["train"] == {"utterances": 3, "frames": total, **counts}
    assert told["pdfs"] == 1 + max(map(max, numbers.values()))
    split = corpus.Split(tmp_path / "data" / "out", "train")
    assert split.utterances == 3
    assert len(split) == sum(len(row) // corpus.SEGMENT for row in numbers.values())
    inputs, labels = split[[0, 3]]  # the first segment of u0, the first of u1
    assert inputs.shape == (2, corpus.SEGMENT, 120)
    np.testing.assert_array_equal(labels[0], numbers["u0"][: corpus.SEGMENT])
    np.testing.assert_array_equal(labels[1], numbers["u1"][: corpus.SEGMENT])
    scale = 1 / np.load(tmp_path / "data" / "out" / "std.npy")
    expected = (frames["u1"] - frames["u1"].mean(0))[: corpus.SEGMENT] * scale[:40]
    np.testing.assert_allclose(inputs[1, :, :40], expected, atol=0.01)


@pytest.mark.extended
def test_the_trainer_takes_it(tmp_path: Path) -> None:
    imported(written(tmp_path / "data", features(), pdfs()))
    words = ["--strategy", "single", "--data", f"{tmp_path}/data/out", "--out", f"{tmp_path}/run"]
    options = train.arguments([*words, "--epochs", "1", "--batch", "2", "--hidden", "8"])
    train.train(train.started(options), options)
    assert (tmp_path / "run" / "model.pt").exists()


# a reader that could not be opened fails again when it is deleted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("width", "u0 has 39 features per frame, allowed are 40"),
        ("frames", "u1 has 45 frames, and 44 in its alignment"),
        ("names", "none of its utterances has an alignment"),
        ("negative", "u0 has pdfs -1 to .*, allowed are 0 to 32767"),
        ("no alignment", "no file .*pdf.ark; make it with Kaldi's ali-to-pdf"),
        ("aligned twice", "u0 is there twice"),
        ("moved", "cannot be read"),
        ("cut short", "pdf.ark: the alignment after u1 cannot be read"),
        ("nan", "u2 has features that are not finite"),
    ],
)
def test_bad_data_are_told_and_nothing_is_left(fault: str, told: str, tmp_path: Path) -> None:
    frames, numbers = features(39 if fault == "width" else 40), pdfs()
    if fault == "frames":
        numbers["u1"].pop()
    if fault == "names":
        numbers = {f"other-{name}": row for name, row in numbers.items()}
    if fault == "negative":
        numbers["u0"][3] = -1
    if fault == "nan":
        frames["u2"][5, 7] = np.nan
    data = tmp_path / "data"
    words = written(data, frames, numbers)
    if fault == "no alignment":
        (data / "pdf.ark").unlink()
    if fault == "moved":
        (data / "feats.ark").unlink()
    if fault == "aligned twice":
        (data / "pdf.ark").write_bytes(2 * (data / "pdf.ark").read_bytes())
    if fault == "cut short":
        (data / "pdf.ark").write_bytes((data / "pdf.ark").read_bytes()[:-9])
    with pytest.raises(Problem, match=told):
        imported(words)
    assert not list(data.glob("out*"))


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    words = written(tmp_path / "data", features(), pdfs())
    imported(words)
    with pytest.raises(Problem, match="exists; name another folder"):
        imported(words)


def test_alignments_without_features_are_counted(tmp_path: Path) -> None:
    frames = features()
    del frames["u1"]
    told = imported(written(tmp_path / "data", frames, pdfs()))
    assert told["train"]["utterances"] == 2
    assert told["train"]["without features"] == 1
