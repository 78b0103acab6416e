"""Speech synthesis by espeak-ng, through ctypes: text to samples, with the onset of every phoneme.

espeak's output depends on everything it has synthesised before in the same process. For reproducible audio,
use one fresh process per speaker and pass the speaker's seed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from .problem import Problem, require

_SYNCHRONOUS = 2  # espeak_AUDIO_OUTPUT: deliver samples to the callback, before Synth returns
_PHONEME_EVENTS, _DONT_EXIT = 0x1, 0x8000
_EVENT_END, _EVENT_PHONEME = 0, 7
_RATE, _PITCH, _RANGE, _WORD_GAP = 1, 3, 4, 7
_UTF8 = 1


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True)
class Utterance:
    """Synthesised speech.

    Attributes:
        samples: int16, at `rate` Hz.
        phones: (onset sample, phoneme) in order; `_` is a pause.
    """

    samples: np.ndarray
    phones: list[tuple[int, str]]
    rate: int


class Espeak:
    """The espeak-ng engine; only one per process, because the library is a singleton."""

    def __init__(self, seed: int) -> None:
        loader = require("espeakng_loader", "espeakng-loader")
        self._lib = ctypes.CDLL(loader.get_library_path())
        self.rate = self._lib.espeak_Initialize(
            _SYNCHRONOUS, 0, str(loader.get_data_path()).encode(), _PHONEME_EVENTS | _DONT_EXIT
        )
        if self.rate <= 0:
            raise Problem(f"espeak-ng did not start: no data in {loader.get_data_path()}")
        self._lib.espeak_ng_SetRandSeed(ctypes.c_long(seed))
        self._chunks: list[np.ndarray] = []
        self._phones: list[tuple[int, str]] = []
        self._callback = _Callback(self._receive)  # kept alive: espeak has only a pointer to it
        self._lib.espeak_SetSynthCallback(self._callback)

    def voice(self, accent: str, variant: str, rate: int, pitch: int, pitch_range: int) -> None:
        """Set the voice: rate in words per minute, pitch and pitch range in [0, 99].

        Raises:
            Problem: if espeak does not know the accent or the variant.
        """
        name = f"{accent}+{variant}"
        if self._lib.espeak_SetVoiceByName(name.encode()) != 0:
            raise Problem(f"espeak-ng has no voice {name}")
        settings = ((_RATE, rate), (_PITCH, pitch), (_RANGE, pitch_range), (_WORD_GAP, 1))
        for parameter, value in settings:
            self._lib.espeak_SetParameter(parameter, value, 0)

    def say(self, text: str) -> Utterance:
        """Synthesise a text."""
        self._chunks, self._phones = [], []
        raw = text.encode()
        status = self._lib.espeak_Synth(raw, len(raw) + 1, 0, 1, 0, _UTF8, None, None)
        if status != 0:
            raise Problem(f"espeak-ng failed with status {status} on {text!r}")
        return Utterance(np.concatenate(self._chunks), self._phones, self.rate)

    def _receive(self, wave, length, events) -> int:
        if wave and length > 0:
            self._chunks.append(np.ctypeslib.as_array(wave, (length,)).copy())
        at = 0
        while events[at].type != _EVENT_END:
            if events[at].type == _EVENT_PHONEME:
                name = events[at].id.string.decode("utf-8", "replace")
                self._phones.append((events[at].sample, name))
            at += 1
        return 0
