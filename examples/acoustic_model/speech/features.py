"""Log-mel features, computed by kaldi-native-fbank, and their deltas as in Kaldi."""

from __future__ import annotations

import numpy as np

from .problem import require
from .tasks import RATE

BINS = 40
WIDTH = 3 * BINS  # features per frame, with deltas and delta-deltas
SHIFT_S, LENGTH_S = 0.010, 0.025  # shift and length of a frame, in seconds
REACH = 4  # frames on either side that a frame's delta-deltas depend on
_WINDOW = np.array([-2, -1, 0, 1, 2], np.float32) / 10.0


def logmel(samples: np.ndarray) -> np.ndarray:
    """Return 40 log-mel energies per 10 ms of sound.

    Args:
        samples: float32 in [-1, 1] at 8 kHz, shape (n,).

    Returns:
        float16, shape (frames, 40); frame t is centred at 10 t + 12.5 ms.
    """
    fbank = require("kaldi_native_fbank", "kaldi-native-fbank")
    options = fbank.FbankOptions()
    options.frame_opts.samp_freq = RATE
    options.frame_opts.dither = 0.0  # dither is random, but features must be reproducible
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = BINS
    options.mel_opts.low_freq = 60.0
    online = fbank.OnlineFbank(options)
    online.accept_waveform(RATE, (samples * 32768.0).tolist())
    online.input_finished()
    frames = [online.get_frame(t) for t in range(online.num_frames_ready)]
    return np.stack(frames).astype(np.float16)


def frame_of(second: np.ndarray | float) -> np.ndarray:
    """Return the index of the first frame whose centre is not before the given time, in seconds."""
    return np.ceil((np.asarray(second) - LENGTH_S / 2) / SHIFT_S).clip(0).astype(np.int64)


def delta(features: np.ndarray) -> np.ndarray:
    """Return the deltas d[t] = (1/10) sum over n = 1, 2 of n (c[t+n] - c[t-n]) of features c.

    Args:
        features: shape (..., frames + 4, bins), with two frames of context at either end.

    Returns:
        deltas, shape (..., frames, bins).
    """
    frames = features.shape[-2] - 4
    return sum(w * features[..., k : k + frames, :] for k, w in enumerate(_WINDOW) if w)


def with_deltas(features: np.ndarray) -> np.ndarray:
    """Return features, deltas and delta-deltas, concatenated.

    Args:
        features: float32, shape (..., frames + 8, 40), with four frames of context at either end; at the
            ends of an utterance the first or last frame is repeated, as in Kaldi.

    Returns:
        float32, shape (..., frames, 120).
    """
    first = delta(features)
    centre = features[..., REACH:-REACH, :]
    return np.concatenate((centre, first[..., 2:-2, :], delta(first)), axis=-1)
