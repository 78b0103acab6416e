"""What a wrapped optimizer owns: its tensors, its engine, and the order of things in a step."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from hvd_adpsgd import world as worlds
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine import Engine, EngineOptions
from hvd_adpsgd.errors import ModelMismatchError, NonFiniteModelError, StrategyMismatchError
from hvd_adpsgd.layout import TensorSpec
from hvd_adpsgd.metrics import Counters, Timeline
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.torch.parameters import Parameters

__all__ = ["Averaging", "average_model", "live", "metrics"]

log = logging.getLogger("hvd_adpsgd")

_live: list[Averaging] = []
_EVENT_NAMES = ("exchange (asked)", "exchange (answered)", "merge", "parked")
_NO_SLOT = -1


def live() -> list[Averaging]:
    """The averagings that are running, oldest first."""
    return _live


class Averaging:
    """Averages the tensors of one optimizer between super learners. Made by all learners together.

    Args:
        world: the worlds of this learner.
        strategy: whom to ask, with which weight.
        config: knobs, those of this optimizer already in.
        named: (name, tensor) of everything to average.
    """

    def __init__(
        self,
        world: Any,
        strategy: Strategy,
        config: Config,
        named: Iterable[tuple[str, torch.Tensor]],
    ):
        self.inner_size: int = world.inner_size
        self.parameters = Parameters()
        self.counters = Counters(time.monotonic)
        self.nonfinite_steps = 0
        self._config = config
        self._world = world
        self._step = 0
        self._submitted = 0  # gradients handed to Horovod for the step under way
        self._slot = _NO_SLOT  # published for this step and not yet applied
        specs = self.parameters.add(named)
        names = _agree(world, strategy, config, specs)
        self.engine = _engine(world, strategy, config, names)
        self.engine.extend(specs)
        self._timeline = _timeline(world)
        self.engine.start()
        world.at_shutdown(self.stop)
        _live.append(self)

    # ---- the step, in order ----------------------------------------------------------------

    def begin_step(self) -> None:
        """Nothing may be done with a failed engine."""
        self.engine.check()

    def before_gradient(self, count: int, total: int) -> None:
        """`count` of the step's `total` gradients go to Horovod now.

        Before the last of them the leader publishes: whoever gets past this all-reduce may read
        the published slot.
        """
        self._submitted += count
        if self._submitted >= total and self.engine.is_leader and self._slot == _NO_SLOT:
            self.engine.publish(self._step)

    def synchronized(self, began: float, gradients: int) -> None:
        """The node's all-reduces that began at `began` are done."""
        self._count("inner_allreduce", began)
        self._submitted = 0
        if gradients and self._slot == _NO_SLOT:
            self._slot = self.engine.published()

    def count_optimizer(self, began: float) -> None:
        self._count("optimizer", began)

    def finish_step(self) -> None:
        """Take the published corrections in and offer the model.

        Raises:
            NonFiniteModelError: if a parameter is infinite or not a number, and the configuration
                says "raise". The model was not offered.
        """
        began = time.monotonic()
        if self.inner_size == 1:
            self.engine.publish(self._step)
            self._slot = self.engine.published()
        fit = self._absorb(self._slot)
        self._slot = _NO_SLOT
        self._count("collect", began)
        began = time.monotonic()
        self.engine.offer(self._step, fit)
        self._count("offer", began)
        self.counters.end_step()
        self._trace_engine()
        self._step += 1
        if not fit:
            self._nonfinite()

    def _absorb(self, slot: int) -> bool:
        fit = self.engine.absorb(self.parameters.addresses(), slot, self._step)
        if slot != _NO_SLOT and self.engine.corrections(slot):
            self.parameters.write_back()
        return fit

    def _nonfinite(self) -> None:
        self.nonfinite_steps += 1
        where = ", ".join(self._nonfinite_names()[:3])
        message = (
            f"step {self._step - 1}: the model of super learner {self._world.super_rank} holds NaN "
            f"or Inf ({where}); it is not offered to the others. Lower the learning rate or clip "
            "gradients; HVD_ADPSGD_NONFINITE=stay_out trains on alone until the model is finite."
        )
        if self._config.nonfinite == "raise":
            raise NonFiniteModelError(message)
        if self.nonfinite_steps == 1:
            log.warning("%s", message)

    def _nonfinite_names(self) -> list[str]:
        pairs = zip(self.parameters.names, self.parameters.tensors, strict=True)
        return [name for name, tensor in pairs if not torch.isfinite(tensor).all()]

    # ---- beside the step ---------------------------------------------------------------------

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Average these tensors too, from the next step on."""
        self.engine.extend(self.parameters.add(named))

    def settle(self) -> None:
        """Pause the engine and take in every correction. All learners call it together."""
        self.engine.pause(2 * self._config.deadline_s)
        worlds.wait(self._world.comm.Ibarrier())
        if self._slot == _NO_SLOT:
            if self.engine.is_leader:
                self.engine.publish(self._step)
            worlds.wait(self._world.inner.Ibarrier())
            self._slot = self.engine.published()
        self._absorb(self._slot)
        self._slot = _NO_SLOT

    def resume(self) -> None:
        """Refresh the mirror after the parameters were changed, and go on."""
        self.engine.absorb(self.parameters.addresses(), _NO_SLOT, self._step)
        self.engine.resume()

    def stop(self) -> None:
        """Leave the others; bounded. Called by hvd.shutdown()."""
        if self in _live:
            _live.remove(self)
        self.engine.stop()
        self._trace_engine()

    def metrics(self) -> dict[str, Any]:
        """See hvd_adpsgd.torch.metrics."""
        return {
            **self.counters.to_dict(),
            "nonfinite_steps": self.nonfinite_steps,
            **self.engine.metrics(),
        }

    # ---- numbers -----------------------------------------------------------------------------

    def _count(self, part: str, began: float) -> None:
        ended = time.monotonic()
        self.counters.add(part, ended - began)
        if self._timeline is not None:
            self._timeline.complete(part, "trainer", began, ended, step=self._step)

    def _trace_engine(self) -> None:
        if self._timeline is None:
            return
        for kind, partner, began, ended, nbytes, step in self.engine.take_events():
            name = _EVENT_NAMES[kind]
            self._timeline.complete(
                name, "engine", began, ended, partner=partner, bytes=nbytes, step=step
            )


# ---- set-up ----------------------------------------------------------------------------------


def _agree(world: Any, strategy: Strategy, config: Config, specs: list[TensorSpec]) -> list[str]:
    """Compare what must be equal on all learners. Returns the names of the super learners.

    Raises:
        ModelMismatchError, StrategyMismatchError: on every learner alike.
    """
    mine = {
        "super_rank": world.super_rank,
        "name": f"{world.hostname}, learner {world.rank}",
        "settings": f"{strategy.spec()}, wire_dtype={config.wire_dtype}, "
        f"chunk_kib={config.chunk_kib}",
        "tensors": [str(spec) for spec in specs],
    }
    everybody = world.comm.allgather(mine)
    for rank, other in enumerate(everybody):
        if other["settings"] != everybody[0]["settings"]:
            raise StrategyMismatchError(
                f"averaging differs: learner 0 has {everybody[0]['settings']}; learner {rank} has "
                f"{other['settings']}. Use the same on all learners."
            )
        if other["tensors"] != everybody[0]["tensors"]:
            raise ModelMismatchError(
                _difference(everybody[0]["tensors"], other["tensors"], rank, other["name"])
            )
    leaders = {entry["super_rank"]: entry["name"] for entry in reversed(everybody)}
    return [leaders[i] for i in range(world.super_size)]


def _difference(first: list[str], other: list[str], rank: int, name: str) -> str:
    """Which tensor differs, and where."""
    for i, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return (
                f"models differ at tensor {i}: learner 0 has {a}, learner {rank} ({name}) has {b}. "
                "Build the same model with the same names on every learner."
            )
    i = min(len(first), len(other))
    longer, extra = (0, first[i]) if len(first) > len(other) else (rank, other[i])
    return (
        f"models differ: learner 0 averages {len(first)} tensors, learner {rank} ({name}) "
        f"{len(other)}; {extra} is only on learner {longer}. Build the same model on every learner."
    )


def _engine(world: Any, strategy: Strategy, config: Config, names: list[str]) -> Engine:
    """An engine with a communicator of its own; not yet started."""
    outer = None
    if world.is_leader:
        from mpi4py import MPI

        outer = world.outer.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
    return Engine(
        inner=world.inner,
        outer=outer,
        plan=strategy.plan(world.super_rank, world.super_size),
        options=EngineOptions.from_config(config),
        names=names,
    )


# ---- the timeline of the process -----------------------------------------------------------------

_shared_timeline: Timeline | None = None


def _timeline(world: Any) -> Timeline | None:
    """The timeline of HVD_ADPSGD_TIMELINE, opened once per job; None without it."""
    global _shared_timeline
    path = world.config.timeline
    if path is None or _shared_timeline is not None:
        return _shared_timeline
    offset = time.time() - time.monotonic()  # hosts share the wall clock only
    origin = world.comm.bcast(time.time())

    def open_it(create: bool) -> Timeline:
        label = f"learner {world.rank} (super learner {world.super_rank}, {world.hostname})"
        return Timeline(
            path,
            rank=world.rank,
            clock=time.monotonic,
            origin_s=origin - offset,
            create=create,
            label=label,
        )

    if world.rank == 0:
        _shared_timeline = open_it(True)
    world.comm.Barrier()
    if world.rank > 0:
        _shared_timeline = open_it(False)
    world.at_shutdown(functools.partial(_close_timeline, world.comm))
    return _shared_timeline


def _close_timeline(comm: Any) -> None:
    """Learner 0 closes last, when the others have written theirs or 5 s have passed."""
    global _shared_timeline
    timeline, _shared_timeline = _shared_timeline, None
    if timeline is None:
        return
    if timeline.rank > 0:
        timeline.close()
    worlds._meet(comm, time.monotonic() + 5.0)
    timeline.close(final=True)


# ---- for the user --------------------------------------------------------------------------------


def metrics() -> dict[str, Any]:
    """Numbers of this learner since the optimizer was wrapped.

    Always: steps, steps_per_s, and the seconds of step() by part: inner_allreduce_s (waiting for the
    node's gradients), optimizer_s (the user's), collect_s (corrections in, model into the mirror),
    offer_s (handing it over), each with a moving average `*_ema_s`; nonfinite_steps.

    On leaders also: exchanges (active + passive), refused and declined questions, parked partners,
    bytes_sent and bytes_received, staleness (chunks by age in steps, 0 to 63 and more) and
    staleness_mean, consensus_distance (estimated from the exchanges since the last call; NaN before
    the first exchange), partners (exchanges with each), engine_cpu_s.

    Returns:
        The numbers; with several wrapped optimizers those of the first, and all in "optimizers".
        {} if nothing is averaged between super learners.
    """
    every = [averaging.metrics() for averaging in _live]
    if len(every) < 2:
        return every[0] if every else {}
    return {**every[0], "optimizers": every}


@torch.no_grad()
def average_model(model: torch.nn.Module) -> None:
    """Make the model the exact mean over super learners, in place; all learners call it together.

    Parameters and floating-point buffers become the mean of the leaders' values. If the model is
    being averaged by an optimizer, its engine first finishes what runs, and pending corrections are
    taken in, so that nothing is lost. Waits for the slowest super learner: use it for evaluation
    and for the final checkpoint.

    Args:
        model: the same module on every learner.
    """
    world = worlds.current()
    if world.super_size == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    concerned = [a for a in _live if any(p in a.parameters for p in tensors.values())]
    for averaging in concerned:
        averaging.settle()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            _become_mean(world, tensor)
    for averaging in concerned:
        averaging.resume()


def _become_mean(world: Any, tensor: torch.Tensor) -> None:
    """Mean over the leaders, in the tensor's precision or float32 if it has less."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    host = tensor.detach().to("cpu", wide).contiguous().view(-1).numpy()
    mine = host if world.is_leader else np.zeros_like(host)
    total = np.empty_like(host)
    worlds.wait(world.comm.Iallreduce(mine, total))
    mean = torch.from_numpy(total / world.super_size)
    tensor.data.copy_(mean.view(tensor.shape))
