"""The troubleshooting pages have an entry for every error and warning that does not name its own cure.

Messages are read from the sources: the first argument of every call of an error class and of log.warning,
log.error and warnings.warn. A message names its cure if a sentence or clause after the first begins with
a verb of CURES. An entry quotes the first six words of the longest run of constant text
in the message's first sentence that has one; backquotes do not count.
docs/troubleshooting.md has the messages of a job, docs/troubleshooting_tools.md those of everything else.
Messages that are put together elsewhere ("%s", a variable) are out of this test's reach.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hvd_adpsgd import errors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "troubleshooting_tools.md")]
ERRORS = {*(name for name in vars(errors) if name.endswith("Error")), "BuildError"}
LOGS = {"warning", "error", "warn"}
HOLE = "…"
SHORTEST = 10  # less says nothing
QUOTED = 6  # words that find a message
# An imperative that says what to do. "See" and "Look" are not here: they send the reader elsewhere.
CURES = frozenset(
    """
    add ask average build call change choose convert correct define drop enlarge free give import
    increase install launch leave let load log lower make move name pass plan put raise reduce rename
    restart run save set start take tie train unset use wrap write
    """.split()
)


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


def names_its_cure(message: str) -> bool:
    """Whether a sentence or clause after the first is an imperative of CURES."""
    _, *later = re.split(r"[.:;?)] ", " ".join(message.replace("`", "").split()))
    return any(re.match(r"\w*", clause)[0].lower() in CURES for clause in later)


@functools.cache
def messages() -> tuple[tuple[str, str], ...]:
    """(place, message) of every message of the library that has a key."""
    return tuple(read())


def read() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "hvd_adpsgd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and called(node) in ERRORS | LOGS:
                message = text(node.args[0])
                if key(message):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", message


def called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "id", None) or getattr(function, "attr", "")


def pages() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def missing(pages: str, messages: Iterable[tuple[str, str]]) -> list[str]:
    """Messages that neither name their cure nor have an entry."""
    quoted = " ".join(pages.replace("`", "").split())
    return [
        f"{place}: names no cure, and no entry quotes {key(message)!r}"
        for place, message in messages
        if not names_its_cure(message) and key(message) not in quoted
    ]


def test_every_message_without_a_cure_has_an_entry():
    without = [message for _, message in messages() if not names_its_cure(message)]
    assert len(messages()) > 250
    assert len(without) > 60
    assert missing(pages(), messages()) == []
