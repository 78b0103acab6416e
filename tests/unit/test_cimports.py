"""Compiled modules cimport along one order, and the engine's only from the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXT = Path(__file__).parents[2] / "ext" / "hvd_adpsgd"
# Each may cimport what stands before it.
ORDER = ("kernels", "store", "transport", "butterfly", "state", "exchange", "mean", "loop")
CIMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+cimport|cimport\s+([\w.]+))", re.MULTILINE)


def cimports(source: str) -> set[str]:
    return {one or other for one, other in CIMPORT.findall(source)}


def allowed(module: str, cimported: str) -> bool:
    if not cimported.startswith("hvd_adpsgd"):
        return cimported.split(".")[0] in ("libc", "cpython", "mpi4py")
    package, _, name = cimported.rpartition(".")
    return package == "hvd_adpsgd.engine" and ORDER.index(name) < ORDER.index(module)


def test_the_order_has_every_module() -> None:
    assert {path.stem for path in EXT.glob("engine/*.p[xy]*")} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("path", sorted(EXT.rglob("*.p[xy]*")), ids=lambda p: p.name)
def test_cimports_point_one_way(path: Path) -> None:
    found = cimports(path.read_text())
    if path.parent.name == "engine":
        wrong = {
            name
            for name in found - {f"hvd_adpsgd.engine.{path.stem}"}
            if not allowed(path.stem, name)
        }
    else:
        wrong = {name for name in found if name.startswith("hvd_adpsgd")}
    assert not wrong


def test_a_wrong_cimport_is_seen() -> None:
    found = cimports(
        "from hvd_adpsgd.engine.loop cimport x\ncimport torch\n    from libc.math cimport NAN"
    )
    assert found == {"hvd_adpsgd.engine.loop", "torch", "libc.math"}
    assert [allowed("mean", name) for name in sorted(found)] == [False, True, False]
