"""Lightning trains with this library: `Trainer(strategy=AdpsgdStrategy())`; docs/lightning.md has a script.

Importing this module registers "hadpsgd". Lightning starts no process: a launcher of this library does.
"""

import bisect
import contextlib
import copy
import functools
import inspect
import itertools
import math
import sys
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import callbacks as kinds
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics import Metric

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.job_steps import JobSteps

_OPS = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}


class _Learners(ClusterEnvironment):
    """The learners of the job. Given it, Lightning looks for no launcher, which would start MPI."""

    creates_processes_externally, main_address, main_port = True, "", 0
    detect = staticmethod(hvd.is_initialized)
    world_size, global_rank = staticmethod(hvd.size), staticmethod(hvd.rank)
    local_rank, node_rank = staticmethod(hvd.local_rank), staticmethod(hvd.cross_rank)
    set_world_size = set_global_rank = staticmethod(lambda _: None)  # the launcher did


class _Divided(DataLoader[Any]):
    """A loader whose data speeds divide. Before each batch it gives Lightning the job's numbers.

    What lies between two meetings of the job, where all learners validate, save or end, is an iteration of
    the sampler, so they come there within about a step of each other. One batch is fetched ahead, to know
    which is the last: with it each learner makes the step of the meeting, if need be with fewer batches.
    Steps and rows are counted from the first epoch on.
    """

    trainer: Any
    data: hvd.DynamicSampler
    samples: int  # of an epoch
    row: int  # samples at the last meeting
    is_last = False  # whether the batch is the last before a meeting
    _meetings: Any = ()  # steps after which the job meets
    _validations: Any = ()  # meetings after which it may validate

    def __iter__(self) -> Any:
        epoch, each = self._plan(), self._steps.of_epoch
        ends = (bisect.bisect(self._meetings, each * at) for at in (epoch, epoch + 1))
        for self.data.epoch in range(*ends):
            number, self._meeting = 0, self._meetings[self.data.epoch]
            batches = itertools.pairwise(itertools.chain(super().__iter__(), (self,)))
            for number, (batch, following) in enumerate(batches, 1):
                self._count(number == 1, following is self)
                yield batch
            if not number:  # the others took all
                self._count(True, True)
                rows = range(min(self.data.batch_size, self.samples))
                yield self.collate_fn([self.dataset[i] for i in rows])

    def _plan(self) -> int:
        """Number the steps of the epoch that begins; in the first one, name meetings inside of epochs."""
        trainer, batches, passes = self.trainer, len(self), self.trainer.accumulate_grad_batches
        epoch, each = trainer.current_epoch, math.ceil(batches / passes)
        steps = JobSteps(self.samples, passes * hvd.size() * self.data.batch_size, each)
        first, inside = epoch * self.samples, _meets_in_epochs(trainer)
        self.row = min(max(self.row, first), first + self.samples) if inside else first
        self._steps, self._pass, self._step = steps, 0, steps.made(self.row)
        self._met, before = self._step, trainer.global_step - self._step
        self._before = before  # other than 0 if a job of another size is resumed
        if not inside:
            self._meetings = self._validations = range(each, sys.maxsize, each)
        elif not self._meetings:
            limits = (trainer.max_epochs, each, 0), (trainer.max_steps, 1, before)
            end = min(number * unit - less for number, unit, less in limits if number != -1)
            total, every = math.ceil(end / each) * batches, trainer.val_check_batch
            period = total if trainer.check_val_every_n_epoch is None else batches
            starts, times = range(0, total, period), range(every, period + 1, every)
            checked = (divmod(start + at, batches) for start in starts for at in times)
            self._validations = {e * each + math.ceil(at / passes) for e, at in checked}
            saved = {at - before for n in _saves(trainer) for at in range(n, end + before, n)}
            meetings = {*range(each, end, each), end} | saved | self._validations
            self._meetings = sorted(at for at in meetings if self._met < at <= end)
            self.data.set_ends([*map(steps.rows, self._meetings)], self.row)
        return epoch

    def _count(self, is_first: bool, is_last: bool) -> None:
        """Give Lightning the job's numbers before a batch, the first or the last one between meetings."""
        trainer, loop, steps = self.trainer, self.trainer.fit_loop, self._steps
        passes, batches, self.is_last = trainer.accumulate_grad_batches, len(self), is_last
        first = trainer.current_epoch * steps.of_epoch
        if is_last:
            self._step = self._met = self._meeting
            self.row = steps.rows(self._met)
            before = min((self._step - first) * passes, batches) - 1  # batches of the epoch
            before -= int(
                self._pass > 0 and before % passes == 0
            )  # there Lightning clears gradients
            for optimizer in trainer.optimizers if self._pass == 0 < before % passes else ():
                optimizer.zero_grad()  # Lightning does not clear these
        else:  # numbers are repeated or left out, but those of meetings
            rows = 0 if is_first or self._pass else hvd.progress(self.data).samples
            known = max(self._step, self._met + 1, steps.made(rows) + 1)
            self._step = min(known, self._meeting - (self._pass + 1 == passes))
            before = max(0, self._step - 1 - first) * passes + self._pass
        self._pass = 0 if is_last else (self._pass + 1) % passes
        ends = is_last and self._step % steps.of_epoch == 0
        loop.max_batches = max(batches, before + 2 - ends)
        loop._data_fetcher.length = loop._data_fetcher.fetched + 2 - ends
        progress = vars(loop.epoch_loop.batch_progress.current)
        progress.update(dict.fromkeys(progress, before))
        optimizers = loop.epoch_loop.automatic_optimization.optim_progress.optimizer
        optimizers.step.total.completed = self._before + self._step - 1
        validates = is_last and self._step in self._validations
        trainer.val_check_batch = 1 if validates else sys.maxsize


class AdpsgdStrategy(ParallelStrategy):
    """Gradients are averaged in the super learner, models between super learners.

    Validation, test, predict and checkpoints use the mean of all super learners; after fit() it is the model.
    In training_step, reductions and gathers are over the super learner, so no step waits for another one.

    Args:
        **options: of hvd.DistributedOptimizer (averaging=, exchange_share=, ...); by default
            backward_passes_per_step is Trainer's accumulate_grad_batches. Errors are those of hvd.init().
    """

    strategy_name, is_distributed = "hadpsgd", True  # each learner gets its own part of the data
    distributed_sampler_kwargs = property(
        lambda _: {"num_replicas": hvd.size(), "rank": hvd.rank()}
    )
    is_global_zero = property(lambda _: hvd.is_coordinator())

    def __init__(self, **options: Any) -> None:
        hvd.init()
        super().__init__(cluster_environment=_Learners())
        self._options, self._mean, self._holds_mean = options, contextlib.ExitStack(), False
        self._loader: Any = None  # of training data that speeds divide
        self._divided_at = -1  # epoch at which Lightning last asked for that data
        self._scheduled = 0  # steps of the job that schedulers have made
        self._row = 0  # where a resumed job continues
        self._process_set: Any = None  # of reductions and gathers; None is all learners

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[hvd.local_rank() % len(self.parallel_devices)]

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = 0 if self.is_global_zero else hvd.rank()  # 0 prints and logs

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise ConfigError("Trainer(sync_batchnorm=True): put hvd.SyncBatchNorm in the model.")
        if any(hasattr(p, "device_mesh") for p in self.lightning_module.parameters()):
            raise ConfigError("fully_shard: a checkpoint would be one part. Train without Trainer.")
        # with Lightning's handler of SIGTERM a super learner would fail; with that of hvd.init() it leaves
        trainer._signal_connector.register_signal_handlers = lambda: None
        loop, self._divided_at, self._loader = trainer.fit_loop.epoch_loop, -1, None
        loop.update_lr_schedulers = functools.partial(self._schedule, loop.update_lr_schedulers)
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn, metric.distributed_available_fn = _gather, hvd.is_initialized
        for callback in trainer.callbacks:
            if isinstance(callback, kinds.WeightAveraging):
                plain = type(callback).on_save_checkpoint.__get__(callback)
                callback.on_save_checkpoint = functools.partial(self._save_average, plain)
            if isinstance(callback, kinds.ModelCheckpoint):
                plain = type(callback).on_train_batch_end.__get__(callback)
                callback.on_train_batch_end = functools.partial(self._save_at_meetings, plain)
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let speeds divide the training data, if it is known ahead where learners meet."""
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if self._divided_at == trainer.current_epoch:  # there are several loaders
            if self._loader is not None:
                self._loader.batch_sampler.sampler = self._loader.sampler
                self._loader.__class__, self._loader = type(self._loader).__bases__[1], None
            return dataloader
        self._divided_at, self._loader = trainer.current_epoch, None
        batches: Any = getattr(dataloader, "batch_sampler", None)
        equal: Any = getattr(dataloader, "sampler", None)
        is_plain = type(equal) is DistributedSampler and type(batches) is BatchSampler
        if is_plain and not _waits_in_steps(trainer):
            number, limit = len(dataloader), trainer.limit_train_batches
            number = min(number, limit) if isinstance(limit, int) else int(number * limit)
            length, each = len(dataloader.dataset), batches.batch_size
            samples = min(length, number * hvd.size() * each)
            batches.sampler = data = hvd.DynamicSampler(
                length, batch_size=each, drop_last=batches.drop_last, shuffle=equal.shuffle,
                seed=equal.seed, samples=samples,
            )  # fmt: skip
            data.set_epoch = lambda epoch: None  # type: ignore[method-assign]  # the loader does
            dataloader.__class__ = type("Divided", (_Divided, type(dataloader)), {})
            vars(dataloader).update(trainer=trainer, data=data, samples=samples, row=self._row)
            self._loader = dataloader
        return dataloader

    def on_train_start(self) -> None:
        self._scheduled = self.lightning_module.trainer.global_step

    def _schedule(self, plain: Any, interval: str, update_plateau_schedulers: bool) -> None:
        """Step schedulers of steps as often as the job has, or a slow learner's rates would lag behind."""
        times, loop = 1, self.lightning_module.trainer.fit_loop.epoch_loop
        how = interval, update_plateau_schedulers, loop._should_accumulate()
        if self._loader is not None and how == ("step", False, False):
            times, self._scheduled = loop.global_step - self._scheduled, loop.global_step
        for _ in range(times):
            plain(interval, update_plateau_schedulers)

    def _save_at_meetings(self, plain: Any, *args: Any) -> None:
        if self._loader is None or self._loader.is_last:
            plain(*args)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        hvd.broadcast_parameters([*module.named_parameters(), *module.named_buffers()], None)
        self.optimizers = [_wrap(plain, module, self._options) for plain in trainer.optimizers]

    def on_train_batch_start(self, *_: Any) -> None:
        self.set_world_ranks()
        passes = self.lightning_module.trainer.accumulate_grad_batches  # may change between epochs
        passes = self._options.get("backward_passes_per_step", passes)
        for optimizer in self.optimizers:
            optimizer._reducer.is_synchronized = False  # GradScaler may have skipped step()
            if optimizer.backward_passes_per_step != passes:
                optimizer.set_backward_passes_per_step(passes)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._process_set = hvd.super_learner
        output = super().training_step(*args, **kwargs)
        self._process_set = None
        return output

    def post_backward(self, closure_loss: Any) -> None:
        """In a job of one super learner, average before step(): manual optimization may clip before it."""
        for optimizer in self.optimizers:
            if optimizer._reducer.is_submitted:
                optimizer.synchronize()

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        def averaging_closure() -> Any:
            loss = closure()
            if not optimizer._reducer.is_synchronized:
                optimizer.synchronize()  # averages the rest before it is unscaled and clipped
            return loss

        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, averaging_closure, *args, **kwargs)

    def on_train_end(self) -> None:
        for optimizer in self.optimizers if self._averages else ():
            optimizer.close()  # the averages are the model now, and corrections belong to another
        hvd.average_model(self.lightning_module)

    def teardown(self) -> None:
        self._leave_mean()
        for optimizer in self.optimizers:
            optimizer.close()
        super().teardown()

    def _enter_mean(self) -> None:
        self._mean.enter_context(hvd.averaged(self.lightning_module, *self._averages, buffers=True))
        self._holds_mean = True
        self.set_world_ranks()  # after the wait, in which rank 0 may have failed

    def _leave_mean(self, *_: Any) -> None:
        self._mean.close()
        self._holds_mean, self._process_set = False, None

    on_validation_start = on_test_start = on_predict_start = _enter_mean
    on_validation_end = on_test_end = on_predict_end = on_exception = _leave_mean

    @property
    def _averages(self) -> list[torch.nn.Module]:
        """The moving averages of callbacks (EMAWeightAveraging), which these validate and save."""
        callbacks = self.lightning_module.trainer.callbacks
        found = [c._average_model for c in callbacks if isinstance(c, kinds.WeightAveraging)]
        return [average for average in found if average is not None]

    def _save_average(self, plain: Any, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Let a callback save the mean of its averages: `plain` puts their tensors in the checkpoint."""
        as_is, averages = self._holds_mean or self._is_alone, self._averages
        own = as_is or not averages
        with contextlib.nullcontext() if own else hvd.averaged(*averages, buffers=True):
            plain(trainer, module, checkpoint)
            checkpoint["state_dict"] = copy.deepcopy(checkpoint["state_dict"])

    @property
    def _is_alone(self) -> bool:
        """Whether this learner raises: the others train on, and enter no operation with it."""
        return self.lightning_module is not None and self.lightning_module.trainer.interrupted

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the mean; that of this learner's own model if it saves because it raises."""
        module, as_is = self.lightning_module, self._holds_mean or self._is_alone
        with contextlib.nullcontext() if as_is else hvd.averaged(module, buffers=True):
            return copy.deepcopy(module.state_dict())

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        """Save on one learner; on which is agreed: for 0.1 s after a failure there may be no coordinator."""
        checkpoint["hvd_adpsgd_row"] = self._row if self._loader is None else self._loader.row
        if self.is_global_zero if self._is_alone else self.broadcast(hvd.rank()) == hvd.rank():
            self.checkpoint_io.save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint: Any = super().load_checkpoint(*args, **kwargs)
        self._row = checkpoint.get("hvd_adpsgd_row", 0)
        return checkpoint

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        op = _OPS[getattr(reduce_op, "name", reduce_op).lower()]
        values = tensor.float() if op is hvd.Average and not tensor.is_floating_point() else tensor
        return hvd.allreduce(values, op=op, process_set=self._process_set)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return hvd.allgather(tensor.unsqueeze(0), process_set=self._process_set)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return (min if all else max)(hvd.allgather_object(bool(decision)))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, root_rank=src or None)  # None: the first learner left

    def barrier(self, name: str | None = None) -> None:
        if not self._is_alone:
            hvd.barrier()


def _saves(trainer: Any) -> list[int]:
    """Return after which multiples of steps all learners save."""
    return [n for c in trainer.callbacks if (n := vars(c).get("_every_n_train_steps"))]


def _meets_in_epochs(trainer: Any) -> bool:
    """Whether all learners validate, save or end after a number of steps or batches."""
    interval = getattr(trainer, "val_check_interval", None)  # None: a time
    plain = trainer.max_steps, interval, trainer.check_val_every_n_epoch is None
    return plain != (-1, 1.0, False) or bool(_saves(trainer))


def _waits_in_steps(trainer: Any) -> bool:
    """Whether learners decide together in each step, or meet after steps that nobody can number ahead."""
    by_time, inside = getattr(trainer, "_val_check_time_interval", None), _meets_in_epochs(trainer)
    waits = (kinds.Timer, kinds.GradientAccumulationScheduler)[: 1 + inside]
    module, endless = trainer.lightning_module, trainer.max_epochs == trainer.max_steps == -1
    return (
        any(isinstance(c, waits) or vars(c).get("_train_time_interval") for c in trainer.callbacks)
        or bool(by_time or trainer.overfit_batches)
        or "dataloader_iter" in inspect.signature(module.training_step).parameters
        or (inside and (endless or not module.automatic_optimization))
    )


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Return a metric's tensor on each learner; shapes may differ."""
    return [other.to(tensor.device) for other in hvd.allgather_object(tensor.detach().cpu())]


def _wrap(plain: Any, module: torch.nn.Module, options: dict[str, Any]) -> Any:
    """Wrap an optimizer; its step(closure) calls the closure, then step(), which all strategies allow."""
    mine = {id(p) for group in plain.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if id(p) in mine]
    optimizer = hvd.DistributedOptimizer(plain, named, **options)
    kind: Any = type(optimizer)  # made for this optimizer alone
    step = kind.step

    def step_after(self: Any, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        step(self)
        return loss

    step_after.hooked = True  # type: ignore[attr-defined]  # or torch would run step hooks twice
    kind.step = step_after
    return optimizer


StrategyRegistry.register(AdpsgdStrategy.strategy_name, AdpsgdStrategy, "H-ADPSGD")
