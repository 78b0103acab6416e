"""The Brain of docs/frameworks.md: gradients accumulated and clipped, validation, a checkpoint of the mean.

Argument: a folder for the checkpoint.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from learner import say

import hvd_adpsgd.torch as hvd

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
names: dict[str, Any] = {"__name__": "__main__"}
exec(re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text())[1], names)
sb = names["sb"]


class Brain(names["Brain"]):  # type: ignore[misc]
    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        return (predictions - batch[1]).square().mean()

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        super().on_stage_end(stage, stage_loss, epoch)
        if stage == sb.Stage.VALID:
            loss = hvd.allreduce(torch.tensor(stage_loss)).item()
            say(case="epoch", epoch=epoch, loss=loss)


def batches(number: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(number, 4, 8, generator=torch.Generator().manual_seed(seed))
    return [(each, each.sum(1, keepdim=True)) for each in x]


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    checkpointer = sb.utils.checkpoints.Checkpointer(sys.argv[1], recoverables={"model": model})
    brain = Brain(
        {"model": model},
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        run_opts={"device": "cpu", "grad_accumulation_factor": 2, "max_grad_norm": 1.0},
        checkpointer=checkpointer,
    )
    brain.fit(range(3), batches(60, hvd.rank()), batches(8, 100), progressbar=False)
    metrics = hvd.metrics()
    hvd.average_model(model)
    mean = [p.tolist() for p in model.parameters()]
    hvd.barrier()
    checkpointer.recover_if_possible()  # all learners read the checkpoint of rank 0
    loaded = [p.tolist() for p in model.parameters()]
    exchanges, steps = metrics["exchanges"], metrics["steps"]
    say(case="end", exchanges=exchanges, steps=steps, is_mean=loaded == mean)


if __name__ == "__main__":
    main()
