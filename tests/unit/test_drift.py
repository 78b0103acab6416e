"""Models that drift apart inside a super learner, and those that need no warning."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adpsgd.training import drift

NAMED = {"weight": torch.full((100,), 0.3), "bias": torch.zeros(7)}


def sums(weight: float, bias: float) -> dict[str, float]:
    return {"weight": weight, "bias": bias}


OWN = sums(30.0, 0.0)


def warnings_of(
    told: dict[int, dict[str, float]], caplog: pytest.LogCaptureFixture, is_leader: bool = True
) -> list[str]:
    drift._has_warned[0] = False
    world: Any = SimpleNamespace(
        is_leader=is_leader, rank=2, super_rank=1, groups=((0, 1), (2, 3, 4))
    )
    with caplog.at_level(logging.WARNING, "hvd_adpsgd"):
        for _ in range(2):
            drift.warn_of_drift(world, "averaged", NAMED, told)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("its", "name"), [(sums(29.99, 0.0), "weight"), (sums(30.0, 1e-9), "bias")]
)
def test_a_mate_with_another_model_is_named_once(
    its: dict[str, float], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = warnings_of({2: OWN, 3: OWN, 4: its}, caplog)
    assert f"averaged: learner 4 holds another '{name}' than learner 2 of the same" in text


@pytest.mark.parametrize(
    ("told", "is_leader"),
    [
        ({2: OWN, 3: OWN, 4: OWN}, True),
        ({2: OWN, 3: OWN, 4: sums(30.0 + 1e-6, 0.0)}, True),  # what rounding leaves
        ({2: OWN, 3: OWN}, True),  # learner 4 has failed
        ({2: OWN, 3: {}, 4: OWN}, True),  # learner 3 has dropped its optimizer
        ({2: {}, 3: OWN, 4: OWN}, True),  # learner 2 has
        ({0: sums(7.0, 1.0), 1: sums(8.0, 2.0), 2: OWN, 3: OWN, 4: OWN}, True),  # of others
        ({2: OWN, 3: sums(float("nan"), 0.0), 4: OWN}, True),  # told as not finite
        ({2: sums(1.0, 0.0), 3: OWN, 4: OWN}, False),
    ],
)
def test_models_that_need_no_warning(
    told: dict[int, dict[str, float]], is_leader: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(told, caplog, is_leader) == []
