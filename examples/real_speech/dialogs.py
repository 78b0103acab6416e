"""Transcripts of the game Fish Fillets NG, in Lua, and the text that a recogniser learns from them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STRING = r'"((?:[^"\\]|\\.)*)"'
_LINE = re.compile(rf"dialogId\({_STRING},\s*{_STRING},\s*{_STRING}\)\s*dialogStr\({_STRING}\)")


@dataclass(frozen=True)
class Line:
    """A line that somebody says.

    Attributes:
        name: name of the recording, without its ending.
        speaker: the font in which the game shows the line, which is that of its speaker.
        text: normalised text; see `normalised`.
    """

    name: str
    speaker: str
    text: str


def lines(script: Path, language: str) -> Iterator[Line]:
    """Yield the lines of all scenes that have a text.

    Args:
        script: the game's folder `script`.
        language: "nl" or "cs".
    """
    for path in sorted(script.glob(f"*/*dialogs_{language}.lua")):
        for name, font, _, text in _LINE.findall(path.read_text("utf-8")):
            if spoken := normalised(text):
                yield Line(name, font.removeprefix("font_"), spoken)


def normalised(text: str) -> str:
    """Return the text in lower case, of letters, apostrophes and single spaces; "" if it has digits.

    A letter that is written three times or more ("Rrrot op!") is written once.
    """
    text = unicodedata.normalize("NFC", text.replace("\\", "")).lower().replace("\u2019", "'")
    if any(c.isdigit() for c in text):
        return ""
    kept = "".join(c if c.isalpha() or c == "'" else " " for c in text)
    words = (word.strip("'") for word in re.sub(r"(.)\1{2,}", r"\1", kept).split())
    return " ".join(filter(None, words))
