"""Hugging Face Transformers: a Trainer whose processes are the learners.

    from hvd_adpsgd.integrations.transformers import AdpsgdTrainer, AdpsgdTrainingArguments

in place of Trainer and TrainingArguments. What is evaluated, saved and left behind by train() is the mean of
the super learners' models. The Trainer waits for the slowest learner where it evaluates and saves.
"""

import contextlib
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import transformers.trainer as its_trainer
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import AcceleratorState
from accelerate.utils import find_batch_size, recursively_apply
from torch.optim.lr_scheduler import LambdaLR
from transformers import DefaultFlowCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.training_args import ParallelMode

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator, divide_by_speeds
from hvd_adpsgd.integrations.accelerate_processes import follow_survivors, join_learners
from hvd_adpsgd.integrations.job_steps import JobSteps


class AdpsgdTrainingArguments(TrainingArguments):
    """transformers.TrainingArguments whose processes are the learners of hvd_adpsgd; calls hvd.init()."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        # Transformers, too, forgets the state of earlier arguments here
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


class _Flow(DefaultFlowCallback):
    """Decides in place of Trainer's what follows a step, where speeds divide the training data.

    Trainer's loop takes for an epoch what lies between two steps of the job at which all learners meet: the
    last of an epoch, those of evaluations and checkpoints. The sampler ends it on all learners within about
    a step of each other; a slow learner may get no batch of it. `global_step` and `epoch` are the job's.
    """

    sampler: Any = None  # None: all learners make equally many steps
    steps: JobSteps
    passes = epochs = 0  # batches of a learner's step; of the job

    def step(self) -> int:
        return self.steps.made(hvd.progress(self.sampler).samples)

    def _set(self, state: Any, step: int) -> None:
        state.global_step, state.epoch = step, self.steps.rows(step) / self.steps.length

    def begin(self, args: Any, state: Any) -> None:
        """Count the steps of a resumed job in those of this one, which may have other sizes."""
        self.batches = self._made = 0  # by this learner: batches since a meeting, steps
        start = round((state.epoch or 0) * self.steps.length)
        state.num_train_epochs = self.epochs
        self._set(state, self.steps.made(start))
        self._first = self._logged = state.global_step, 0  # where means begin, in steps: job's, own
        pairs = ((args.eval_strategy, state.eval_steps), (args.save_strategy, state.save_steps))
        every = [self.steps.of_epoch, *(int(n) for kind, n in pairs if kind == "steps")]
        inside = range(state.global_step + 1, state.max_steps)
        self._meetings = [at for at in inside if not all(at % n for n in every)] + [state.max_steps]
        self.sampler.set_ends([*map(self.steps.rows, self._meetings)], start)

    def on_step_end(self, args: Any, state: Any, control: Any, **how: Any) -> Any:
        if self.sampler is None:
            return super().on_step_end(args, state, control, **how)
        self._made += 1
        known = min(self.step() + 1, self._meetings[self.sampler.epoch - 1] - 1)
        self._set(state, max(state.global_step - 1, known))  # numbers are repeated, or left out
        if args.logging_strategy == "steps":
            every = state.logging_steps
            control.should_log |= state.global_step // every > self._logged[0] // every
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **how: Any) -> Any:
        if self.sampler is None:
            return super().on_epoch_end(args, state, control, **how)
        args.gradient_accumulation_steps = self.passes
        if not control.should_epoch_stop:
            return control  # a callback ends the training
        control.should_training_stop &= self.batches > 0  # set where others took all
        self.batches = 0
        self._set(state, self._meetings[self.sampler.epoch - 1])
        super().on_step_end(args, state, control, **how)
        if state.global_step % self.steps.of_epoch == 0 or control.should_training_stop:
            super().on_epoch_end(args, state, control, **how)
        control.should_log &= self._made > self._logged[1]
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.best_model_checkpoint = hvd.broadcast_object(state.best_model_checkpoint, None)

    def correct(self, logs: dict[str, float], step: int, is_of_steps: bool) -> None:
        """Divide mean losses by this learner's steps; Trainer has divided by the job's."""
        is_of_all = "train_loss" in logs
        if is_of_all or ("loss" in logs and is_of_steps):
            name, begin = ("train_loss", self._first) if is_of_all else ("loss", self._logged)
            logs[name] *= (step - begin[0]) / max(1, self._made - begin[1])
            self._logged = step, self._made


class AdpsgdTrainer(Trainer):
    """transformers.Trainer for learners of hvd_adpsgd; `args` are AdpsgdTrainingArguments.

    All learners call train, evaluate, predict and save_model together. The optimizer is wrapped by
    hvd.DistributedOptimizer, unless one of `optimizers=` already is. Evaluation is divided over all learners,
    with one result on all. The strategy is that of HVD_ADPSGD_AVERAGING.

    Raises:
        ConfigError: for other arguments, FSDP, DeepSpeed, or `dispatch_batches`.
    """

    control: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remove_callback(DefaultFlowCallback)
        self._flow = _Flow()
        self.callback_handler.callbacks.insert(0, self._flow)  # before the user's

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

    def get_train_dataloader(self) -> Any:
        """Let speeds divide the training data if Trainer would shuffle them."""
        loader, self._flow.sampler = super().get_train_dataloader(), None
        batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        plain: Any = getattr(batches, "sampler", None)
        if type(plain) is SeedableRandomSampler and not plain.replacement:
            how = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
            sampler = hvd.DynamicSampler(len(plain), seed=plain.initial_seed, **how)
            self._flow.sampler = batches.sampler = sampler
            divide_by_speeds(loader, sampler)
        return loader

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        values, flow = super().set_initial_training_values(args, dataloader), self._flow
        if flow.sampler is None:
            return values
        flow.epochs, of_epoch, length, samples, rows_of_step, _, end = values
        flow.steps = JobSteps(length, rows_of_step, of_epoch)
        flow.passes = args.gradient_accumulation_steps
        args.ignore_data_skip = True  # the sampler continues
        # the loader ends what the loop takes for an epoch, not a number of steps or batches
        return end, sys.maxsize, length, samples, rows_of_step, sys.maxsize, end

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        skipped = super()._init_training_state(*args, **kwargs)
        if self._flow.sampler is not None:  # before Trainer notes where its means begin
            self._flow.begin(self.args, self.state)
        return skipped

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler, flow = super().create_scheduler(*args, **kwargs), self._flow
        if flow.sampler is not None and isinstance(scheduler, LambdaLR):  # follows the job
            rates: Any = [lambda _, at=at: at(flow.step() + 1) for at in scheduler.lr_lambdas]
            scheduler.lr_lambdas = rates
        return scheduler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Count tokens of the super learner's batches, scaled to all learners, which no learner waits for."""
        across, flow = self.args.average_tokens_across_devices, self._flow
        with self._counting_own_tokens():
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if flow.sampler is not None:
            flow.batches += len(batches)
            self.control.should_epoch_stop |= not batches
            if len(batches) < num_batches:  # the last step is made with what is left
                self.args.gradient_accumulation_steps = max(1, flow.batches)
        if across and torch.is_tensor(items):
            mean = hvd.allreduce(items.float(), op=hvd.Average, process_set=hvd.super_learner)
            items = mean * self.accelerator.num_processes
        return batches, items

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
        return output._replace(training_loss=output.metrics["train_loss"])

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
        with self._mean_model():
            super().save_model(output_dir, _internal_call)
            hvd.barrier()  # the files are there when a learner goes on

    def _load_best_model(self) -> None:
        with hvd.averaging_paused():
            super()._load_best_model()

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
        if self._flow.sampler is not None:
            self._flow.correct(logs, self.state.global_step, self.control.should_log)
        if "loss" in logs:
            hvd.log(loss=logs["loss"])
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        super().log(logs, start_time)
        for bar in self.callback_handler.callbacks if "train_loss" in logs else ():
            if isinstance(bar, ProgressCallback):
                bar.on_step_end(self.args, self.state, self.control)  # shows the job's last step
