"""The tensors that an optimizer averages; the engine reads and corrects them in place, or through copies.

Exactness. Corrections, and the sum of a mean of all, are float64 for float64 parameters and float32 for all
others. With a 16-bit wire both sides of an exchange use the rounded snapshots. What rounding to 16 bits holds
back is neither in checkpoints nor in the model of a joining super learner, and `average_model` drops it.
`average_model` and `averaging_paused` first finish the round and absorb what is pending. Buffers get the
plain mean. A parameter that is frozen during a run is averaged.

A chunk with a number above half of the largest of its type takes no part in means of all, and is named; a sum
of corrections can overflow there (`NonFiniteModelError`).

Second models. A2CiD2 keeps the mean of its two models exactly, not that of the first one; both become
(x + xt) / 2. GASLoC keeps the mean of its models where both sides of each exchange have ended equally many
blocks since.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shard_memory import ModelMemory
from hvd_adpsgd.errors import ModelMismatchError
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.consistency import require_same_inside, unanimous
from hvd_adpsgd.training.parameters import AveragingSpec, Parameters
from hvd_adpsgd.training.sharded import require_not_replaced
from hvd_adpsgd.training.staging import PIECE_NBYTES, Staging
from hvd_adpsgd.training.supported import require_no_ddp

log = logging.getLogger("hvd_adpsgd")

Named = Iterable[tuple[str, torch.Tensor]]


class AveragedTensors:
    """The averaged tensors of one optimizer, and the engine's memory for them. Made by all learners together.

    Args:
        world: the World of this learner.
        spec: what the user wants averaged.
        averaged: (name, tensor) pairs that the strategy averages in place of those that the optimizer trains.
        rare: returns those of them that are in one of spec.config.period_of_moments exchanges only.

    Attributes:
        world: see the arguments.
        shards: number of shards of the model; 1: the leader averages all of it.
        are_sharded: whether each learner holds, and averages, a part of every tensor.
        trained: ids of the tensors that the user wants averaged.
        parameters: the averaged tensors.
        specs: name, shape and dtype of each averaged tensor, a list per call that added tensors.
        memory: the engine's memory, after `bind`.
    """

    memory: ModelMemory

    def __init__(
        self,
        world: World,
        spec: AveragingSpec,
        averaged: list[tuple[str, torch.Tensor]],
        rare: Callable[[], list[torch.Tensor]],
    ):
        self.world, self.shards = world, _shards(world, spec)
        self.are_sharded = spec.is_sharded
        self.trained = {id(tensor) for _, tensor in spec.named}
        self.parameters = Parameters()
        self._rare, self._period = rare, spec.config.period_of_moments
        named = averaged + spec.buffers
        self.specs = [unanimous(world, "averaging", lambda: self._added(named))]
        self._unseen: AveragingSpec | None = spec  # until the first step has looked at the model
        # for parameters on devices: a Staging per shard, which copies to and from the engine; that of the own
        # shard last, as it checks for NaN after all corrections are applied
        self._stagings: list[Staging] = []

    @property
    def are_staged(self) -> bool:
        """Whether a tensor is on a GPU, so that all tensors are copied to and from the engine's memory."""
        return bool(self._stagings)

    def add(self, named: Named) -> None:
        """Average tensors `named`, too, from the next step on; all learners of the super learner call this.

        Raises:
            ModelMismatchError: on every learner of the super learner, if learners add different tensors.
        """
        named = list(named)
        require_same_inside(self.world, "add_param_group", named)
        self.settle()
        self.specs.append(self._added(named))
        self.memory.extend(self.specs[-1])
        self.bind(self.memory)
        self.trained.update(id(tensor) for _, tensor in named)

    def _added(self, named: list[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
        """Add tensors to `parameters`; return the specs of the added ones."""
        return self.parameters.add(named, dict.fromkeys(map(id, self._rare()), self._period))

    def require_known(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ModelMismatchError if a trained parameter in `groups` is not averaged, or DDP averages it.

        The first call also raises it if fully_shard has replaced one.
        """
        known = self.trained
        for i, group in enumerate(groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and id(p) not in known:
                    raise ModelMismatchError(
                        f"parameter {j} of group {i}, shape {list(p.shape)}, is trained and not averaged: "
                        "when the optimizer was wrapped it was frozen (requires_grad=False) or not in the "
                        "group. Wrap first and freeze then, add it by add_param_group, or wrap a new "
                        "optimizer."
                    )
        if self._unseen is None:
            return
        require_not_replaced(self._unseen.trained)
        if self._unseen.averages_gradients:  # frameworks put DDP around the model late
            require_no_ddp({p for group in groups for p in group["params"]})
        self._unseen = None

    def bind(self, memory: ModelMemory) -> None:
        """Use `memory` as the engine's: parameters on devices are copied to and from `memory` from now on."""
        self.memory = memory
        if self.parameters.staged:
            own = min(self.world.inner_rank, self.shards - 1)
            numbers = [*(i for i in range(self.shards) if i != own), own]
            self._stagings = self._stagings or [
                Staging(piece_nbytes=PIECE_NBYTES // self.shards, checks=number == own)
                for number in numbers
            ]
            for number, staging in zip(numbers, self._stagings, strict=True):
                staging.bind(memory.shards[number], self.parameters.tensors)

    def release(self) -> None:
        """Stop copies between devices and the engine's memory, until `bind` sets another memory."""
        for staging in self._stagings:
            staging.release()

    def close(self) -> None:
        """End copies between devices and the engine's memory for good: that memory is freed next."""
        for staging in self._stagings:
            staging.close()

    def copied(self) -> tuple[int, int]:
        """Return how many bytes have been copied from devices to the host, and to devices."""
        down = sum(staging.down_nbytes for staging in self._stagings)
        return down, sum(staging.up_nbytes for staging in self._stagings)

    def before_update(self) -> None:
        """Let devices, not the host, wait for copies of the parameters, which the optimizer changes next."""
        for staging in self._stagings:
            staging.before_update()

    def settle(self) -> None:
        """Wait until devices have added corrections to the parameters and copied these to the engine."""
        for staging in self._stagings:
            staging.settle()

    def absorb(
        self, engine: Engine, step: int, waits: bool = True, whole: bool = True
    ) -> int | None:
        """Add corrections from exchanges, if any, to the tensors; copy the tensors to the engine (mirror).

        Args:
            engine: the engine whose memory is bound.
            step: number of the trainer's step.
            waits: whether to wait until devices have added and copied. Else the engine offers the model to
                peers when its copy is complete.
            whole: see ShardMemory.absorb.

        Returns:
            The last step whose parameters were found not to be finite; None if all are finite. Without
            `waits`, only steps whose check the devices have finished count.
        """
        if not self._stagings:
            return self._absorb_in_place(engine, step, whole)
        *others, own = self._stagings
        if waits:
            self.settle()
        for staging in others:
            staging.absorb(step, False)
        if waits:
            own.absorb(step, True)
            self.settle()
            found = own.nonfinite()
        else:
            wants = engine.wants_copy(step)
            own.absorb(step, wants, engine.offer, whole, engine.mark_next)
            found = own.nonfinite(step if self.world.inner_size > 1 else None)
        return max(found, default=None)

    def _absorb_in_place(self, engine: Engine, step: int, whole: bool) -> int | None:
        threads, mark = pass_threads(self.world.local_size), engine.mark_next
        addresses = self.parameters.addresses()
        finite, corrected = self.memory.absorb(addresses, step, threads, whole, mark)
        if corrected:
            self.parameters.write_back()
        return None if finite else step

    def add_pending(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Add to copies of the tensors the corrections from exchanges that the tensors lack. Leaders only.

        Args:
            copies: by id of the averaged tensor, a copy of what this learner holds of it: contiguous, on the
                host, float64 for float64 tensors, else float32.
        """
        places = [copies[id(t)].data_ptr() if id(t) in copies else 0 for t in self.parameters.given]
        self.memory.own.add_pending(np.array(places, dtype=np.uintp))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drop the 16-bit rounding errors of `tensors`, which average_model has overwritten with the mean."""
        replaced = {id(tensor) for tensor in tensors}
        mine = enumerate(self.parameters.given)
        self.memory.forget([i for i, tensor in mine if id(tensor) in replaced])


def pass_threads(learners: int) -> int:
    """Return the number of threads with which this learner adds corrections to its model.

    As many as torch has, but no more than this learner's share of the host's cores: without OMP_NUM_THREADS
    torch has one thread per core in every learner.
    """
    share = (os.cpu_count() or 1) // learners
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)), share))


def _shards(world: World, spec: AveragingSpec) -> int:
    """Return the number of shards of the model, equal on all learners; log it with HVD_ADPSGD_SHARD."""
    if spec.config.shard is None:
        return 1
    why = ""
    if not spec.strategy.is_gossip:
        why = f"averaging={spec.strategy.spec()} is more than gossip"
    elif spec.is_sharded:
        why = "each learner holds a part of the model"
    elif spec.buffers:
        why = "buffers= are those of the leader"
    elif world.shards == 1:
        why = "one super learner, or one learner in a super learner"
    if world.rank == 0:
        sizes = sorted({len(group) for group in world.groups})
        log.info(
            "HVD_ADPSGD_SHARD: %s (learners per super learner: %s).",
            f"no shards, {why}" if why else f"{world.shards} shards",
            ", ".join(map(str, sizes)),
        )
    return 1 if why else world.shards
