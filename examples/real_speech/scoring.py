"""Word and letter errors, by jiwer."""

from __future__ import annotations

import numpy as np

from examples.acoustic_model.speech.problem import require


def letter_errors(said: list[str], heard: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return wrong letters (substituted, left out, added) and letters by utterance; spaces are letters."""
    jiwer = require("jiwer", "jiwer")
    errors, letters = [], []
    for truth, guess in zip(said, heard, strict=True):
        found = jiwer.process_characters(truth, guess)
        errors.append(found.substitutions + found.deletions + found.insertions)
        letters.append(len(truth))
    return np.array(errors), np.array(letters)
