"""Hugging Face Transformers: a Trainer whose processes are the learners.

    from hvd_adpsgd.integrations.transformers import AdpsgdTrainer, AdpsgdTrainingArguments

in place of Trainer and TrainingArguments. What is evaluated, saved and left behind by train() is the mean of
the super learners' models. The Trainer waits for the slowest learner where it evaluates and saves.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers.trainer as its_trainer
from accelerate.state import AcceleratorState
from accelerate.utils import find_batch_size, recursively_apply
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator
from hvd_adpsgd.integrations.accelerate_processes import follow_survivors, join_learners

_SAMPLER = "hvd_sampler.json"  # in a checkpoint: what is left of the epoch


class AdpsgdTrainingArguments(TrainingArguments):
    """transformers.TrainingArguments whose processes are the learners of hvd_adpsgd; calls hvd.init()."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        # of earlier arguments, as Transformers does
        AcceleratorState._reset_state(reset_partial_state=True)
        self.distributed_state = join_learners(cpu=self.use_cpu)
        device: torch.device = self.distributed_state.device
        self._n_gpu = int(device.type == "cuda")
        return device

    @property
    def parallel_mode(self) -> ParallelMode:
        """No torch.distributed: the Trainer must not call it."""
        return ParallelMode.NOT_PARALLEL

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        state = self.distributed_state
        with state.local_main_process_first() if local else state.main_process_first():
            yield


class _Batches(int):
    """Batches of an epoch whose end is not known: an estimate, but equal to none until that is."""

    end = -1

    def __eq__(self, number: object) -> bool:
        return number == self.end

    __hash__ = int.__hash__


class AdpsgdTrainer(Trainer):
    """transformers.Trainer for learners of hvd_adpsgd; `args` are AdpsgdTrainingArguments.

    All learners call train, evaluate, predict and save_model together. The optimizer is wrapped by
    hvd.DistributedOptimizer, unless one of `optimizers=` already is. Evaluation is divided over all learners,
    with one result on all. The strategy is that of HVD_ADPSGD_AVERAGING.

    Raises:
        ConfigError: for other arguments, FSDP, DeepSpeed, or `dispatch_batches`.
    """

    _sampler: Any = None  # where speeds divide the training data
    control: Any

    def create_accelerator_and_postprocess(self) -> None:
        if not isinstance(self.args, AdpsgdTrainingArguments):
            raise ConfigError(
                f"AdpsgdTrainer got args={type(self.args).__name__}, which start torch.distributed, allowed "
                "are AdpsgdTrainingArguments. Pass these."
            )
        plain = its_trainer.Accelerator
        its_trainer.Accelerator = AdpsgdAccelerator
        try:
            super().create_accelerator_and_postprocess()
        finally:
            its_trainer.Accelerator = plain
        self.accelerator.passes = self.args.gradient_accumulation_steps

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Let speeds divide the training data; steps between evaluations and checkpoints are the job's."""
        plain, args = super()._get_train_sampler(train_dataset), self.args
        self._sampler = None
        can = hasattr(Trainer, "_run_epoch") and 1 not in (args.eval_steps, args.save_steps)
        if can and type(plain) is RandomSampler:
            seed, data = self.accelerator.dataloader_config.data_seed, plain.data_source
            how = {"drop_last": args.dataloader_drop_last, "seed": seed}
            self._sampler = hvd.DynamicSampler(data, batch_size=args.train_batch_size, **how)
        return self._sampler or plain

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        if self._sampler is not None and isinstance(scheduler, LambdaLR):  # follows the job
            rates: Any = [lambda _, at=at: at(self._job + 1) for at in scheduler.lr_lambdas]
            scheduler.lr_lambdas = rates
        return scheduler

    def _run_epoch(self, **how: Any) -> None:
        if self._sampler is not None:
            epoch, self._steps = how["epoch"], how["num_update_steps_per_epoch"]
            self._sampler.set_epoch(epoch)
            if epoch == how["epochs_trained"]:
                self._logged = self._seen = self.state.global_step
                file = Path(how["resume_from_checkpoint"] or "", _SAMPLER)
                if how["steps_trained_in_current_epoch"] and file.exists():
                    self._sampler.load_state_dict(json.loads(file.read_text()))
                how["steps_trained_in_current_epoch"] = 0
            self._ends, self._made = (epoch + 1) * self._steps, 0
            self._batches = _Batches(how["steps_in_epoch"])
            how.update(steps_in_epoch=self._batches, num_update_steps_per_epoch=sys.maxsize)
            names = ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")
            self._how = [how[name] for name in names]
        super()._run_epoch(**how)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._sampler is not None:
            self._made += len(batches)
            if len(batches) < num_batches:
                self._batches.end = self._made
            self.control.should_epoch_stop |= not batches
            self._count(is_over=not batches)
        return batches, items

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._sampler is not None:
            number, every = self.state.global_step, self.state.logging_steps
            if self.args.logging_strategy == "steps":  # numbers are repeated, or left out
                self.control.should_log = number // every > self._logged // every
            self._logged = number if self.control.should_log else self._logged
            if not self._made:
                self.control.should_training_stop = False  # set where others took the whole epoch
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _count(self, is_over: bool) -> None:
        """Count the steps of the job in place of this learner's.

        All learners meet at the same numbers, of evaluations and checkpoints: each has each of these once, if
        need be after its last batch of the epoch.
        """
        state, args, last = self.state, self.args, min(self._ends, self.state.max_steps)
        pairs = ((args.eval_strategy, state.eval_steps), (args.save_strategy, state.save_steps))
        every = [int(n) for kind, n in pairs if kind == "steps"]
        self._job = int(hvd.progress(self._sampler).epochs * self._steps)
        self._seen = seen = max(self._seen, state.global_step)
        held = (at - 1 for at in range(last - 1, 0, -1) if all(at % n for n in every))
        number = max([self._job, *(seen // n * n for n in every)])
        number = min([number, next(held, 0), *(seen // n * n + n - 1 for n in every)])
        if is_over or (last < self._ends and self._job >= last - 1):
            number = last - (not is_over)  # the last step
            due = {at for n in every for at in range(seen // n * n + n, number + 1, n)}
            for at in sorted(due | ({last} if every and number == state.max_steps else set())):
                self._set_step(at)
                self.control = self.callback_handler.on_step_end(args, state, self.control)
                self._maybe_log_save_evaluate(self._tr_loss, None, *self._how)
                if self.control.should_training_stop:
                    return
        self._set_step(number)

    def _set_step(self, number: int) -> None:
        for name in ("_globalstep_last_logged", "_initial_global_step"):  # from it count own steps
            setattr(self, name, getattr(self, name) + number - self.state.global_step)
        self.state.global_step = number

    @contextlib.contextmanager
    def _mean_model(self) -> Iterator[None]:
        """Inside the `with` block the model is the mean, and the surviving learners share the work."""
        assert self.model is not None
        with hvd.averaged(self.model, buffers=True):
            follow_survivors()
            yield

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        assert self.model is not None
        hvd.average_model(self.model)
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._mean_model():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._mean_model():
            return super().predict(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with self._counting_own_tokens():
            return super().prediction_step(model, self._without_repeats(inputs), *args, **kwargs)

    def _without_repeats(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The last batch without rows that fill it up, which would count in its mean loss.

        If all rows are such, they stay: gather_for_metrics drops them.
        """
        loading, rows = self.accelerator.gradient_state, find_batch_size(inputs)
        if not loading.end_of_dataloader or loading.remainder <= 0 or rows is None:
            return inputs
        own = loading.remainder - self.accelerator.process_index * rows
        return recursively_apply(lambda t: t[:own] if own > 0 else t, inputs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # _save_checkpoint holds the mean already
        with contextlib.nullcontext() if _internal_call else self._mean_model():
            super().save_model(output_dir, _internal_call)
            hvd.barrier()  # the files are there when a learner goes on

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        with self._mean_model():
            super()._save_checkpoint(model, trial)
            if self._sampler is not None and hvd.is_coordinator():
                folder = f"checkpoint-{self.state.global_step}"
                file = Path(self._get_output_dir(trial=trial), folder, _SAMPLER)
                file.write_text(json.dumps(self._sampler.state_dict()))
            best = hvd.broadcast_object(self.state.best_model_checkpoint, root_rank=None)
            self.state.best_model_checkpoint = best

    def _load_best_model(self) -> None:
        with hvd.averaging_paused():
            super()._load_best_model()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Tokens of the super learner's batches, scaled to all learners, which no learner waits for."""
        across = self.args.average_tokens_across_devices
        with self._counting_own_tokens():
            items = super()._get_num_items_in_batch(batch_samples, device)
        if not across or not torch.is_tensor(items):
            return items
        mean = hvd.allreduce(items.float(), op=hvd.Average, process_set=hvd.super_learner)
        return mean * self.accelerator.num_processes

    @contextlib.contextmanager
    def _counting_own_tokens(self) -> Iterator[None]:
        """Inside the `with` block, losses are means over this learner's tokens."""
        across = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = across

    def is_local_process_zero(self) -> bool:
        return hvd.local_rank() == 0 or hvd.is_coordinator()

    def is_world_process_zero(self) -> bool:
        return hvd.is_coordinator()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            hvd.log(loss=logs["loss"])
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        super().log(logs, start_time)
