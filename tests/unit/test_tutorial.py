"""examples/tutorial.ipynb is a notebook whose cells have run, and run; docs/tutorial.md is the same."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.watching.table import COLUMNS
from tests.launcher import environment
from tests.notebook import NOTEBOOK, PAGE, ROOT, execute, page, source, translated


def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def test_every_cell_has_run() -> None:
    found = cells()
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        if cell["cell_type"] == "code":
            assert cell["execution_count"] is not None, source(cell)
            compile(translated(source(cell)), "a cell", "exec")
    printed = json.dumps([cell.get("outputs") for cell in found], ensure_ascii=False)
    assert "2 super learners, 2 ok" in printed and "trace.3.json" in printed
    assert str(ROOT) not in printed
    (head,) = re.findall(r"┃ # ┃.*┃", printed)
    names = tuple(name.strip() for name in head[1:-1].split("┃"))
    assert names == tuple(each.title for each in COLUMNS if each.title), (
        "all but the curve of the loss"
    )


def test_the_page_is_the_notebook() -> None:
    assert PAGE.read_text() == page(cells()), "run: python -m tests.notebook"


@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.extended
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = environment({"PYTHONPATH": str(ROOT)})
    for name in set(os.environ) - set(wanted):
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    printed = "".join(execute(cells(), tmp_path))
    assert "2 super learners" in printed and "epoch 3/3" in printed, printed
    assert "trace.3.json" in printed, printed
    assert '"inner_allreduce"' in (tmp_path / "out/tutorial/run/trace.0.json").read_text()
    page = (tmp_path / "out/tutorial/run/report.html").read_text()
    assert '"yaxis5":{' in page and "loss" in page
