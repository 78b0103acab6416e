"""The parts of this project stay as small as they are: limits in tests/budgets.toml."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text())
CODE = {".py", ".pyx", ".pxi", ".pxd", ".pyi", ".c", ".h", ".js"}
BUDGETS = [(unit, name, row) for unit in ("lines", "words") for name, row in TABLE[unit].items()]


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository; compiled C is none of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def size(unit: str, row: dict[str, Any]) -> int:
    files = tracked(*row["paths"])
    if unit == "lines":
        return sum(len(f.read_text().splitlines()) for f in files if f.suffix in CODE)
    pages = [f for f in files if "log" not in f.relative_to(ROOT).parts]
    return sum(len(f.read_text().split()) for f in pages)


@pytest.mark.parametrize(("unit", "name", "row"), BUDGETS, ids=[f"{n}-{u}" for u, n, _ in BUDGETS])
def test_no_part_is_larger_than_its_limit(unit: str, name: str, row: dict[str, Any]) -> None:
    found = size(unit, row)
    print(f"{name}: {found} {unit}, limit {row['limit']}, aim {row['aim']}")
    assert 0 < found <= row["limit"], (
        f"{name} has {found} {unit}, the limit is {row['limit']}. Delete as much as you add."
    )
