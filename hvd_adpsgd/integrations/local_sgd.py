"""Hugging Face Accelerate: a context of the shape of its LocalSGD, for scripts that have one.

from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator as Accelerator
from hvd_adpsgd.integrations.local_sgd import AdpsgdLocalSGD as LocalSGD
"""

from __future__ import annotations

from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator


class AdpsgdLocalSGD:
    """accelerate.local_sgd.LocalSGD for learners of hvd_adpsgd: at its exit the model becomes the mean.

    The optimizer that AdpsgdAccelerator.prepare() has wrapped averages the model already, in every step and
    without waiting, so step() only counts. All learners leave the block together, and wait for the slowest;
    if it raises, no mean is taken, as other learners may not get there.

    Args:
        accelerator: an AdpsgdAccelerator.
        model: the model, from its prepare().
        local_sgd_steps: without effect: exchanges keep nobody waiting, so there is no need to make them
            rare. HVD_ADPSGD_EXCHANGES_PER_STEP sets how many there are.
        enabled: False: leave out the mean at the exit. HVD_ADPSGD_AVERAGING=synchronous trains in step.

    Raises:
        ConfigError: for another accelerator, whose learners do not average.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        local_sgd_steps: int | None = None,
        enabled: bool = True,
    ) -> None:
        if not isinstance(accelerator, AdpsgdAccelerator):
            raise ConfigError(
                f"AdpsgdLocalSGD got accelerator={type(accelerator).__name__}, which starts "
                "torch.distributed, allowed is AdpsgdAccelerator. Pass one."
            )
        self.accelerator, self.model, self.enabled = accelerator, model, enabled
        self.local_sgd_steps, self.num_steps = local_sgd_steps, 0

    def __enter__(self) -> AdpsgdLocalSGD:
        return self

    def step(self) -> None:
        """Count a step; the optimizer averages by itself."""
        self.num_steps += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.enabled and kind is None:
            hvd.average_model(self.model)
