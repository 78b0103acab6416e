"""Short runs by Lightning, one per launch. Arguments: its name, a folder for what is saved."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed.fsdp
from learner import digest, same_inside, say
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger

import hvd_adpsgd.integrations.lightning  # registers "hadpsgd"
import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError, LearnerFailedError

AdpsgdStrategy = hvd_adpsgd.integrations.lightning.AdpsgdStrategy
SAVED = Path(sys.argv[2])
EPOCHS = 4
NOTED = ("rows", "step_s", "span", "scheduled", "bars", "validated")
X = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)
        self.same_inside, self.steps, self.first = True, 0, ""
        self.validated: list[int] = []

    def on_train_start(self) -> None:
        self.first = digest(self.state_dict().values())

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.b(self.a(batch[0]).relu()) - batch[1]).square().mean()

    def training_step(self, batch: Any, _: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.same_inside &= same_inside(self.parameters())
        self.steps += 1

    def on_validation_end(self) -> None:
        self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


class Slow(Net):
    """Learner 0 needs three times as long. Notes rows, times of steps, counts of schedules, bars."""

    def on_train_start(self) -> None:
        self.rows, self.step_s, self.scheduled, self.span = [], [], [], [time.monotonic()]
        self.bars: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.rows.append([])
        self.bars.append([self.trainer.num_training_batches, 0])

    def on_train_batch_start(self, *_: Any) -> None:
        self.at = time.monotonic()

    def training_step(self, batch: Any, _: int) -> Any:
        self.rows[-1] += batch[0][:, 0].int().tolist()
        time.sleep(0.15 if hvd.rank() == 0 else 0.05)
        return self.loss([batch[0] / 1e6, 1.0])

    def on_train_batch_end(self, *_: Any) -> None:
        self.step_s.append(time.monotonic() - self.at)
        self.bars[-1][1] = self.trainer.fit_loop.batch_idx + 1
        self.scheduled.append(self.lr_schedulers().last_epoch)  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Fails(Net):
    """In the second epoch learner 0 is killed, or learner 2 or 3 fails otherwise."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1
        if self.steps != 12:
            return
        if sys.argv[1] == "killed" and hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "raises" and hvd.rank() == 2:
            raise ValueError("learner 2 fails")
        if sys.argv[1] == "preempted" and hvd.rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)


class Manual(Net):
    """Two optimizers, each of which freezes the parameters of the other."""

    automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        with first.toggle_model():
            first.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            first.step()

        def closure() -> None:
            second.zero_grad()
            self.manual_backward(self.loss(batch))

        with second.toggle_model():
            second.step(closure)
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()

    def configure_optimizers(self) -> Any:
        both = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.a, self.b)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in both]


class Uneven(Net):
    """Learners that have fewer batches wait for the others of their super learner."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_validation_start(self) -> None:
        hvd.join()


class Sharded(Net):
    """With fully_shard in the hook in which Lightning's own strategies expect it."""

    def configure_model(self) -> None:
        hvd.super_learner_group()
        torch.distributed.fsdp.fully_shard(self)


def fit(model: Net, ckpt_path: Any = None, data: Any = DATA, **arguments: Any) -> Any:
    arguments.setdefault("callbacks", []).append(
        ModelCheckpoint(SAVED, "{epoch}", monitor="val_loss", save_top_k=-1, save_last=True)
    )
    arguments = {"strategy": "hadpsgd", "max_epochs": EPOCHS, **arguments}
    trainer = lightning.Trainer(
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **arguments
    )
    load = torch.utils.data.DataLoader
    trainer.fit(model, load(data, 5), load(DATA, 10), ckpt_path=ckpt_path)
    return trainer


def told(model: Net, trainer: Any) -> dict[str, Any]:
    """What is so in all cases behind fit()."""
    best = trainer.checkpoint_callback.best_model_path
    Net().load_state_dict(torch.load(best, weights_only=True)["state_dict"])
    return {
        "rank": hvd.rank(), "steps": model.steps, "epochs": trainer.current_epoch, "size": hvd.super_size(),
        "same_inside": model.same_inside, "same": digest(model.parameters()), "zero": trainer.is_global_zero,
        "loss": float(trainer.callback_metrics["val_loss"]),
    }  # fmt: skip


def fails() -> None:
    hvd.init()
    model = Fails()
    logger = CSVLogger(SAVED, version=f"learner{hvd.rank()}", flush_logs_every_n_steps=1)
    try:
        trainer = fit(model, logger=logger)
    except LearnerFailedError as error:
        say(rank=hvd.rank(), failed=type(error).__name__)
        raise
    say(**told(model, trainer))


def manual() -> None:
    model = Manual()
    trainer = fit(model)
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    say(**told(model, trainer), rates=rates)


def uneven() -> None:
    hvd.init()
    model = Uneven()
    data = torch.utils.data.Subset(DATA, range(5 * (4 + 2 * hvd.rank())))
    trainer = fit(model, data=data, use_distributed_sampler=False)
    say(**told(model, trainer))


class Saves(ModelCheckpoint):
    """Notes after which steps it is asked to save."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.__dict__.setdefault("asked", []).append(trainer.global_step)
        super().on_train_batch_end(trainer, *rest)


def resumed(name: str = "last.ckpt", epochs: Any = (2, EPOCHS), **how: Any) -> None:
    """The first epochs, or up to the last step; if there is that checkpoint, the rest."""
    model, last = Net(), SAVED / name
    state = torch.load(last, weights_only=True)["state_dict"] if last.exists() else {}
    saves = Saves(SAVED, "{step}", save_top_k=-1, every_n_train_steps=6)
    how |= {"max_epochs": epochs[bool(state)], "callbacks": [saves] if how else []}
    trainer = fit(model, last if state else None, **how)
    begins, counted = model.first == digest(state.values()), trainer.global_step
    asked = vars(saves).get("asked", [])
    say(
        **told(model, trainer),
        counted=counted,
        begins=begins,
        validated=model.validated,
        asked=asked,
    )


def slow(every: int = 0, **how: Any) -> None:
    """Epochs of 4000 other rows of 5000; files are named by the step."""
    model, rows = Slow(), torch.arange(5000.0).unsqueeze(1).expand(-1, 6)
    data = torch.utils.data.TensorDataset(rows, rows)
    named = ModelCheckpoint(SAVED / "named", every_n_train_steps=every or None)
    trainer = fit(model, data=data, limit_train_batches=200, callbacks=[named], **how)
    model.span.append(time.monotonic())
    notes = {name: getattr(model, name) for name in NOTED}
    say(**told(model, trainer), **notes, best=named.best_model_path)


by_steps = partial(slow, 150, max_epochs=-1, max_steps=300, val_check_interval=0.5)


resumed_by_steps = partial(
    resumed, "step=6.ckpt", (-1, -1), max_steps=20, val_check_interval=4, accumulate_grad_batches=2
)


def stopped() -> None:
    """No epoch is that much better than the first one, so the third ends the training; then a refusal."""
    hvd.init()
    model = Net()
    trainer = fit(model, callbacks=[EarlyStopping("val_loss", min_delta=100.0, patience=2)])
    refused = ""
    try:
        fit(Sharded())
    except ConfigError as error:
        refused = str(error)
    say(**told(model, trainer), refused=refused)


class Seen(Net):
    """Notes what is validated."""

    seen: list[Any]

    def validation_step(self, batch: Any, number: int) -> None:
        super().validation_step(batch, number)
        if number == 0:
            self.seen.append(digest(self.parameters()))


def ema() -> None:
    """Each learner's moving average of its own models: validated and saved is their mean."""
    hvd.init()
    model = Seen()
    model.seen = []
    callback = EMAWeightAveraging(decay=0.9)
    trainer = fit(
        model, callbacks=[callback, ModelCheckpoint(SAVED, "step{step}", every_n_train_steps=3)]
    )
    files = {path.name: torch.load(path, weights_only=True) for path in SAVED.glob("*.ckpt")}
    names = [name for name, _ in model.named_parameters()]
    states = [file["state_dict"] for name, file in files.items() if name.startswith("epoch")]
    epochs = [digest([state[name] for name in names]) for state in states]
    own = digest(callback._average_model.parameters())
    say(**told(model, trainer), seen=model.seen, saved=epochs, own=own)


def strategies() -> None:
    """Each with another number of passes in its second epoch."""
    for averaging in (
        "delayed_gradients",
        "gossip_pga:period=2+random_pairs",
        "noloco:period=3",
        "synchronous",
    ):
        model = Net()
        trainer = fit(
            model,
            strategy=AdpsgdStrategy(averaging=averaging),
            max_epochs=2,
            callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})],
        )
        say(
            **{**told(model, trainer), "rank": f"{averaging} {hvd.rank()}"},
            counted=trainer.global_step,
        )


torch.set_num_threads(1)
os.chdir(SAVED)
{"killed": fails, "raises": fails, "preempted": fails, "manual": manual, "uneven": uneven,
 "resumed": resumed, "slow": partial(slow, max_epochs=2), "strategies": strategies, "stopped": stopped,
 "ema": ema, "by_steps": by_steps, "resumed_by_steps": resumed_by_steps}[sys.argv[1]]()  # fmt: skip
