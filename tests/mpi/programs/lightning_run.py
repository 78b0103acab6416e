"""Runs the script of docs/lightning.md, then resumes from its checkpoint and looks at every hook.

Arguments: a folder for what is saved, the file of the script.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from learner import DEADLINE_S, digest, same_everywhere, same_inside, say
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.integrations.lightning import AdpsgdStrategy

EPOCHS, PASSES, CLIP = 4, 3, 1e-2
SAVED = Path(sys.argv[1])
script: dict[str, Any] = {"__name__": "__main__"}


def floating(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What is averaged: in plain Horovod BatchNorm's statistics are not."""
    left_out = "running" if hvd.super_size() == 1 else "num_batches"
    return [
        tensor
        for name, tensor in state.items()
        if left_out not in name and tensor.is_floating_point()
    ]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten().double() for t in tensors])


def error(is_there: torch.Tensor, expected: torch.Tensor) -> float:
    return float((is_there - expected).norm() / expected.norm())


def watched(net: Any) -> Any:
    """An object of the script's module that records what Lightning lets it see."""

    class Watched(net):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()
            self.facts: dict[str, Any] = dict.fromkeys(("gradient", "own", "clipped", "mean"), -1.0)
            self.facts |= {"same_inside": True, "back": True, "steps": 0, "apart": 0.0}
            self.means: dict[int, torch.Tensor] = {}
            self.seen: list[float] = []

        # ---- steps

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            """All get the model of learner 0, whatever they have loaded."""
            if hvd.rank() > 0:
                zeros = {k: torch.zeros_like(t) for k, t in checkpoint["state_dict"].items()}
                checkpoint["state_dict"] = zeros

        def on_train_start(self) -> None:
            self.facts["resumed"] = same_everywhere(floating(self.state_dict()))
            momentum = [s["momentum_buffer"] for s in self.optimizers().state.values()]
            self.facts["momentum"] = momentum and same_everywhere(momentum)
            self.facts["first"] = [self.trainer.current_epoch, self.trainer.global_step]
            self.by_hand: Any = 0.0

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if hvd.super_rank() == 1 and index == 0:  # a barrier in a step of super learner 0 hangs
                wait_for(SAVED / f"trained{self.trainer.current_epoch}")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.seen += batch[0][:, 0].tolist()
            parts = torch.autograd.grad(loss / PASSES, list(self.parameters()), retain_graph=True)
            self.by_hand = self.by_hand + flat(list(parts))
            self.log("learner", float(hvd.rank()), sync_dist=True, on_step=True, on_epoch=True)
            self.facts["gathered"] = self.all_gather(loss).shape[0]
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            expected = hvd.allreduce(self.by_hand, process_set=hvd.super_learner)
            there = flat([p.grad for p in self.parameters()])
            self.facts["gradient"] = max(self.facts["gradient"], error(there, expected))
            self.by_hand = 0.0

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            norm = float(flat([p.grad for p in self.parameters()]).norm())
            self.facts["clipped"] = max(self.facts["clipped"], norm)
            self.facts["steps"] += 1

        def on_train_batch_end(self, *_: Any) -> None:
            if torch.is_tensor(self.by_hand):  # more passes follow before the step
                there = flat([p.grad for p in self.parameters()])
                self.facts["own"] = max(self.facts["own"], error(there, self.by_hand))
            self.facts["same_inside"] &= same_inside(self.parameters())
            if hvd.rank() == 0 and self.trainer.is_last_batch:
                (SAVED / f"trained{self.trainer.current_epoch}").touch()

        # ---- the mean

        def on_validation_start(self) -> None:
            """Before the strategy's hook: with nothing pending, the mean is the mean of what is there."""
            self.facts["apart"] = max(self.facts["apart"], hvd.consensus_distance(self))
            with hvd.averaging_paused():
                self.own = digest(floating(self.state_dict()))
                # BatchNorm's numbers are the leader's
                leaders = flat(floating(self.state_dict())) * hvd.is_leader()
                mean = hvd.allreduce(leaders, op=hvd.Sum) / hvd.super_size()
            self.means[self.trainer.current_epoch] = mean

        def validation_step(self, batch: Any, index: int) -> None:
            super().validation_step(batch, index)
            held = error(flat(floating(self.state_dict())), self.means[self.trainer.current_epoch])
            self.facts["mean"] = max(self.facts["mean"], held)
            rows = 2 - (hvd.rank() == 0)  # what is logged is weighted by them
            self.log("learner_held_out", float(hvd.rank()), sync_dist=True, batch_size=rows)
            self.metric.update(float(hvd.rank()))
            self.log("metric", self.metric)
            self.facts["gathered_held_out"] = self.all_gather(torch.zeros(2)).shape[0]

        def on_train_epoch_end(self) -> None:
            if self.trainer.current_epoch in self.means:
                self.facts["back"] &= digest(floating(self.state_dict())) == self.own
            self.trainer.save_checkpoint(SAVED / f"after{self.trainer.current_epoch}.ckpt")

    return Watched()


def wait_for(file: Path) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < ends, f"no {file}: super learner 0 waits in a step"
        time.sleep(0.01)


def saved(model: Any, name: str) -> float:
    """Greatest error of the checkpoints' models."""
    worst = 0.0
    for epoch, mean in model.means.items():
        state = torch.load(SAVED / name.format(epoch), weights_only=True)["state_dict"]
        worst = max(worst, error(flat(floating(state)), mean))
    return worst


def main() -> None:
    torch.set_num_threads(1)
    os.chdir(SAVED)
    exec(compile(Path(sys.argv[2]).read_text(), sys.argv[2], "exec"), script)
    say(
        rank=hvd.rank(),
        size=hvd.size(),
        page=same_everywhere(floating(script["model"].state_dict())),
    )

    model = watched(script["Net"])
    best = script["trainer"].checkpoint_callback.best_model_path
    trainer = lightning.Trainer(
        strategy=AdpsgdStrategy(averaging="fixed_ring", exchange_share=0.5),
        max_epochs=EPOCHS, precision="bf16-mixed", gradient_clip_val=CLIP, accumulate_grad_batches=PASSES,
        callbacks=[ModelCheckpoint(SAVED, "{epoch}", monitor="val_loss", save_top_k=-1)],
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    load = torch.utils.data.DataLoader
    trainer.fit(
        model, load(script["train"], 20, shuffle=True), load(script["held_out"], 65), ckpt_path=best
    )
    parts = hvd.allgather_object(model.seen)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    say(
        **model.facts,
        **{key: metrics[key] for key in ("learner_step", "learner_epoch", "learner_held_out", "metric")},
        best=Path(best).name,
        after_fit=same_everywhere(floating(model.state_dict())),
        at_validation=saved(model, "epoch={}.ckpt"),
        at_epoch_end=saved(model, "after{}.ckpt"),
        shards=[len(part) for part in parts],
        data=len({x for part in parts for x in part}),
        any=trainer.strategy.reduce_boolean_decision(hvd.rank() == 1, all=False),
        all=trainer.strategy.reduce_boolean_decision(hvd.rank() == 1),
        zero=trainer.is_global_zero,
        group=torch.distributed.is_initialized(),
        logs=sorted(str(path.relative_to(SAVED)) for path in SAVED.rglob("version_*")),
    )  # fmt: skip


main()
