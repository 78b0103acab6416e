"""Learning-rate schedules of the papers, as torch schedulers: warm-up with annealing, and Newbob.

Both schedules store the initial rate of every parameter group and compute each new rate from that rate, not
from the last one: a resumed run has bitwise the same rates.
"""

import math
import numbers
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hvd_adpsgd.errors import ConfigError


class _Resumable(LRScheduler):
    """A scheduler that sets the learning rates when its state is loaded, not at the next step.

    With torch's own schedulers, the rates of a resumed run are right only if the optimizer's state is
    loaded after the scheduler was made.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_rates()

    def _set_rates(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class WarmupAnneal(_Resumable):
    """Raise the rate linearly from lr to `scale` times lr, then multiply it by `decay` in each epoch.

    With W = warmup_epochs x steps_per_epoch steps of warm-up, step k = 0, 1, ... of training takes
        lr_k = lr (1 + (scale - 1) k / (W - 1))                                for k < W
        lr_k = lr scale decay^(1 + floor((k - W) / steps_per_epoch))           for k >= W.
    So the last step of the warm-up has the full rate lr x scale, and the first epoch after the warm-up
    is the first annealed one. scale = 1 is the schedule of a single learner: constant, then annealed.
    Call `step()` after each training step, or once per epoch with steps_per_epoch = 1.

    A warm-up of one step (W = 1) starts at lr x scale.

    As with all torch schedulers, load_state_dict also sets scale and steps_per_epoch to those of the
    saved run. To continue with another number of learners, set these attributes after load_state_dict.

    Args:
        optimizer: an optimizer whose rates, one per parameter group, are those of a single learner.
        scale: B / B0 > 0: total batch size of all learners over the batch size that suits the rate of a
            single learner.
        warmup_epochs: length of the warm-up in epochs, at least one step; may be fractional.
        decay: factor on the rate per epoch after the warm-up, in (0, 1].
        steps_per_epoch: calls of `step()` per epoch, >= 1.
        last_epoch: number of steps made already, minus one, as in all torch schedulers.

    Raises:
        ConfigError: if an argument is out of its range.

    Source: linear warm-up for large batches, then annealing by 1/sqrt(2), as in Zhang et al.,
        arXiv:1907.05701.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scale: float = 1.0,
        warmup_epochs: float = 10,
        decay: float = 1 / math.sqrt(2),
        steps_per_epoch: int = 1,
        last_epoch: int = -1,
    ) -> None:
        for name, number in {
            "scale": scale,
            "decay": decay,
            "warmup_epochs": warmup_epochs,
        }.items():
            _require(_is_number(number), name, number, "a number", "Pass a number.")
        _require(0 < scale < math.inf, "scale", scale, "> 0", "Pass B / B0.")
        _require(0 < decay <= 1, "decay", decay, "> 0 and <= 1", "Pass a factor per epoch.")
        _require(
            _is_number(steps_per_epoch) and steps_per_epoch >= 1 and steps_per_epoch % 1 == 0,
            "steps_per_epoch",
            steps_per_epoch,
            "a whole number >= 1",
            "Pass the calls of step() per epoch, 1 to call it once.",
        )
        _require(
            1 <= warmup_epochs * steps_per_epoch < math.inf,
            "warmup_epochs",
            warmup_epochs,
            f">= {1 / steps_per_epoch:.6g}, one step",
            "Pass scale=1 for no warm-up, and the epochs before annealing here.",
        )
        self.scale, self.decay = scale, decay
        self.warmup_steps = round(warmup_epochs * steps_per_epoch)
        self.steps_per_epoch = int(steps_per_epoch)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of every parameter group at the current step."""
        factor = self._factor(self.last_epoch)
        return [lr * factor for lr in self.base_lrs]

    def _factor(self, step: int) -> float:
        after = step - self.warmup_steps
        if after >= 0:
            return self.scale * self.decay ** (1 + after // self.steps_per_epoch)
        warmed = step / (self.warmup_steps - 1) if self.warmup_steps > 1 else 1.0
        return 1 + (self.scale - 1) * warmed


class Newbob(_Resumable):
    """Keep the rate constant until the held-out loss improves too little, then halve it after every epoch.

    The gain of an epoch is (best - loss) / |best|, where best is the least loss of the epochs before;
    it is 0 if the loss is larger than best. The first gain below `threshold` starts the halving; a gain
    below `stop` while halving ends it: `finished` is then true, and the rate stays constant. A
    larger gain meanwhile, even one above `threshold`, does not end the halving.

    Call `step(held_out_loss)` after each epoch. The first call only records the loss: make
    that call before training if the first epoch is to be judged, too. Pass the same loss on every learner
    (`hvd.allreduce` it), else the learners' rates differ. Kaldi also discards an epoch that increased
    the loss: to do so, keep the last good model and load it.

    Args:
        optimizer: the optimizer, with its initial rates.
        threshold: gain below which halving starts, >= 0.
        stop: gain below which training is finished, in [0, threshold].
        factor: factor on all rates at each halving, in (0, 1).

    Attributes:
        best: the least loss so far, None before the first call of `step`.
        stage: "constant", "halving" or "finished".
        halvings: how often the rates were multiplied by `factor`.

    Raises:
        ConfigError: if an argument is out of its range.

    Source: steps/nnet/train_scheduler.sh of Kaldi (start_halving_impr 0.01, end_halving_impr
        0.001, halving_factor 0.5).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        threshold: float = 0.01,
        stop: float = 0.001,
        factor: float = 0.5,
    ) -> None:
        _require(0 <= threshold < math.inf, "threshold", threshold, ">= 0", "Pass a share.")
        _require(
            0 <= stop <= threshold, "stop", stop, f">= 0 and <= threshold = {threshold}",
            "Halving starts before training stops.",
        )  # fmt: skip
        _require(0 < factor < 1, "factor", factor, "> 0 and < 1", "Pass 0.5 to halve.")
        self.threshold, self.stop, self.factor = threshold, stop, factor
        self.best: float | None = None
        self.stage: Literal["constant", "halving", "finished"] = "constant"
        self.halvings = 0
        rates = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)
        self.base_lrs = [lr.clone() if isinstance(lr, Tensor) else lr for lr in rates]
        self._set_rates()  # torch's constructor has reset the rates to those before other schedulers

    @property
    def finished(self) -> bool:
        """Whether the loss improved by less than `stop` during halving, so that training should end."""
        return self.stage == "finished"

    def step(self, held_out_loss: float | Tensor | None = None) -> None:
        """Judge the held-out loss of the epoch that has ended, and set the rates of the next epoch.

        Args:
            held_out_loss: a finite number or tensor of one element. None only when torch calls this
                method for the first time, in the constructor.

        Raises:
            ConfigError: if the loss is missing or not finite.
        """
        if held_out_loss is None and self.last_epoch < 0:
            super().step()
            return
        loss = math.nan if held_out_loss is None else float(held_out_loss)
        _require(
            math.isfinite(loss),
            "step(held_out_loss)",
            held_out_loss,
            "a finite number",
            "Pass the loss on held-out data; a model that has diverged needs a lower rate.",
        )
        if self.best is None:
            self.best = loss
        else:
            self._judge(self.best, loss)
            super().step()

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of every parameter group: its initial rate times factor^halvings."""
        return [lr * self.factor**self.halvings for lr in self.base_lrs]

    def _judge(self, best: float, loss: float) -> None:
        """Set the stage of the schedule (constant, halving, finished) by the held-out loss of an epoch."""
        gain = (best - loss) / abs(best) if best and loss < best else 0.0
        self.best = min(best, loss)
        if self.stage == "halving" and gain < self.stop:
            self.stage = "finished"
        elif self.stage == "constant" and gain < self.threshold:
            self.stage = "halving"
        if self.stage == "halving":
            self.halvings += 1


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def _require(holds: bool, name: str, value: object, allowed: str, cure: str) -> None:
    if not holds:
        raise ConfigError(f"bad argument: {name} = {value!r}, allowed is {allowed}. {cure}")
