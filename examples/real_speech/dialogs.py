"""Transcripts of the game Fish Fillets NG, in Lua, and the text that a recogniser learns from them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STRING = r'"((?:[^"\\]|\\.)*)"'
_LINE = re.compile(
    rf"dialogId\(\s*{_STRING},\s*{_STRING},\s*{_STRING}\s*\)\s*dialogStr\(\s*{_STRING}\s*\)"
)


@dataclass(frozen=True)
class Line:
    """A line that somebody says.

    Attributes:
        scene: folder of the scene; the name alone may be that of a line of another scene, too.
        name: name of the recording, without its ending.
        speaker: the font in which the game shows the line, which is that of its speaker.
        text: normalised text; see `normalised`.
    """

    scene: str
    name: str
    speaker: str
    text: str


def lines(script: Path, language: str) -> Iterator[Line]:
    """Yield the lines of all scenes that have a text.

    Args:
        script: the game's folder `script`.
        language: "cs" or "nl".
    """
    for path in sorted(script.glob(f"*/*dialogs_{language}.lua")):
        for name, font, _, text in _LINE.findall(path.read_text("utf-8")):
            # "Rrrot op!" is "Rot op!"
            if spoken := normalised(re.sub(r"(?i)(.)\1{2,}", r"\1", text)):
                yield Line(path.parent.name, name, font.removeprefix("font_"), spoken)


def normalised(text: str) -> str:
    """Return the text in lower case, of letters with their marks, apostrophes and single spaces.

    Returns "" for a text with digits, which are not said as they are written.
    """
    text = unicodedata.normalize("NFC", text.replace("\\", "")).lower().replace("\u2019", "'")
    if any(c.isdigit() for c in text):
        return ""
    kept = "".join(c if unicodedata.category(c)[0] in "LM" or c == "'" else " " for c in text)
    return " ".join(filter(None, (word.strip("'") for word in kept.split())))
