"""Compiled modules cimport along one order, and the engine's only from the engine."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXT = ROOT / "ext" / "hvd_adpsgd"
LAB = ROOT / "lab" / "ext" / "hvd_adpsgd_lab"
# Each may cimport what stands before it.
ORDER = """
    kernels codes doorbell store mailbox wire wire_mpi matching wire_tcp agreement
    core loop
""".split()
CIMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+cimport|cimport\s+([\w.]+))", re.MULTILINE)


def cimports(source: str) -> set[str]:
    return {one or other for one, other in CIMPORT.findall(source)}


def allowed(module: str, cimported: str) -> bool:
    if not cimported.startswith("hvd_adpsgd"):
        package = cimported.split(".")[0]
        of_wires = {("mpi4py", "wire_mpi"), ("posix", "wire_tcp")}
        return package in ("libc", "cpython") or (package, module) in of_wires
    package, _, name = cimported.rpartition(".")
    return package == "hvd_adpsgd.engine" and ORDER.index(name) < ORDER.index(module)


def belongs(package: str, cimported: str) -> bool:
    """The simulation cimports itself and the engine; other packages nothing of ours."""
    mine = ("hvd_adpsgd_lab.simulation.", "hvd_adpsgd.engine.") if package == "simulation" else ()
    return not cimported.startswith("hvd_adpsgd") or cimported.startswith(mine)


def test_the_order_has_every_module() -> None:
    modules = {path.stem for path in EXT.glob("engine/*.p[xy][xd]")} - {"__init__"}
    assert modules == set(ORDER)


def test_each_part_of_the_loop_calls_only_those_before_it() -> None:
    loop = (EXT / "engine" / "loop.pyx").read_text()
    parts = re.findall(r'^include "(\w+\.pxi)"$', loop, re.M)
    assert set(parts) == {path.name for path in EXT.glob("engine/*.pxi")}
    sources = [(EXT / "engine" / part).read_text() for part in parts] + [loop]
    later: set[str] = set()
    for part, source in reversed([*zip([*parts, "loop.pyx"], sources, strict=True)]):
        assert not cimports(source) or part == "loop.pyx", part
        code = re.sub(r"#.*", "", re.sub(r'""".*?"""', "", source, flags=re.S))
        assert not later & set(re.findall(r"(?<![.\w])(\w+)\(", code)), part
        later |= set(re.findall(r"^c?p?def [^\n(=]*?(\w+)\(", source, re.M))


@pytest.mark.parametrize(
    "path", sorted([*EXT.rglob("*.p[xy]*"), *LAB.rglob("*.p[xy]*")]), ids=lambda p: p.name
)
def test_cimports_point_one_way(path: Path) -> None:
    found = cimports(path.read_text())
    if path.parent.name == "engine":
        wrong = {
            name
            for name in found - {f"hvd_adpsgd.engine.{path.stem}"}
            if not allowed(path.stem, name)
        }
    else:
        wrong = {name for name in found if not belongs(path.parent.name, name)}
    assert not wrong


def test_only_the_clock_reads_the_time() -> None:
    """Others ask the clock that the engine is handed; a thread's CPU time is not the time."""
    reads = {
        (path.stem, what)
        for path in [*EXT.rglob("*.p[xy][xi]"), *LAB.rglob("*.pyx")]
        for what in re.findall(
            r"^ .*\b(?:clock_gettime\((CLOCK_\w+)|(gettimeofday|time)\()", path.read_text(), re.M
        )
    }
    assert reads == {("wire", ("CLOCK_MONOTONIC", ""))}
