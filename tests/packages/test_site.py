"""`make docs`: a site that asks no other server.

Its tools come from the package index, and the scripts that it ships from npm's.
"""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.packages.test_packages import ROOT, Environment, run

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1200)]

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "srcset"}
IDLE = {"canonical", "next", "prev", "edit"}  # links that a browser does not load


class Loads(HTMLParser):
    """What a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("rel") not in IDLE:
            self.found.append(given.get(LOADS.get(tag, "")) or "")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    if not shutil.which("npm"):
        pytest.skip("no npm: the site is built without the scripts that it would ship")
    found = Environment(tmp_path_factory.mktemp("site"))
    found.checked("python", "-m", "pip", "install", "--quiet", "-r", ROOT / "requirements-docs.txt")
    return found


@pytest.fixture(scope="module")
def site(environment: Environment) -> Path:
    built = environment.work / "built"
    command = ["mkdocs", "build", "--strict", "--quiet", "-f", ROOT / "mkdocs.yml", "-d", built]
    environment.checked(*command, NO_MKDOCS_2_WARNING="1")
    return built


def test_nothing_comes_from_another_server(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text()
        loaded = Loads(text).found
        assert any("assets/javascripts/bundle" in one for one in loaded)
        assert not [one for one in loaded if re.match(r"(https?:)?//", one)], page
        assert ('class="mermaid"' in text) == any("/mermaid-" in one for one in loaded), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text()), style


def test_without_npm_diagrams_are_text(environment: Environment, tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # without out/, where the scripts are
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copy(ROOT / "mkdocs.yml", copy)
    shutil.copytree(ROOT / "hvd_adpsgd", copy / "hvd_adpsgd")
    answer = run(
        environment.bin / "mkdocs", "build", "--strict", "--quiet",
        cwd=copy, PATH=str(environment.bin), NO_MKDOCS_2_WARNING="1",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "the site is built without mermaid" in answer.stderr
    text = (copy / "out" / "site" / "index.html").read_text()
    assert 'class="mermaid"' not in text and "flowchart LR" in text
    assert not [one for one in Loads(text).found if "//" in one]
