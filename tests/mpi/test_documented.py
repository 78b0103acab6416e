"""Every Python block of the documentation runs, on two super learners; the recipe also as plain Horovod."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.launcher import ROOT, run_learners

PROGRAM = Path(__file__).parent / "programs" / "documented.py"
FENCE = re.compile(r"(?ms)^ *```python\n(.*?)^ *```")
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    if FENCE.search(page.read_text()) and page.name != "tutorial.md"  # tests/unit/test_tutorial.py
)


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_a_page_run(page, tmp_path):
    run_blocks(page, tmp_path, {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"})


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.parametrize("option", ["SUPER_LEARNER_SIZE=2", "AVERAGING=synchronous"])
def test_the_recipe_runs_as_plain_horovod(option, tmp_path):
    name, _, value = option.partition("=")
    run_blocks(ROOT / "docs" / "recipe.md", tmp_path, {f"HVD_ADPSGD_{name}": value})


def run_blocks(page, tmp_path, env):
    every = [textwrap.dedent(block) for block in FENCE.findall(page.read_text())]
    blocks = [block for block in every if '"means' not in block]  # tests/mpi/test_async_mean.py
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps(blocks))
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # whose files a page names
    ran = run_learners(2, PROGRAM, args=[str(file)], env=env, launcher="horovodrun")
    assert f"blocks run: {len(blocks)}" in ran.checked().stdout
