"""examples/real_speech: transcripts, splits without leaks, minibatches, n-grams, the decoder, a small run."""

# The imports come after the check that the example's packages are there.
# ruff: noqa: E402

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

for needed in ("torch", "soundfile", "kaldi_native_fbank", "kaldifst", "kaldi_decoder", "jiwer"):
    pytest.importorskip(needed)

import soundfile
import torch

from examples.acoustic_model.speech import alone
from examples.acoustic_model.speech.problem import Problem
from examples.real_speech import corpus, decode, dialogs, importers, model, ngram, prepare
from examples.real_speech import train as script
from examples.real_speech.cuts import CutBatches, check
from examples.real_speech.utterances import Utterance, features

LUA = """
dialogId("a-1", "font_small", "What is \\"this\\"?")
dialogStr("Wat is \\"dit\\"?")


dialogId("a-2", "font_parrot", "Don't!")
dialogStr("Rrrot op, zo\u2019n kapitein...")
dialogId("a-3", "font_big", "There are 3.")
dialogStr("Er zijn er 3.")
dialogId("laser", "", "")
dialogId( "b-1", "font_big", "In a new line." )
dialogStr(
    "Op een nieuwe regel." )
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Denk je dat hier iemand woont?", "denk je dat hier iemand woont"),
        ("Krut\u00fd, kapit\u00e1n!", "krut\u00fd kapit\u00e1n"),
        ("Hoofdstuk VIII", "hoofdstuk viii"),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0928\u094d\u0926\u0940"),
        ("'s Morgens - zo\u2019n  dag", "s morgens zo'n dag"),
        ("Een zee, heel ver.", "een zee heel ver"),
        ("Nummer 7", ""),
        ("...", ""),
    ],
)
def test_texts_are_letters(text: str, expected: str) -> None:
    assert dialogs.normalised(text) == expected


def test_lines_are_read_with_their_speakers(tmp_path: Path) -> None:
    (tmp_path / "scene").mkdir()
    (tmp_path / "scene" / "dialogs_nl.lua").write_text(LUA, "utf-8")
    assert list(dialogs.lines(tmp_path, "nl")) == [
        dialogs.Line("scene", "a-1", "small", "wat is dit"),
        dialogs.Line("scene", "a-2", "parrot", "rot op zo'n kapitein"),
        dialogs.Line("scene", "b-1", "big", "op een nieuwe regel"),
    ]


def utterance(name: int, scene: int, text: str, seconds: float = 2.0) -> Utterance:
    return Utterance(str(name), f"s{scene}", "small", text, "", seconds)


def test_no_scene_and_no_text_is_in_two_splits() -> None:
    everything = [utterance(i, i // 7, f"zin {i % 50}") for i in range(140)]
    for seed in range(20):
        parts = prepare.split(everything, seed)
        for one, other in itertools.combinations(parts.values(), 2):
            assert not {u.scene for u in one} & {u.scene for u in other}
            assert not {u.text for u in one} & {u.text for u in other}
        share = sum(u.seconds for u in parts["test"]) / sum(u.seconds for u in everything)
        assert 0.1 <= share <= 0.1 + 1 / 20 + 1e-9
        assert parts["train"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A game of 10 scenes, in which tones stand for letters."""
    game = tmp_path_factory.mktemp("game")
    random = np.random.default_rng(0)
    for scene in range(10):
        sound, told = game / "sound" / f"s{scene}" / "nl", game / "script" / f"s{scene}"
        sound.mkdir(parents=True)
        told.mkdir(parents=True)
        lines = []
        for i in range(6):
            text = "".join(random.choice(list("abc "), 5)).strip() or "a"
            tones = [
                np.sin(2 * np.pi * (300 + 250 * (ord(c) % 7)) * np.arange(3300) / 22050)
                for c in text
            ]
            samples = 0.3 * np.concatenate([*tones, np.zeros(3300)])
            soundfile.write(sound / f"rand-{i}.ogg", np.stack([samples, samples], 1), 22050)
            font = "big" if i % 2 else "small"
            lines.append(f'dialogId("rand-{i}", "font_{font}", "x")\ndialogStr("{text}")\n')
        (told / "dialogs_nl.lua").write_text("".join(lines))
    out = tmp_path_factory.mktemp("speech") / "nl"
    prepare.prepare(prepare.game_of("nl", game, out), out)
    assert prepare.is_prepared(out)
    return out


def test_recordings_of_equal_names_in_two_scenes_have_their_own_texts(
    data: Path, tmp_path: Path
) -> None:
    for scene, text in (("one", "eerste"), ("two", "tweede")):
        for part in (tmp_path / "sound" / scene / "nl", tmp_path / "script" / scene):
            part.mkdir(parents=True)
        soundfile.write(tmp_path / "sound" / scene / "nl" / "rand-1.ogg", np.zeros(22050), 22050)
        line = f'dialogId("rand-1", "font_big", "x")\ndialogStr("{text}")\n'
        (tmp_path / "script" / scene / "dialogs_nl.lua").write_text(line)
    found = {u.scene: u.text for u in prepare.utterances(tmp_path, "nl")}
    assert found == {"one": "eerste", "two": "tweede"}
    with pytest.raises(Problem, match="2 scenes are too few"):
        prepare.split(prepare.utterances(tmp_path, "nl"))


def test_features_are_normalised_and_stacked(data: Path) -> None:
    split = corpus.Split(data, "train")
    whole = np.concatenate([split.frames(i) for i in range(len(split))])
    assert whole.shape[1] == 240
    np.testing.assert_allclose(whole.std(0), 1, atol=0.15)
    batch = split.batch([0, 1])
    assert batch.lengths.tolist() == split.lengths()[:2].tolist()
    assert batch.counts.tolist() == [len(split.texts[0]), len(split.texts[1])]
    said = "".join(split.letters[code - 1] for code in batch.letters.tolist())
    assert said == split.texts[0] + split.texts[1]


@pytest.mark.parametrize("by_speaker", [False, True])
def test_learners_have_equal_parts_without_overlap(data: Path, by_speaker: bool) -> None:
    split = corpus.Split(data, "train")
    parts = [corpus.part(split, rank, 4, by_speaker, seed=1) for rank in range(4)]
    assert len({len(mine) for mine in parts}) == 1
    together = [i for mine in parts for i in mine]
    assert len(set(together)) == len(together) > len(split) - 4
    speakers = [{split.speakers[i] for i in mine} for mine in parts]
    assert (sum(len(who) == 1 for who in speakers) >= 3) is by_speaker


def test_minibatches_of_an_epoch_have_each_utterance_once(data: Path) -> None:
    split = corpus.Split(data, "train")
    lengths, mine = split.lengths(), list(range(len(split)))
    epochs = [list(corpus.minibatches(mine, lengths, 4, 0, epoch)) for epoch in (1, 1, 2, 0)]
    for batches in epochs:
        chosen = [i for batch in batches for i in batch]
        assert len(chosen) == len(set(chosen)) > len(mine) - 4
        assert all(len(batch) == 4 for batch in batches)
    assert epochs[0] == epochs[1] != epochs[2]
    first = [max(lengths[batch]) for batch in epochs[3]]
    assert first == sorted(first)


def test_masks_cover_what_they_may() -> None:
    frames = torch.ones(3, 40, 240)
    batch = corpus.Batch(frames, torch.tensor([40, 30, 20]), torch.ones(3), torch.ones(3))
    random, masked = torch.Generator().manual_seed(0), 0.0
    for _ in range(50):
        made = model.augmented(batch, random).frames
        assert set(made.unique().tolist()) <= {0.0, 1.0}
        gone = 1 - made.mean((1, 2))
        bound = 2 * 16 / 80 + 2 * torch.tensor([8, 6, 4]) / 40
        assert (gone <= bound + 1e-6).all()
        masked += float(gone.mean())
    assert 0.1 < masked / 50 < 0.5
    assert (frames == 1).all()


def test_padding_changes_no_score() -> None:
    """Each direction begins at an end of the utterance, however long the longest one of the minibatch is."""
    torch.manual_seed(0)
    recogniser = model.Recogniser(model.Shape(5, layers=2, cells=4)).eval()
    frames, lengths = torch.randn(3, 9, 3 * 80), torch.tensor([9, 4, 1])
    together = recogniser(frames, lengths)
    for i, length in enumerate(lengths):
        alone = recogniser(frames[i : i + 1, :length], lengths[i : i + 1])
        torch.testing.assert_close(together[i, :length], alone[0])


def test_the_best_path_is_read_without_blanks_and_repetitions() -> None:
    path = [0, 1, 1, 0, 1, 2, 2, 3, 0]  # letters "ab "
    scores = torch.nn.functional.one_hot(torch.tensor([path]), 4).float()
    assert model.greedy(scores, torch.tensor([9]), "ab ") == ["aab"]
    assert model.greedy(scores, torch.tensor([3]), "ab ") == ["a"]


def test_probabilities_of_letters_by_hand() -> None:
    letters = ngram.LetterModel(["ab", "aa"], "ab", 2)
    # after "": a 3 times, b once, the end twice; 3 kinds; below, each of 3 symbols has 1/3
    assert letters.probability("a", "") == pytest.approx((3 + 3 / 3) / (6 + 3))
    assert letters.probability(ngram.END, "") == pytest.approx((2 + 3 / 3) / 9)
    # after "a": b, a, the end, once each
    assert letters.probability("b", "xa") == pytest.approx((1 + 3 * (1 + 1) / 9) / (3 + 3))
    # after "b": the end once; b was not seen
    assert letters.probability("b", "b") == pytest.approx((0 + 1 * (1 + 1) / 9) / (1 + 1))
    for history in ("", "a", "b", ngram.BEGIN, "never"):
        assert sum(letters.probability(c, history) for c in letters.symbols) == pytest.approx(1)


def log(rows: list[list[float]]) -> np.ndarray:
    return np.log(np.array(rows, np.float32) / np.sum(rows, 1, keepdims=True))


def test_the_decoder_weighs_scores_and_letters_by_hand() -> None:
    """Outputs: blank, a, b. Without n-grams b wins at the end, with them a: b never follows a."""
    letters = ngram.LetterModel(["aa"] * 20 + ["b"] * 20, "ab", 3)
    scores = log([[1, 8, 1], [8, 1, 1], [1, 4, 5]])
    assert decode.Decoder(ngram.graph(letters, 0.0, 0.0), "ab").text(scores) == "ab"
    assert decode.Decoder(ngram.graph(letters, 1.0, 0.0), "ab").text(scores) == "aa"
    # all costs of one path, in nats: scores, and the n-grams of "aa"
    graph = ngram.graph(letters, 1.0, 0.0)
    decoder = decode.Decoder(graph, "ab")
    decoder.text(scores)
    _, path = decoder._decoder.get_best_path()
    _, _, _, cost = decoder._fst.get_linear_symbol_sequence(path)
    p = letters.probability
    said = p("a", "<") * p("a", "<a") * p(ngram.END, "aa")
    heard = 0.8 * 0.8 * 0.4
    assert cost.value1 + cost.value2 == pytest.approx(-math.log(said * heard), abs=1e-4)
    # a letter that gains enough is written more often
    doubtful = log([[6, 4, 1], [8, 1, 1], [6, 4, 1]])
    assert decode.Decoder(ngram.graph(letters, 0.1, 0.0), "ab").text(doubtful) == ""
    assert decode.Decoder(ngram.graph(letters, 0.1, 1.0), "ab").text(doubtful) == "aa"


def test_a_small_run_is_trained_and_decoded(data: Path, tmp_path: Path) -> None:
    words = ["--strategy", "single", "--data", str(data), "--out", str(tmp_path), "--epochs", "3"]
    options = script.arguments([*words, "--layers", "1", "--cells", "8", "--warm-up", "0.5"])
    script.train(alone, options)
    entries = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in entries] == [1, 2, 3]
    assert entries[2]["heldout_loss"] < entries[0]["heldout_loss"]
    found = decode.decode(tmp_path / "model.pt", data, 3)
    for how in ("greedy", "ngram"):
        assert found[how]["cer"] >= 0
        assert len(found[how]["wer_errors"]) == len(found["said"]) == len(found["heard"])
    other = corpus.read(data) | {"letters": "xyz"}
    (tmp_path / "corpus.json").write_text(json.dumps(other))
    for name in ("train", "dev", "test"):
        for part in ("features", "offsets"):
            (tmp_path / f"{name}.{part}.npy").symlink_to(data / f"{name}.{part}.npy")
    with pytest.raises(Problem, match="has the letters .*'xyz'; give the --data"):
        decode.decode(tmp_path / "model.pt", tmp_path, 3)


def sounds(folder: Path) -> list[Path]:
    """Two recordings of 2 s at 16 kHz."""
    random, paths = np.random.default_rng(1), []
    for i in range(2):
        paths.append(folder / f"r{i}.wav")
        soundfile.write(paths[-1], 0.1 * random.standard_normal(32000), 16000)
    return paths


def kaldi(folder: Path, **tables: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in tables.items():
        (folder / name.replace("_", ".")).write_text(text, "utf-8")
    return folder


def test_a_data_directory_of_kaldi_is_read(tmp_path: Path) -> None:
    one, other = sounds(tmp_path)
    folder = kaldi(
        tmp_path / "data",
        wav_scp=f"r0 {one}\nr1 {other}\n",
        text="u0 HALLO WERELD\nu1 Nee!\nu2 12\nu3 nog een\n",
        segments="u0 r0 0.0 1.0\nu1 r0 1.25 2.0\nu2 r1 0 1\nu3 r1 0.5 1.5\n",
        utt2spk="u0 anna\nu1 anna\nu2 bert\nu3 bert\n",
    )
    found = importers.from_kaldi(folder)
    assert [(u.name, u.text, u.speaker, u.start, u.seconds) for u in found] == [
        ("u0", "hallo wereld", "anna", 0.0, 1.0),
        ("u1", "nee", "anna", 1.25, 0.75),
        ("u3", "nog een", "bert", 0.5, 1.0),
    ]
    assert [len(features(u)) for u in found] == [98, 73, 98]
    whole = importers.from_kaldi(
        kaldi(tmp_path / "whole", wav_scp=f"r1\t{other}", text="r1\tnog een")
    )
    (last,) = whole
    assert (last.text, last.speaker) == ("nog een", "r1")
    part = features(last)[50:148].astype(np.float32)
    np.testing.assert_allclose(part - part.mean(0), features(found[2]), atol=0.02)


def test_features_of_kaldi_are_taken(tmp_path: Path) -> None:
    native = pytest.importorskip("kaldi_native_io")
    folder = kaldi(tmp_path / "data", text="u0 ja\nu1 nee\n")
    made = {f"u{i}": np.random.default_rng(i).random((20, 80 - i), np.float32) for i in range(2)}
    with native.FloatMatrixWriter(f"ark,scp:{folder}/feats.ark,{folder}/feats.scp") as writer:
        for name, frames in made.items():
            writer.write(name, frames)
    good, bad = importers.from_kaldi(folder)
    expected = made["u0"] - made["u0"].mean(0)
    np.testing.assert_allclose(features(good), expected, atol=1e-3)
    with pytest.raises(Problem, match="u1 in feats.scp has 79 features per frame, allowed are 80"):
        features(bad)


def manifest(folder: Path) -> Path:
    lhotse = pytest.importorskip("lhotse")
    cuts = []
    for i, path in enumerate(sounds(folder)):
        recording = lhotse.Recording.from_file(path)
        said = [
            lhotse.SupervisionSegment(
                f"u{i}{j}", recording.id, j * 0.8, 0.7, text=text, speaker=f"s{i}"
            )
            for j, text in enumerate(("Hallo, wereld", "Nee"))
        ]
        cuts.append(lhotse.MonoCut(f"c{i}", 0.0, 2.0, 0, recording=recording, supervisions=said))
    path = folder / "cuts.jsonl.gz"
    lhotse.CutSet.from_cuts(cuts).to_file(path)
    return path


def test_a_manifest_of_lhotse_is_read(tmp_path: Path) -> None:
    found = importers.from_lhotse(manifest(tmp_path))
    assert [(u.name, u.text, u.speaker, u.start, u.seconds) for u in found] == [
        ("u00", "hallo wereld", "s0", 0.0, 0.7),
        ("u01", "nee", "s0", 0.8, 0.7),
        ("u10", "hallo wereld", "s1", 0.0, 0.7),
        ("u11", "nee", "s1", 0.8, 0.7),
    ]
    assert features(found[1]).shape == (68, 80)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(Problem, match="bad.jsonl is no manifest of cuts"):
        importers.from_lhotse(tmp_path / "bad.jsonl")


def test_a_corpus_that_is_split_is_prepared(tmp_path: Path) -> None:
    path = manifest(tmp_path)
    parts = prepare.imported(importers.from_lhotse, [f"{name}={path}" for name in prepare.SPLITS])
    prepare.prepare(parts, tmp_path / "out")
    split = corpus.Split(tmp_path / "out", "train")
    assert split.texts == ["hallo wereld", "nee"] * 2
    assert split.frames(1).shape == (22, 240)
    lost = Utterance("u", "s", "who", "ja", "/nowhere.wav", 1.0)
    with pytest.raises(Problem, match="u: /nowhere.wav cannot be read"):
        prepare.prepare({**parts, "dev": [lost]}, tmp_path / "lost")
    brief = [Utterance("u", "s", "who", "ja", parts["dev"][0].sound, 0.04)]
    with pytest.raises(Problem, match="dev has no utterance of 0.1 to 16 s with a text; it had 1"):
        prepare.prepare({**parts, "dev": brief}, tmp_path / "brief")
    prepare.prepare({**parts, "dev": [*brief, *parts["dev"]]}, tmp_path / "mixed")
    assert len(corpus.Split(tmp_path / "mixed", "dev")) == 4
    with pytest.raises(Problem, match="--out is missing"):
        prepare.arguments(["--lhotse", "train=a", "dev=b", "test=c"])
    with pytest.raises(Problem, match="is not train=PATH dev=PATH test=PATH"):
        prepare.imported(importers.from_lhotse, [f"train={path}", f"dev={path}", "dev="])


def test_cuts_are_dealt_to_learners_by_lhotse(data: Path, tmp_path: Path) -> None:
    path, split = manifest(tmp_path), corpus.Split(data, "train")
    for size in (1, 2):
        learners = [CutBatches([path], split, rank, size, 1.0, 0) for rank in range(size)]
        dealt = [list(learner.epoch(0)) for learner in learners]
        assert sum(len(batch.lengths) for batches in dealt for batch in batches) >= 4
        assert len({len(batches) for batches in dealt}) == 1
        for batch in dealt[0]:
            assert batch.frames.shape[2] == 240
            assert batch.lengths.tolist() == [22] * len(batch.lengths)
    assert CutBatches([path], split, 0, 2, 0.7, 0).steps == 2


def test_learners_with_manifests_of_their_own_may_make_different_numbers_of_steps(
    data: Path, tmp_path: Path
) -> None:
    path, split = manifest(tmp_path), corpus.Split(data, "train")
    lhotse = pytest.importorskip("lhotse")
    short = tmp_path / "short.jsonl.gz"
    lhotse.CutSet.from_cuts([next(iter(lhotse.CutSet.from_file(path)))]).to_file(short)
    learners = [CutBatches([path, short], split, rank, 2, 0.7, 0) for rank in range(2)]
    assert [len(list(learner.epoch(1))) for learner in learners] == [4, 2]
    check([path, short], 2)
    with pytest.raises(Problem, match="--cuts has 2 manifests, allowed are 1 and 4"):
        check([path, short], 4)
    with pytest.raises(
        Problem, match="--cuts with 2 manifests and --strategy ssgd: .*equal numbers"
    ):
        script.arguments(["--strategy", "ssgd", "--cuts", str(path), str(short)])
    with pytest.raises(Problem, match="--cuts with --batch or --by-speaker"):
        script.arguments(["--cuts", str(path), "--batch", "3"])
