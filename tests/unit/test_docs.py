"""What README and docs/ say must be so: lengths, links, names of functions and options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_adpsgd.config import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
)


def prose(page: Path) -> str:
    """The text without fenced and indented code."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
    return re.sub(r"(?m)^    .*$", "", text)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, by GitHub's rule."""
    titles = re.findall(r"(?m)^#+ (.+)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """Targets of the relative links and pictures."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if "://" not in target]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")}
    assert not [name(page) for page in PAGES[1:] if page.resolve() not in linked]


def test_the_options_table_is_that_of_the_configuration():
    rows = []
    for row in Config.table():
        values = f"{row.range} {row.unit}".strip().replace(" | ", ", ")  # | parts the columns
        rows.append(f"| `{row.env}` | {row.default} | {values} | {row.meaning} |")
    text = (ROOT / "docs" / "options.md").read_text()
    table = text.partition("<!-- table")[2].partition("<!-- end")[0]
    assert table.splitlines()[3:] == rows


def test_the_example_of_one_screen_is_one_screen():
    example = ROOT / "examples" / "quadratic.py"
    assert len(example.read_text().splitlines()) <= 80
