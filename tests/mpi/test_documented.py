"""Every Python block of the documentation runs, on two super learners."""

from __future__ import annotations

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
    blocks = [textwrap.dedent(block) for block in FENCE.findall(page.read_text())]
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps(blocks))
    alone = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    ran = run_learners(2, PROGRAM, args=[str(file)], env=alone, launcher="horovodrun")
    assert f"blocks run: {len(blocks)}" in ran.checked().stdout
