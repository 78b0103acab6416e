"""The tree keeps to docs/design.md, "Rooms": every file is named there, imports point one way."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hvd_adpsgd"
DESIGN = ROOT / "docs" / "design.md"

PURE = {"config", "errors", "topology", "mixing", "continuous", "theory", "layout", "faults",
        "metrics", "strategies"}  # fmt: skip
CLOCKS = {"time", "datetime"}
COMPILED = {"libc", "cython", "cpython", "numpy", "posix"}

# modules from outside the standard library that a room may import; None: any
OUTSIDE: dict[str, set[str] | None] = {
    **{room: {"numpy"} for room in PURE},
    **{room: set() for room in ("errors", "config", "__init__", "horovod_build", "doctor")},
    "engine": {"numpy", "mpi4py"},
    "leaving": {"numpy", "mpi4py"},
    "mailbox": {"numpy", "mpi4py"},
    "replacement": {"numpy", "mpi4py"},
    "together": {"numpy", "mpi4py"},
    "world": None,
    "torch": None,
    "bench": None,
    "__main__": None,
    "_kernels": COMPILED,
    "_arena": COMPILED,
    "_leaving": set(),
    "_signal": COMPILED,
    "statefile": set(),
    "_transport": COMPILED | {"mpi4py"},
    "_sums": COMPILED | {"mpi4py"},
    "_state": COMPILED | {"mpi4py"},
    "_exchange": COMPILED | {"mpi4py"},
    "_mean": COMPILED | {"mpi4py"},
    "_engine": COMPILED | {"mpi4py"},
}

# rooms without an arrow: what they may import; nobody but another door imports them
DOORS: dict[str, set[str] | None] = {
    "__init__": {"errors"},
    "horovod_build": set(),
    "doctor": {"config", "errors", "__init__"},
    "bench": None,
    "__main__": None,
}


# ---- the table


@dataclass
class Table:
    """What docs/design.md says.

    Attributes:
        files: folder relative to the root ("hvd_adpsgd/torch") to the stems that may lie there.
        chains: layers of rooms, from those that import to those that are imported.
    """

    files: dict[str, set[str]] = field(default_factory=dict)
    chains: list[list[set[str]]] = field(default_factory=list)

    def may_import(self, importer: str, imported: str) -> bool:
        """Does an arrow, or a walk along one chain, lead from one room to the other?"""
        if importer in DOORS:
            allowed = DOORS[importer]
            return allowed is None or imported in allowed
        if imported in DOORS:
            return importer == "torch" and imported == "__init__"
        return any(
            importer in upper and imported in lower
            for chain in self.chains
            for i, upper in enumerate(chain)
            for lower in chain[i:]  # the same layer too: test_no_cycle keeps it one-way
        )


def rooms_section(text: str) -> str:
    return text.split("\n## Rooms\n", 1)[1].split("\n## ", 1)[0]


def read_table(text: str) -> Table:
    table, folder = Table(), ""
    section = rooms_section(text)
    for line in section.splitlines():
        if " -> " in line and line.startswith("    "):
            table.chains.append([words(layer) for layer in line.split(" -> ")])
        elif match := re.match(r" {4}(\S+)/(?:\s+(\S.*))?$", line):
            folder = match[1]
            table.files.setdefault(folder, set()).update(listed(match[2] or ""))
        elif match := re.match(r" {6}(\w+)/\s+(\S.*)$", line):
            inner = table.files.setdefault(f"{folder}/{match[1]}", {"__init__"})
            inner.update(listed(match[2]))
        elif match := re.match(r" {6}(\w+)\.(?:py|typed)\b", line):
            table.files.setdefault(folder, set()).add(match[1])
        elif match := re.match(r" {6}(_\w+(?:, _\w+)*) ", line):
            table.files.setdefault(folder, set()).update(words(match[1]))
    return table


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def listed(text: str) -> set[str]:
    """Stems of a list like "the face: __init__ (names), optimizer.py"."""
    plain = re.sub(r"\([^)]*\)", "", text).rpartition(":")[2]
    return {item.strip().partition(".")[0] for item in plain.split(",") if item.strip()}


TABLE = read_table(DESIGN.read_text())


# ---- the tree


def sources() -> list[Path]:
    """All files that must be named: the package's, and what it is compiled from."""
    found = [p for kind in ("*.py", "*.pyi") for p in (ROOT / PACKAGE).rglob(kind)]
    compiled = ROOT / "ext" / PACKAGE
    found += [p for kind in ("*.pyx", "*.pxd", "*.pxi") for p in compiled.rglob(kind)]
    found += (ROOT / "ext" / "c").rglob("*.[ch]")
    return sorted(found)


def room_of(path: Path) -> str:
    """The room of a file: its folder in the package, or its stem."""
    parts = path.relative_to(ROOT).parts
    below = parts[parts.index(PACKAGE) + 1 :]
    return below[0] if len(below) > 1 else path.stem


def with_imports() -> list[Path]:
    return [p for p in sources() if p.suffix not in (".c", ".h") and p.name != "__init__.pxd"]


def python_imports(source: str, package: str) -> set[str]:
    """Dotted names of all modules imported anywhere in a file, also inside functions.

    `from a import b` gives "a.b", for b may be a module. Also import_module("a.b").
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(package, node.level, node.module)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and callee(node) in ("import_module", "__import__"):
            found.update(a.value for a in node.args[:1] if isinstance(a, ast.Constant))
    return found


def absolute(package: str, level: int, module: str | None) -> str:
    if level == 0:
        return module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def callee(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def cython_imports(source: str) -> set[str]:
    """Dotted names of all modules imported or cimported in a .pyx or .pxd."""
    found: set[str] = set()
    pattern = r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?c?import[ \t]+\(?([\w., \t]+)"
    for module, names in re.findall(pattern, source, re.MULTILINE):
        items = [item.split()[0] for item in names.split(",") if item.strip()]
        base = f"{PACKAGE}{module}" if module.startswith(".") else module
        found.update(f"{base.rstrip('.')}.{item}" if base else item for item in items)
    return found


def imports_of(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix in (".pyx", ".pxd", ".pxi"):
        return cython_imports(text)
    return python_imports(text, ".".join(path.relative_to(ROOT).parent.parts))


def room_named(module: str) -> str:
    """The room that a module of the package belongs to; the package itself is "__init__"."""
    name = module.split(".")[1]
    known = {room_of(path) for path in with_imports()} | set(OUTSIDE)
    return name if name in known else "__init__"


def inside(path: Path) -> set[str]:
    """Other rooms that a file imports."""
    rooms = {room_named(f"{m}.") for m in imports_of(path) if m.split(".")[0] == PACKAGE}
    return rooms - {room_of(path)}


def outside(path: Path) -> set[str]:
    """Top names of the modules of other packages that a file imports."""
    return {module.split(".")[0] for module in imports_of(path)} - {PACKAGE}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- the tests


def test_the_table_is_read():
    assert {"errors", "config", "engine", "__init__"} <= TABLE.files[PACKAGE]
    assert {"__init__", "plan", "ring"} <= TABLE.files[f"{PACKAGE}/strategies"]
    assert {"_engine", "_kernels"} <= TABLE.files[f"ext/{PACKAGE}"]
    assert TABLE.chains[0][0] == {"torch"}
    assert TABLE.chains[0][-1] == {"config", "errors"}
    assert len(TABLE.chains) == 6


@pytest.mark.parametrize("path", sources(), ids=ids)
def test_every_file_is_named(path):
    folder = str(path.relative_to(ROOT).parent)
    names = TABLE.files.get(folder, set()) | ({"__init__"} if path.suffix == ".pxd" else set())
    assert path.stem in names, f"name {ids(path)} in docs/design.md, Rooms"


@pytest.mark.parametrize("path", with_imports(), ids=ids)
def test_imports_point_one_way(path):
    wrong = {room for room in inside(path) if not TABLE.may_import(room_of(path), room)}
    assert not wrong, f"{ids(path)} imports {sorted(wrong)}, against docs/design.md, Rooms"


@pytest.mark.parametrize("path", with_imports(), ids=ids)
def test_rooms_import_only_what_they_may_from_outside(path):
    room = room_of(path)
    assert room in OUTSIDE, f"say in OUTSIDE what the room {room} may import"
    allowed = OUTSIDE[room]
    if allowed is None:
        return
    standard = set(sys.stdlib_module_names) - (CLOCKS if room in PURE else set())
    wrong = outside(path) - allowed - standard
    assert not wrong, f"{ids(path)} imports {sorted(wrong)}, which its room may not"


def test_no_cycle():
    graph: dict[str, set[str]] = {}
    for path in with_imports():
        graph.setdefault(room_of(path), set()).update(inside(path))
    graphlib.TopologicalSorter(graph).prepare()


# ---- the tests can fail


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("def f():\n    from mpi4py import MPI", {"mpi4py.MPI"}),
        ("if True:\n  import a, b.c", {"a", "b.c"}),
        ("from . import ring\nfrom ..errors import X", {"p.q.ring", "p.errors.X"}),
        ("import importlib\nimportlib.import_module('time')", {"importlib", "time"}),
        ("__import__('torch')", {"torch"}),
        ("'''import torch'''", set()),
    ],
)
def test_python_imports(source, expected):
    assert python_imports(source, "p.q") == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("cimport numpy as cnp", {"numpy"}),
        ("from libc.stdint cimport int64_t, uint8_t", {"libc.stdint.int64_t",
                                                       "libc.stdint.uint8_t"}),
        ("from hvd_adpsgd._arena cimport (Arena,\n    x)", {"hvd_adpsgd._arena.Arena"}),
        ("    import torch", {"torch"}),
        ("from . cimport _kernels", {"hvd_adpsgd._kernels"}),
        ("from ._kernels cimport merge", {"hvd_adpsgd._kernels.merge"}),
    ],
)  # fmt: skip
def test_cython_imports(source, expected):
    assert cython_imports(source) == expected


@pytest.mark.parametrize(
    ("importer", "imported", "expected"),
    [
        ("torch", "errors", True),
        ("engine", "strategies", True),
        ("engine", "_engine", True),
        ("engine", "_kernels", True),
        ("_engine", "_transport", True),
        ("_engine", "_sums", True),
        ("_mean", "_exchange", True),
        ("_exchange", "_mean", False),
        ("_transport", "_sums", False),
        ("config", "errors", True),
        ("strategies", "mixing", True),
        ("theory", "mixing", True),
        ("mixing", "theory", False),
        ("continuous", "mixing", True),
        ("mixing", "continuous", False),
        ("strategies", "continuous", True),
        ("errors", "mixing", False),
        ("mixing", "strategies", False),
        ("engine", "torch", False),
        ("_engine", "engine", False),
        ("world", "leaving", True),
        ("leaving", "together", True),
        ("leaving", "world", False),
        ("torch", "leaving", False),
        ("world", "_engine", False),
        ("torch", "_engine", False),
        ("mixing", "_kernels", False),
        ("horovod_build", "errors", False),
        ("engine", "bench", False),
        ("__main__", "bench", True),
        ("__main__", "doctor", True),
        ("doctor", "config", True),
        ("doctor", "world", False),
        ("__init__", "torch", False),
    ],
)
def test_arrows(importer, imported, expected):
    assert TABLE.may_import(importer, imported) is expected


def test_a_file_that_is_not_named_is_found():
    table = read_table(
        "\n## Rooms\n\n    pkg/\n      a.py   x\n      b/     the b: c.py (D, e), f\n"
        "      _g, _h (.pyi)\n    ext/c/  k.h, k.c\n\n    b -> a\n"
    )
    assert table.files == {
        "pkg": {"a", "_g", "_h"},
        "pkg/b": {"__init__", "c", "f"},
        "ext/c": {"k"},
    }
    assert table.chains == [[{"b"}, {"a"}]]
