"""Process groups that the script hands over: a dimension of its own DeviceMesh is a super learner."""

import functools
from typing import Any

import pytest

from tests.launcher import run_learners
from tests.mpi.test_optimizer import PROGRAMS, SIZE
from tests.mpi.test_sharded import IMPORTS, require_law

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

ORDERS = ["first", pytest.param("after", marks=pytest.mark.extended)]  # than hvd.init()
Facts = dict[str, Any]


@functools.cache
def said(order: str, inner: str = "torch") -> dict[str, list[Facts]]:
    result = run_learners(
        4,
        PROGRAMS / "mesh.py",
        args=[order],
        env={SIZE: "2", "HVD_ADPSGD_INNER": inner},
        launcher="torchrun",
        imports=IMPORTS,
    ).checked()
    found = result.by_case()
    assert all(len(told) == 4 for told in found.values()), result.report()
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_an_inner_dimension_is_taken(order: str) -> None:
    for facts in said(order)["ddp"]:
        assert facts["same"], "learners of a super learner differ"
        assert facts["hooks"] == 0, "both average gradients"
        assert facts["start"] > 0.1
    for facts in said(order)["fully_shard"]:
        require_law(facts, 1e-13)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("ddp across", ("ModelMismatchError", "several super learners", "Leave", "process_group=")),
        ("ddp over all", ("ModelMismatchError", "several super learners", "Leave")),
        ("fully_shard across", ("ModelMismatchError", "which are not the learners", "Call hvd.")),
        ("HSDP", ("ModelMismatchError", "(2, 2)", "super learners take the place of HSDP's")),
    ],
)
def test_a_group_across_super_learners_is_refused(order: str, case: str, parts: Any) -> None:
    for facts in said(order)[case]:
        for part in parts:
            assert part in facts["error"], facts


@pytest.mark.extended
def test_with_horovod_inside() -> None:
    for facts in said("first", "horovod")["ddp"]:
        assert facts["same"] and facts["hooks"] == 0
