"""Utterances: where their sound or features are, and the features that a recogniser learns from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.acoustic_model.speech.problem import Problem, require

BINS = 80  # log-mel energies of a frame of 10 ms
HIGH_HZ = 8000.0


@dataclass(frozen=True)
class Utterance:
    """A recording, or a part of one, with its text.

    Attributes:
        name: name of the utterance.
        scene: what it belongs to: a scene of the game, or the recording.
        speaker: who says it.
        text: normalised text.
        sound: the file; "" if there are features only.
        seconds: duration; 0 if unknown.
        start: where it begins in the file, in seconds.
        features: where Kaldi's features are, as an entry of feats.scp; "" to compute them.
    """

    name: str
    scene: str
    speaker: str
    text: str
    sound: str
    seconds: float
    start: float = 0.0
    features: str = ""


def features(utterance: Utterance) -> np.ndarray:
    """Return 80 log-mel energies per 10 ms, without their mean over the utterance: float16 (frames, 80).

    Raises:
        Problem: if the sound cannot be read, or features of Kaldi have another width.
    """
    frames = _read(utterance) if utterance.features else _logmel(utterance)
    return (frames - frames.mean(0)).astype(np.float16)


def _read(utterance: Utterance) -> np.ndarray:
    kaldi = require("kaldi_native_io", "kaldi_native_io")
    try:
        found = kaldi.FloatMatrix.read(utterance.features).numpy().astype(np.float32)
    except RuntimeError as error:
        raise Problem(
            f"{utterance.name}: {utterance.features} of feats.scp cannot be read; check the path"
        ) from error
    if found.shape[1] != BINS:
        raise Problem(
            f"{utterance.name} in feats.scp has {found.shape[1]} features per frame, allowed are {BINS}; "
            f"make them with --num-mel-bins={BINS}, or leave feats.scp out"
        )
    return found


def _logmel(utterance: Utterance) -> np.ndarray:
    soundfile = require("soundfile", "soundfile")
    fbank = require("kaldi_native_fbank", "kaldi-native-fbank")
    try:
        with soundfile.SoundFile(utterance.sound) as file:
            rate = file.samplerate
            file.seek(min(round(utterance.start * rate), len(file)))
            count = round(utterance.seconds * rate) if utterance.seconds else -1
            samples = file.read(count, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise Problem(
            f"{utterance.name}: {utterance.sound} cannot be read ({error}); check the path"
        ) from error
    options = fbank.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0.0  # dither is random, but features must be reproducible
    options.mel_opts.num_bins = BINS
    options.mel_opts.high_freq = min(HIGH_HZ, rate / 2)
    online = fbank.OnlineFbank(options)
    online.accept_waveform(rate, (samples.mean(1) * 32768.0).tolist())
    online.input_finished()
    if not online.num_frames_ready:
        return np.zeros((1, BINS), np.float32)  # shorter than a frame; prepare() leaves it out
    return np.stack([online.get_frame(t) for t in range(online.num_frames_ready)])
