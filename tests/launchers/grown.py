"""What must hold when super learners have joined a job: facts of programs/growing.py."""

import math
from collections.abc import Sequence
from typing import Any


def require_grown(
    facts: list[dict[str, Any]],
    sizes: list[int],
    learners: int,
    leaders: Sequence[int] | None = None,
) -> None:
    """All have seen the same super learners come, each with the exact mean, and average with them."""
    assert [f["rank"] for f in facts] == list(range(learners))
    if leaders is None:
        leaders = range(sizes[-1])  # the joining super learner that has several learners comes last
    for each in facts:
        assert each["size"] == learners and each["sum"] == learners
        assert each["super_size"] == sizes[-1]
        assert [len(after[1]) for _, _, after in each["told"]] == sizes
        for _, before, after in each["told"]:
            assert math.isclose(before[0], after[0], rel_tol=1e-12)
            assert math.isclose(before[2], after[2], rel_tol=1e-12)
        assert each["new"] or "pickled for a joining learner, on learner 0: " in each["refused"]
        assert each["changes"][-1] == list(range(learners))
        assert len(each["changes"]) == len(sizes) or each["new"]
        assert each["averagings"] > 0 or each["rank"] not in leaders
    for each in (f for f in facts if f["new"]):
        means = [after[0] for _, _, after in each["told"]]
        assert all(any(math.isclose(v, m, rel_tol=1e-12) for m in means) for v in each["first"])
