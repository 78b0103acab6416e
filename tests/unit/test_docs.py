"""What README and docs/ say must be so: lengths, links, names of functions and options."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
from operator import attrgetter
from pathlib import Path

import pytest

import hvd_adpsgd
from hvd_adpsgd.config import PREFIX, Config
from hvd_adpsgd.strategies import STRATEGIES, parse

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LOG = sorted((ROOT / "docs" / "log").glob("*.md"))


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
    return links_in(prose(page))


def links_in(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in found if "://" not in target]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140


@pytest.mark.parametrize("page", [*PAGES, *LOG], ids=name)
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_linked_from_the_readme_and_on_the_site():
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")}
    assert not [name(page) for page in PAGES[1:] if page.resolve() not in linked]
    listed = re.findall(r"([\w/]+\.md)\b", (ROOT / "mkdocs.yml").read_text())
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted([*pages, "log/README.md"])


def test_every_entry_of_the_log_is_listed():
    log = ROOT / "docs" / "log"
    entries = sorted(entry.name for entry in log.glob("*.md") if entry.name != "README.md")
    assert not [entry for entry in entries if entry not in links(log / "README.md")]


def python_blocks() -> list[tuple[str, str]]:
    """(page, program) of every fenced block of Python."""
    fence = re.compile(r"(?ms)^ *```python\n(.*?)^ *```")
    return [(name(page), code) for page in PAGES for code in fence.findall(page.read_text())]


SCRIPTS = (ROOT / "docs" / "frameworks.md").read_text().partition("## ")[0]


def first_script(target: str) -> str:
    """The first Python block below a heading, or of a page."""
    path, _, anchor = target.partition("#")
    text = (ROOT / "docs" / (path or "frameworks.md")).read_text()
    for title in re.findall(r"(?m)^#+ (.+)$", text):
        if anchor and re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            text = text.partition(f"# {title}\n")[2]
    return re.findall(r"(?ms)^```python\n(.*?)^```", text)[0]


def test_lines_that_change_in_a_script_are_counted():
    """Each is marked `# new` or `# was: ...`, and, but in Horovod's script, each that names this library."""
    counted = 0
    for row in re.findall(r"(?m)^\| \[.*", SCRIPTS):
        numbers = re.findall(r"\d+(?=,| \|)", row.rpartition(")")[2])
        for target, number in zip(links_in(row), numbers, strict=bool(numbers)):
            lines = first_script(target).splitlines()
            marked = [line for line in lines if re.search(r"# (new|was: )", line)]
            assert len(marked) == int(number), (target, marked)
            if not target.startswith("migration.md"):
                ours = [line for line in lines if re.search(r"hvd|Adpsgd", line.partition("#")[0])]
                assert not [line for line in ours if line not in marked], target
            counted += 1
    assert counted == 9


def test_python_blocks_call_what_is_there():
    """Every block compiles, and calls of hvd.NAME(...) fit NAME's signature."""
    hvd = importlib.import_module("hvd_adpsgd.torch")
    calls = 0
    for page, program in python_blocks():
        for node in ast.walk(ast.parse(textwrap.dedent(program), page)):
            called = re.fullmatch(r"hvd\.([\w.]+)", ast.unparse(getattr(node, "func", node)))
            if isinstance(node, ast.Call) and called:
                keywords = {word.arg: None for word in node.keywords}
                inspect.signature(attrgetter(called[1])(hvd)).bind(*node.args, **keywords)
                calls += 1
    assert calls > 40


def test_commands_have_their_targets_and_options():
    """`make TARGET` and the options of `python -m hvd_adpsgd COMMAND`, wherever a page names them."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    used = names(r"(?m)(?:^    |`)make ([a-z-]+)")
    assert len(used) > 20
    assert not [(target, page) for target, page in used if target not in targets]
    options = {
        (command, option, name(page))
        for page in PAGES
        for command, rest in COMMAND.findall(page.read_text().replace("\\\n", " "))
        for option in re.findall(r"--([a-z-]+)", rest)
    }
    assert len(options) > 15
    for command, option, page in options:
        quoted = {f'"--{option}"', f'"{option}"'}
        assert any(one in sources_of(command) for one in quoted), (page, command, option)


COMMAND = re.compile(r"python -m hvd_adpsgd ([a-z-]+)([^`#|\n]*)")


@functools.cache
def sources_of(command: str) -> str:
    """Sources of a command, in which its options stand."""
    of_lab = command in ("simulate", "bench")
    folder = ROOT / ("lab/hvd_adpsgd_lab" if of_lab else "hvd_adpsgd/tools")
    here = folder / command.replace("-", "_")
    sources = here.rglob("*.py") if here.is_dir() else [here.with_suffix(".py")]
    return "".join(source.read_text() for source in sources)


def test_the_options_table_is_that_of_the_configuration():
    rows = []
    for row in Config.table():
        words = row.range.removesuffix(", or None").replace(" | ", ", ")  # | parts the columns
        values = row.unit if words == "any text" and row.unit else f"{words} {row.unit}".strip()
        rows.append(f"| `{row.env}` | {row.default} | {values} | {row.meaning} |")
    text = (ROOT / "docs" / "options.md").read_text()
    table = text.partition("<!-- table")[2].partition("<!-- end")[0]
    assert table.splitlines()[3:] == rows


def names(pattern: str) -> set[tuple[str, str]]:
    """What the pattern's group finds, with the page; the changelog tells of older names too."""
    return {
        (found, name(page)) for page in PAGES for found in re.findall(pattern, page.read_text())
    }


def test_every_function_is_there():
    hvd = importlib.import_module("hvd_adpsgd.torch")
    used = names(r"\bhvd\.([A-Za-z_]\w*)")
    assert len(used) > 30
    assert not [(n, page) for n, page in used if not hasattr(hvd, n)]


def test_every_option_is_there():
    known = {row.env for row in Config.table()}
    used = names(rf"\b({PREFIX}[A-Z_]+[A-Z])\b")
    assert not [(n, page) for n, page in used if n not in known]


def test_every_strategy_can_be_parsed():
    spec = rf"(?:{'|'.join(STRATEGIES)})(?:[:+][\w:=,.+]*)?"
    specs = names(rf"(?:AVERAGING=|`)({spec})`?")
    assert len(specs) > 20
    for each, _ in specs:
        parse(each)


def test_every_error_is_listed():
    text = (ROOT / "docs" / "options.md").read_text()
    errors = [n for n in vars(hvd_adpsgd) if n.endswith("Error")]
    assert not [n for n in errors if f"`{n}`" not in text]


def test_every_test_that_a_page_names_is_there() -> None:
    named = {
        match
        for page in PAGES
        for match in re.findall(r"tests/[\w/]+\.py(?:::\w+)?", page.read_text())
    }
    gone = set()
    for test in named:
        path, _, function = test.partition("::")
        file = ROOT / path
        if not file.exists() or (function and f"def {function}(" not in file.read_text()):
            gone.add(test)
    assert len(named) > 50 and not gone, gone


def test_every_module_that_is_run_is_there():
    for module, page in names(r"python -m ((?:examples|hvd_adpsgd|lab|tests)[\w.]*)"):
        path = ROOT / module.replace("hvd_adpsgd_lab", "lab.hvd_adpsgd_lab").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (module, page)


def test_the_example_of_one_screen_is_one_screen():
    example = ROOT / "examples" / "quadratic.py"
    assert len(example.read_text().splitlines()) <= 80
