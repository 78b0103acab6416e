"""The pure parts of the acoustic-model example, each against another road to the same value."""

import dataclasses
import itertools
import os
import time

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("torch")

from examples.acoustic_model.speech import features, lexicon, recording, scoring, viterbi, voices
from examples.acoustic_model.speech.model import AcousticModel, preset
from examples.acoustic_model.speech.problem import Problem
from examples.acoustic_model.speech.tasks import SPLITS, TASKS


def test_paper_preset_has_the_parameters_of_the_papers():
    import torch

    with torch.device("meta"):
        model = AcousticModel(preset("paper", outputs=1))
    assert sum(p.numel() for p in model.parameters()) == 43_154_944


def test_small_preset_scores_every_state_in_every_frame():
    import torch

    model = AcousticModel(preset("small", outputs=11))
    assert model(torch.zeros(3, 21, 120)).shape == (3, 21, 11)


def test_lengths_keep_padding_out():
    import torch

    model = AcousticModel(preset("small", outputs=5))
    frames = torch.randn(2, 9, 120)
    frames[1, 6:] = 1e3
    both = model(frames, torch.tensor([9, 6]))
    alone = model(frames[1:, :6])
    torch.testing.assert_close(both[1:, :6], alone)


def _delta_by_definition(c: np.ndarray) -> np.ndarray:
    """Frame by frame, the ends repeated."""
    last = len(c) - 1
    rows = [
        sum(n * (c[min(t + n, last)] - c[max(t - n, 0)]) for n in (1, 2)) / (2 * (1 + 4))
        for t in range(len(c))
    ]
    return np.stack(rows)


@pytest.mark.parametrize("frames", [1, 2, 7, 30])
def test_deltas_follow_the_definition(frames):
    c = np.random.default_rng(frames).standard_normal((frames, 40)).astype(np.float32)
    padded = np.pad(c, ((4, 4), (0, 0)), mode="edge")
    got = features.with_deltas(padded)
    assert got.shape == (frames, 120)
    np.testing.assert_array_equal(got[:, :40], c)
    np.testing.assert_allclose(got[:, 40:80], _delta_by_definition(c), atol=1e-6)
    # The delta-delta looks at features beyond the ends, not at deltas: extend, derive twice, cut.
    twice = _delta_by_definition(_delta_by_definition(np.pad(c, ((8, 8), (0, 0)), mode="edge")))
    np.testing.assert_allclose(got[:, 80:], twice[8:-8], atol=1e-6)


LEXICON = {"a": [[1]], "ab": [[1, 2]], "c": [[3, 2, 1], [2]]}


def _best_by_brute_force(scores: np.ndarray, penalty: float) -> tuple[str, ...]:
    """Try every alignment of every sequence of chains."""
    chains = [("", [0])] + [(word, p) for word in LEXICON for p in LEXICON[word]]
    frames, best = len(scores), (-np.inf, ())
    for count in range(1, frames + 1):
        for row in itertools.product(chains, repeat=count):
            states = [state for _, chain in row for state in chain]
            words = tuple(word for word, _ in row if word)
            for cut in itertools.combinations(range(1, frames), len(states) - 1):
                held = np.diff((0, *cut, frames))
                path = np.repeat(states, held)
                value = scores[np.arange(frames), path].sum() - penalty * len(words)
                best = max(best, (value, words))
    return best[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.01, 0.7, 3.0])
def test_viterbi_finds_what_brute_force_finds(seed, penalty):
    rng = np.random.default_rng(seed)
    lengths = np.array([6, 4, 1])
    scores = rng.standard_normal((3, 6, 4)).astype(np.float32) * 2
    found = viterbi.decode(viterbi.word_loop(LEXICON), scores, lengths, penalty)
    expected = [_best_by_brute_force(scores[b, :n], penalty) for b, n in enumerate(lengths)]
    assert found == expected


def test_states_back_off_to_what_was_heard_often():
    word = lexicon.SpokenWord("no", ("n", "oU"), (0, 6, 30))
    often = lexicon.States.learn([[word]] * 10, least=60)
    # Every third of oU has 80 frames; those of n have 20, too few for a context.
    assert "n|oU|#.0" in often.names
    assert "#|n|oU.0" not in often.names
    assert "n.0" in often.names
    labels = often.label([word], 33)
    assert often.names[labels[0]] == "n.0"
    assert often.names[labels[29]] == "n|oU|#.2"
    assert set(labels[30:]) == {0}


def test_unseen_phones_are_unknown():
    states = lexicon.States.learn([[lexicon.SpokenWord("a", ("eI",), (0, 9))]], least=1)
    assert states.chain(("zz",)) == [lexicon.UNKNOWN] * 3


def test_words_are_cut_at_pauses():
    phones = [(0, "n"), (5, "'oU"), (9, "_"), (10, "_:"), (12, "j"), (15, "E"), (20, "_")]
    assert lexicon.words_of(["no", "yes"], phones, 30) == [
        ("no", ("n", "oU"), (0, 5, 9)),
        ("yes", ("j", "E"), (12, 15, 20)),
    ]
    assert lexicon.words_of(["no"], phones, 30) is None


def _cast() -> list[voices.Voice]:
    women = [voices.Voice(f"w{c}{n}", True) for c in "abcdefgh" for n in ("", "2")]
    men = [voices.Voice(f"M{c}{n}", False) for c in "abcdefghijklmno" for n in ("", "2", "3")]
    return women + men + [voices.Voice(f"many{n}", False) for n in range(9)]


@pytest.mark.parametrize("seed", range(5))
def test_families_are_in_one_split_and_both_genders_in_each(seed):
    split = voices.split_voices(_cast(), seed)
    families = {name: {voice.family for voice in split[name]} for name in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not families[one] & families[other]
    assert all({voice.female for voice in split[name]} == {True, False} for name in SPLITS)
    assert sorted(v.name for name in SPLITS for v in split[name]) == sorted(v.name for v in _cast())


def test_too_few_voices_are_refused():
    with pytest.raises(Problem, match="families of one gender"):
        voices.split_voices(_cast()[:6], 0)


def test_the_digest_depends_on_every_setting():
    task = TASKS["easy"]
    assert task.digest() == dataclasses.replace(task).digest()
    changed = {
        field.name: (*value, "x") if isinstance(value, tuple) else type(value)(f"{value}1")
        for field in dataclasses.fields(task)
        if (value := getattr(task, field.name)) is not None
    }
    digests = {dataclasses.replace(task, **{k: v}).digest() for k, v in changed.items()}
    assert len(digests | {task.digest()}) == len(changed) + 1


def test_word_errors_are_counted_per_utterance():
    pytest.importorskip("jiwer")
    errors, words = scoring.word_errors(["a b c", "a"], ["a x", "a b"])
    assert errors.tolist() == [2, 1]
    assert words.tolist() == [3, 1]


def test_the_interval_covers_the_binomial_one():
    rng = np.random.default_rng(0)
    words = np.full(400, 5)
    errors = rng.binomial(words, 0.1)
    low, high = scoring.bootstrap(errors, words)
    centre = scoring.rate(errors, words)
    half = 1.96 * np.sqrt(centre * (1 - centre) / words.sum())
    assert low < centre < high
    assert (high - low) / 2 == pytest.approx(half, rel=0.2)
    assert scoring.bootstrap(errors, words) == (low, high)


def test_paired_bootstrap_sees_what_single_intervals_hide():
    rng = np.random.default_rng(1)
    words = np.full(300, 5)
    errors = rng.binomial(words, 0.2)
    better = np.maximum(errors - (rng.random(300) < 0.2), 0)
    found = scoring.paired_bootstrap(better, errors, words)
    assert found["low"] <= found["difference"] <= found["high"] < 0
    assert found["one_better"] == 1.0
    same = scoring.paired_bootstrap(errors, errors, words)
    assert (same["low"], same["high"], same["one_better"]) == (0.0, 0.0, 0.0)


def answer(number: int) -> tuple[int, int]:
    if number == 13:
        raise Problem("on purpose")
    if number == 17:
        os._exit(0)
    time.sleep(number % 3 / 100)  # or they end in order
    return number, os.getpid()


def test_every_speaker_is_recorded_in_a_process_of_its_own():
    numbers, processes = zip(*recording.in_fresh_processes(answer, range(8), 3), strict=True)
    assert numbers == tuple(range(8))
    assert len({os.getpid(), *processes}) == 9


@pytest.mark.parametrize(("number", "words"), [(13, "on purpose"), (17, "ended before")])
def test_a_recording_that_fails_is_told_of(number: int, words: str):
    with pytest.raises(Problem, match=words):
        list(recording.in_fresh_processes(answer, [1, 2, number, 4, 5], 2))
