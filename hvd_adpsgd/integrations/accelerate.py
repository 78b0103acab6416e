"""Hugging Face Accelerate: an Accelerator for learners, which wraps optimizers and not models.

from hvd_adpsgd.integrations.accelerate import AdpsgdAccelerator as Accelerator
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import recursively_apply

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.integrations.accelerate_processes import follow_survivors, join_learners

# Set by the user, or by Accelerate if it is given a plugin.
_SHARDS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
_REDUCTIONS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max}


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's optimizer around a wrapped one, whose gradients AdpsgdAccelerator.backward() averages."""

    averaged = False  # whether the next step's are averaged

    def average(self) -> None:
        averaging = getattr(self.optimizer, "_averaging", None)
        if averaging is not None and averaging.stopped:
            return  # a later prepare() has wrapped its parameters
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.optimizer.synchronize()
            self.averaged = True

    def step(self, closure: Any = None) -> None:
        once = self.averaged and self.gradient_state.sync_gradients
        with self.optimizer.skip_synchronize() if once else contextlib.nullcontext():
            super().step(closure)
        self.averaged = self.averaged and not once


class AdpsgdAccelerator(accelerate.Accelerator):
    """accelerate.Accelerator for learners of hvd_adpsgd; takes the same arguments, and calls hvd.init().

    prepare() divides data over all learners, wraps optimizers by hvd.DistributedOptimizer (unless the script
    has), and gives all learners the model of the first. backward() averages gradients in the super learner if
    a step follows. save_state and save_model save the mean of the models. These, gather, reduce and the like
    are called by all learners together, and wait for the slowest.

    Raises:
        ConfigError: for dispatch_batches=True, FSDP, DeepSpeed or Megatron-LM.
        WorldError: if Accelerate has started a process group of its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        join_learners(cpu=bool(kwargs.get("cpu", False)))
        super().__init__(*args, **kwargs)
        self.passes: int | None = None  # per step; None: gradient_accumulation_steps
        loading = self.dataloader_config
        refused = [word for word in _SHARDS if os.environ.get(word, "").lower() == "true"]
        refused += ["dispatch_batches"] if loading.dispatch_batches else []
        if refused:
            raise ConfigError(
                f"{refused[0]}=true: each learner holds the whole model and reads its own data. Leave it "
                "out, and pass no plugin."
            )
        loading.dispatch_batches = False
        # without a seed Accelerate sends the state of a generator in every epoch, by torch.distributed
        loading.use_seedable_sampler = True
        seed = torch.initial_seed() if loading.data_seed is None else loading.data_seed
        loading.data_seed = hvd.broadcast_object(seed % 2**32, root_rank=None)

    @property
    def is_main_process(self) -> bool:
        """Whether this learner prints and saves: the first surviving one, soon after a failure."""
        return hvd.is_coordinator()

    def prepare_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        prepared: torch.nn.Module = super().prepare_model(model, *args, **kwargs)
        if is_new:
            hvd.broadcast_parameters(prepared.state_dict(), root_rank=None)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        kinds, batches = (hvd.DynamicSampler, hvd.DynamicBatchSampler), data_loader.batch_sampler
        sampler = batches if isinstance(batches, kinds) else data_loader.sampler
        if isinstance(sampler, kinds):  # this sampler divides the data
            divide_by_speeds(prepared, sampler)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer)
        places = self.device_placement if device_placement is None else device_placement
        prepared = _Optimizer(self._wrapped(optimizer), places, self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if hasattr(optimizer, "skip_synchronize"):  # wrapped by the script
            return optimizer
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        models = torch.nn.ModuleList(self._models)
        named = [(name, p) for name, p in models.named_parameters() if p in mine]
        names = named if len(named) == len(mine) else None
        passes = self.passes or self.gradient_accumulation_steps
        return hvd.DistributedOptimizer(optimizer, names, backward_passes_per_step=passes)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if self.sync_gradients:  # also where an epoch ends with fewer passes
            for optimizer in self._optimizers:
                optimizer.average()

    def gather(self, tensor: Any) -> Any:
        return recursively_apply(_gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object and _is_tensors(input_data):
            return super().gather_for_metrics(input_data)
        gathered = [one for part in hvd.allgather_object(input_data) for one in part]
        state = self.gradient_state
        is_padded = state.end_of_dataloader and state.remainder > 0
        return gathered[: state.remainder] if is_padded else gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        op = _REDUCTIONS[reduction]
        return recursively_apply(lambda t: hvd.allreduce(t, op=op), tensor)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return recursively_apply(_pad, tensor, *args, error_on_other_type=True, **kwargs)

    @contextlib.contextmanager
    def _saving_mean(self, *models: torch.nn.Module) -> Iterator[None]:
        with hvd.averaged(*models, buffers=True):
            follow_survivors()
            yield
            self.wait_for_everyone()  # the files are there when a learner goes on

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._saving_mean(*self._models):
            return super().save_state(*args, **kwargs)

    def save_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        with self._saving_mean(model):
            super().save_model(model, *args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        with hvd.averaging_paused():
            super().load_state(*args, **kwargs)


def divide_by_speeds(prepared: Any, sampler: Any) -> None:
    """Let the sampler of a prepared loader, a hvd.DynamicSampler, divide its data."""
    shard, plain = prepared.batch_sampler, sampler.set_epoch
    shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False
    # Accelerate does not count an epoch without a batch here, or left early
    sampler.set_epoch = lambda epoch: plain(max(epoch, sampler.epoch))


def _is_tensors(data: Any) -> bool:
    values = data.values() if isinstance(data, dict) else data
    return torch.is_tensor(data) or (
        isinstance(data, (tuple, list, dict)) and all(map(_is_tensors, values))
    )


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allgather(tensor.detach().reshape(tensor.shape or (1,)).contiguous())


def _pad(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad dimension `dim`, if there is one, to the longest of all learners."""
    if -tensor.dim() <= dim < tensor.dim():
        longest = int(hvd.allreduce(torch.tensor([tensor.shape[dim]], device="cpu"), op=hvd.Max))
        widths = [0] * 2 * tensor.dim()  # before and after, of the last dimension first
        widths[2 * (-1 - dim % tensor.dim()) + (not pad_first)] = longest - tensor.shape[dim]
        tensor = torch.nn.functional.pad(tensor, widths, value=pad_index)
    return tensor
