"""accelerate.local_sgd.LocalSGD for learners: the imports of a script change, see docs/huggingface.md."""

from typing import Any, Self

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator


class AdpsgdLocalSGD:
    """LocalSGD whose exit makes the model the mean; all learners leave together, unless the block raises.

    The optimizer that `accelerator`, an AdpsgdAccelerator, has prepared averages in every step, and keeps
    nobody waiting: `local_sgd_steps` is without effect. enabled=False leaves out the mean.

    Raises:
        ConfigError: for another accelerator, whose learners do not average.
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        local_sgd_steps: Any = None,
        enabled: bool = True,
    ) -> None:
        if not isinstance(accelerator, AdpsgdAccelerator):
            raise ConfigError(
                f"AdpsgdLocalSGD got accelerator={type(accelerator).__name__}, which starts "
                "torch.distributed, allowed is AdpsgdAccelerator. Pass one."
            )
        self.accelerator, self.model, self.enabled = accelerator, model, enabled
        self.local_sgd_steps, self.num_steps = local_sgd_steps, 0

    def __enter__(self) -> Self:
        return self

    def step(self) -> None:
        """Count a step; the optimizer averages by itself."""
        self.num_steps += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.enabled and kind is None:
            hvd.average_model(self.model)
