"""What a super learner that joins receives, and what it must agree on with the others."""

from __future__ import annotations

import io
from typing import Any

import torch

from hvd_adpsgd.torch import checkpoint
from hvd_adpsgd.torch.averaging import Averaging, live
from hvd_adpsgd.torch.consistency import described

__all__ = ["JoinState", "terms"]


def terms() -> list[Any]:
    """What joining and surviving learners must agree on."""
    return [_terms_of(averaging) for averaging in live()]


def _terms_of(averaging: Averaging) -> tuple[str, list[str]]:
    return averaging.spec.strategy.spec(), described(averaging.spec.named)


class JoinState:
    """What a joining learner receives.

    Args:
        values: of the model: parameters, then buffers; means where they are floating-point numbers.
        optimizers: of the learner that gives it.
        state: the user's.
    """

    def __init__(
        self, values: list[torch.Tensor], optimizers: list[torch.optim.Optimizer], state: Any
    ):
        self.values = values
        self.optimizers = [optimizer.state_dict() for optimizer in optimizers]
        self.memories = [(averaging.step, checkpoint.state(averaging)) for averaging in live()]
        self.state = state

    def pack(self) -> bytes:
        """Serialize tensors of any device; `unpack` puts them into host memory."""
        file = io.BytesIO()
        torch.save(self, file)
        return file.getvalue()

    @staticmethod
    def unpack(data: bytes) -> JoinState:
        made: JoinState = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return made

    @torch.no_grad()
    def give(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Overwrite model, optimizers and averagings."""
        tensors = [*model.parameters(), *model.buffers()]
        for tensor, value in zip(tensors, self.values, strict=True):
            tensor.data.copy_(value)
        for optimizer, saved in zip(optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(saved)
        for averaging, (step, state) in zip(live(), self.memories, strict=True):
            if state and not averaging.rule.own:
                checkpoint.load_state(averaging, state)
            averaging.step = step
