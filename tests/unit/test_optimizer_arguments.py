"""What learner 0 is told of its optimizer when that is wrapped."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adpsgd.config import Config
from hvd_adpsgd.strategies import PeriodicAveraging, RandomPairs
from hvd_adpsgd.torch.optimizer_arguments import _moments


class ScheduleFree(torch.optim.SGD):
    """As those of the package schedulefree."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (torch.optim.SGD, ""),
        (torch.optim.AdamW, ""),
        (torch.optim.Adamax, "moments are not shared by super learners: Adamax is none of"),
        (ScheduleFree, "ScheduleFree keeps a second copy of the parameters in its state"),
    ],
)
def test_optimizers_of_which_super_learners_average_a_part_only(
    kind: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    first, second = (SimpleNamespace(rank=rank) for rank in (0, 1))
    _moments(optimizer, RandomPairs(), Config(), second)
    _moments(optimizer, PeriodicAveraging(), Config(), first)
    _moments(optimizer, RandomPairs(), Config(moments="own"), first)
    assert not caplog.records
    _moments(optimizer, RandomPairs(), Config(), first)
    assert [r.getMessage()[: len(told)] for r in caplog.records] == ([told] if told else [])
