"""The troubleshooting pages together have an entry for every error and every warning of the library.

Messages are read from the sources: the first argument of every call of an error class and of log.warning,
log.error and warnings.warn. An entry quotes the first six words of the longest run of constant text
in the message's first sentence that has one; backquotes do not count.
docs/troubleshooting.md has the messages of a job, docs/troubleshooting_tools.md those of everything else.
Messages that are put together elsewhere ("%s", a variable) are out of this test's reach.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_adpsgd import errors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "troubleshooting_tools.md")]
ERRORS = {*errors.__all__, "BuildError"}
LOGS = {"warning", "error", "warn"}
HOLE = "…"
SHORTEST = 10  # less says nothing
QUOTED = 6  # words that find a message


def text(node: ast.expr) -> str:
    """A message as written, with a hole for every value."""
    match node:
        case ast.Constant(value=str(constant)):
            return re.sub(r"%[\d.]*[a-z]", HOLE, constant)
        case ast.JoinedStr(values=parts):
            return "".join(text(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
    return HOLE


def key(message: str) -> str:
    """What an entry must quote: words of the longest constant run, in the first sentence with a long one."""
    runs: list[str] = []
    for sentence in re.split(r"(?<=[.:;?]) ", " ".join(message.replace("`", "").split())):
        runs += [run.strip(" .,:;()'`") for run in sentence.split(HOLE)]
        if max(map(len, runs)) >= 2 * SHORTEST:
            break
    longest = max(runs, key=len)
    words = " ".join(longest.split()[:QUOTED]).strip(" .,:;()'`")
    return words if len(longest) >= SHORTEST else ""


@functools.cache
def messages() -> tuple[tuple[str, str], ...]:
    """(place, key) of every message of the library."""
    return tuple(read())


def read() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "hvd_adpsgd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and called(node) in ERRORS | LOGS:
                words = key(text(node.args[0]))
                if words:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", words


def called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "id", None) or getattr(function, "attr", "")


def pages() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def missing(pages: str) -> list[str]:
    """Messages without an entry."""
    quoted = " ".join(pages.replace("`", "").split())
    return [
        f"{place}: no entry quotes {words!r}" for place, words in messages() if words not in quoted
    ]


def test_every_message_has_an_entry():
    assert len(messages()) > 120
    assert missing(pages()) == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"{HOLE} differs between learners: {HOLE} is {HOLE}. Set it.", "differs between learners"),
        (f"{HOLE}. {HOLE}", ""),
        ("one super learner of %d: nothing to average", "one super learner of"),
    ],
)
def test_key_is_the_longest_constant_run(message, expected):
    assert key(re.sub(r"%d", HOLE, message)) == expected


def test_a_message_without_an_entry_is_found():
    cut = pages().replace("cannot be copied or pickled", "")
    assert len(missing(cut)) == len(missing(pages())) + 1
