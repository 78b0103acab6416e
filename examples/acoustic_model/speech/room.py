"""Turns clean 22 kHz speech into telephone speech in a noisy room: 8 kHz, with reverberation and noise."""

from __future__ import annotations

import numpy as np
from scipy.signal import fftconvolve, resample_poly

from .tasks import RATE


def to_telephone(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample int16 at `rate` Hz to float32 in [-1, 1] at 8 kHz."""
    common = int(np.gcd(rate, RATE))
    scaled = samples.astype(np.float32) / 32768.0
    return resample_poly(scaled, RATE // common, rate // common).astype(np.float32)


def reverberate(speech: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add reverberation: a tail of decaying noise, T60 in 0.1 to 0.4 s, 3 to 12 dB below the direct sound."""
    t60 = rng.uniform(0.1, 0.4)
    time = np.arange(int(t60 * RATE)) / RATE
    tail = rng.standard_normal(len(time)) * np.exp(-6.908 * time / t60)  # ln 1000: 60 dB
    tail *= 10 ** (-rng.uniform(3, 12) / 20) / np.linalg.norm(tail)
    tail[: RATE // 500] = 0.0  # nothing arrives in the 2 ms before the first echo
    tail[0] = 1.0
    return fftconvolve(speech, tail)[: len(speech)].astype(np.float32)


def white(length: int, rng: np.random.Generator) -> np.ndarray:
    """Return noise of equal power at all frequencies."""
    return rng.standard_normal(length).astype(np.float32)


def pink(length: int, rng: np.random.Generator) -> np.ndarray:
    """Return noise whose power falls as 1/f."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 1))
    return np.fft.irfft(spectrum, length).astype(np.float32)


def babble(length: int, rng: np.random.Generator, bank: np.ndarray) -> np.ndarray:
    """Return `length` samples of babble noise from a random position in `bank`, wrapping around its end."""
    start = int(rng.integers(len(bank)))
    return np.take(bank, np.arange(start, start + length), mode="wrap")


def add_noise(speech: np.ndarray, noise: np.ndarray, snr_db: float) -> np.ndarray:
    """Return speech + noise, with the noise scaled to a signal-to-noise ratio of `snr_db` dB."""
    ratio = np.mean(speech**2) / max(float(np.mean(noise**2)), 1e-12)
    return speech + noise * np.float32(np.sqrt(ratio / 10 ** (snr_db / 10)))


def mix_babble(voices: list[np.ndarray], length: int) -> np.ndarray:
    """Return babble noise: the sum of all voices, each repeated to `length` and scaled to the same power."""
    total = np.zeros(length, np.float32)
    for voice in voices:
        total += np.resize(voice, length) / max(float(np.sqrt(np.mean(voice**2))), 1e-6)
    return total / np.float32(np.sqrt(len(voices)))
