"""What a wrapped optimizer owns: its tensors, its engine, and the order of things in a step."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_adpsgd import errors
from hvd_adpsgd import world as worlds
from hvd_adpsgd.engine import Engine, EngineOptions, exchange_metrics
from hvd_adpsgd.errors import (
    AdpsgdError,
    ModelMismatchError,
    NonFiniteModelError,
    NotInitializedError,
    StrategyMismatchError,
)
from hvd_adpsgd.metrics import Counters, Timeline
from hvd_adpsgd.together import allgather_object, mpi_failures, wait
from hvd_adpsgd.torch.parameters import Parameters, Wish, averaged_dtype

__all__ = ["Averaging", "agree", "average_model", "live", "metrics", "unanimous"]

T = TypeVar("T")

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
        wish: what to average, and how; agreed on.
    """

    def __init__(self, world: Any, wish: Wish):
        self.inner_size: int = world.inner_size
        self.parameters = Parameters()
        self.counters = Counters(time.monotonic)
        self.nonfinite_steps = 0
        self._config = wish.config
        self._world = world
        self._step = 0
        self._submitted = 0  # gradients handed to Horovod for the step under way
        self._published = False  # the leader has published for the step under way
        self._slot = _NO_SLOT  # where, once everybody may read it; until it is applied
        self._stopped = False
        self._timeline = _timeline(world)
        specs = unanimous(world, "averaging", lambda: self.parameters.add(wish.named))
        self.engine = _engine(world, wish)
        self.engine.extend(specs)
        self.engine.start()
        world.at_shutdown(self.stop)
        _live.append(self)

    # ---- the step, in order ----------------------------------------------------------------

    def begin_step(self, groups: Iterable[dict[str, Any]]) -> None:
        """Nothing may be done with a failed engine, nor with tensors that have changed.

        Args:
            groups: the optimizer's param_groups.
        """
        self._require_running()
        self.engine.check()
        self._require_known(groups)
        if self.inner_size == 1:
            self.parameters.check()

    def _require_running(self) -> None:
        if self._stopped:
            raise NotInitializedError(
                "hvd.shutdown() was called after this optimizer was wrapped. Call hvd.init() and "
                "wrap a new optimizer."
            )

    def _require_known(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ModelMismatchError if a parameter is trained now that was frozen when wrapped."""
        for i, group in enumerate(groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and p not in self.parameters:
                    raise ModelMismatchError(
                        f"parameter {j} of group {i}, shape {list(p.shape)}, is trained now and was "
                        "frozen (requires_grad=False) when the optimizer was wrapped, so nobody "
                        "averages it. Wrap first and freeze then, or wrap a new optimizer."
                    )

    def before_gradient(self, count: int, total: int) -> None:
        """`count` of the step's `total` gradients go to Horovod now.

        Before the last of them the leader publishes: whoever gets past this all-reduce may read
        the published slot.
        """
        if self._submitted == 0:
            self._require_running()
            self.parameters.check()
        self._submitted += count
        if self._submitted >= total:
            self._publish()

    def _publish(self) -> None:
        """Once per step; a step that the user skipped leaves its publication to the next."""
        if self._published:
            return
        if self.engine.is_leader:
            self.engine.publish(self._step)
        self._published = True

    def _count_published(self) -> None:
        """On every learner, once per publication, when all may read it."""
        if self._published and self._slot == _NO_SLOT:
            self._slot = self.engine.published()

    def synchronized(self, began: float, gradients: int) -> None:
        """The node's all-reduces that began at `began` are done."""
        self._count("inner_allreduce", began)
        self._submitted = 0
        if gradients:
            self.engine.reopen()
            self._count_published()

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
            self._publish()
            self._count_published()
        fit = self._absorb()
        self._count("collect", began)
        began = time.monotonic()
        self.engine.offer(self._step, fit)
        self._count("offer", began)
        self.counters.end_step()
        self._trace_engine()
        self._step += 1
        if not fit:
            self._nonfinite()

    def _absorb(self) -> bool:
        """Apply what was published, if anything was. True if every parameter is finite."""
        slot, self._slot, self._published = self._slot, _NO_SLOT, False
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
        """Average these tensors too, from the next step on. All learners of the node call it.

        Raises:
            ModelMismatchError: on every learner of the node, if they add different tensors.
        """
        named = list(named)
        told = allgather_object(self._world.inner, _described(named))
        for inner_rank, other in enumerate(told):
            if other != told[0]:
                raise ModelMismatchError(
                    "add_param_group: "
                    + _difference(told[0], other, f"inner learner {inner_rank}", "inner learner 0")
                )
        self.engine.extend(self.parameters.add(named))

    def settle(self) -> None:
        """Pause the engine and take in every correction. All learners call it together.

        It may come at any place of a step, also when that step's corrections are published but not
        yet applied.
        """
        self._require_running()
        self.parameters.check()
        self._meet_in_node()  # exchanges may be waiting for the slot that is held
        self._pause()
        self._world.together("average_model", lambda comm: wait(comm.Ibarrier()))
        if not self._pause():  # what was parked may have gone on meanwhile
            log.warning(
                "average_model: an exchange is still under way after %g s; what it brings later is "
                "not in the mean.",
                2 * self._config.deadline_s,
            )
        self._take_in()  # what is published for the step under way
        self._take_in()  # and what was merged after that

    def _pause(self) -> bool:
        return self.engine.pause(2 * self._config.deadline_s)

    def _meet_in_node(self) -> None:
        """All learners of the node are past the slot that is held."""
        wait(self._world.inner.Ibarrier())
        self.engine.reopen()

    def _take_in(self) -> None:
        self._publish()
        self._meet_in_node()
        self._count_published()
        self._absorb()

    def resume(self) -> None:
        """Refresh the mirror after the parameters were changed, and go on."""
        self.engine.absorb(self.parameters.addresses(), _NO_SLOT, self._step)
        self.engine.resume()

    def stop(self) -> None:
        """Leave the others; bounded. Called by hvd.shutdown()."""
        self._stopped = True
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


def unanimous(world: Any, doing: str, act: Callable[[], T]) -> T:
    """Act on every learner; what one of them cannot do fails on all, and nobody waits for it.

    Raises:
        AdpsgdError: a learner's own, or one of the same class that names the learner.
    """
    result, error = None, None
    try:
        result = act()
    except AdpsgdError as mine:
        error = mine
    told = (type(error).__name__, str(error)) if error else None
    everybody = world.together(doing, lambda comm: allgather_object(comm, told))
    if error is not None:
        raise error
    for rank, other in zip(world.ranks, everybody, strict=True):
        if other is not None:
            raise getattr(errors, other[0])(f"learner {rank}: {other[1]}")
    return result  # type: ignore[return-value]


def agree(world: Any, wish: Callable[[], Wish]) -> Wish:
    """The wish of this learner, if it is equal on all learners in what must be.

    Raises:
        ModelMismatchError, StrategyMismatchError: on every learner alike.
        AdpsgdError: on every learner, if a learner's wish cannot be.
    """
    doing = "hvd.DistributedOptimizer"
    mine = unanimous(world, doing, wish)
    settings = _settings(mine)
    everybody = world.together(doing, lambda comm: allgather_object(comm, settings))
    for rank, other in zip(world.ranks, everybody, strict=True):
        if other != everybody[0]:
            raise StrategyMismatchError(
                f"averaging differs: learner {world.ranks[0]} has {everybody[0]}; learner {rank} "
                f"has {other}. Use the same on all learners (averaging=, or HVD_ADPSGD_AVERAGING)."
            )
    _require_same(world, doing, _described(mine.named))
    return mine


def _require_same(world: Any, doing: str, tensors: list[str]) -> None:
    """Raise ModelMismatchError on every learner if the descriptions differ on one."""
    everybody = world.together(doing, lambda comm: allgather_object(comm, tensors))
    for rank, other in zip(world.ranks, everybody, strict=True):
        if other != everybody[0]:
            first = f"learner {world.ranks[0]}"
            raise ModelMismatchError(
                f"{doing}: " + _difference(everybody[0], other, f"learner {rank}", first)
            )


def _settings(wish: Wish) -> str:
    return (
        f"{wish.strategy.spec()}, wire_dtype={wish.config.wire_dtype}, "
        f"chunk_kib={wish.config.chunk_kib}"
    )


def _described(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{name} {averaged_dtype(t)}{list(t.shape)}" for name, t in named]


def _difference(mine: list[str], other: list[str], who: str, first: str) -> str:
    """Which tensor differs, and where."""
    for i, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            return (
                f"models differ at tensor {i}: {first} has {a}, {who} has {b}. Build the same "
                "model with the same names on every learner."
            )
    i = min(len(mine), len(other))
    longer, extra = (first, mine[i]) if len(mine) > len(other) else (who, other[i])
    return (
        f"models differ: {first} averages {len(mine)} tensors, {who} {len(other)}; {extra} is "
        f"only on {longer}. Build the same model on every learner."
    )


def _engine(world: Any, wish: Wish) -> Engine:
    """An engine with a communicator of its own; not yet started."""
    outer = None
    if world.is_leader:
        from mpi4py import MPI

        with mpi_failures("averaging"):
            outer = world.outer.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
    return Engine(
        inner=world.inner,
        outer=outer,
        plan=wish.strategy.plan(world.super_rank, world.super_size),
        options=EngineOptions.from_config(wish.config),
        names=_leader_names(world),
    )


def _leader_names(world: Any) -> list[str]:
    """What to call each super learner in messages."""
    told = (world.super_rank, f"{world.hostname}, learner {world.rank}")
    everybody = world.together("averaging", lambda comm: allgather_object(comm, told))
    leaders = dict(reversed(everybody))
    return [leaders[i] for i in range(world.super_size)]


# ---- the timeline of the process -----------------------------------------------------------------

_shared_timeline: Timeline | None = None


def _timeline(world: Any) -> Timeline | None:
    """The timeline of HVD_ADPSGD_TIMELINE, opened once per job; None without it."""
    global _shared_timeline
    path = world.config.timeline
    if path is None or _shared_timeline is not None:
        return _shared_timeline
    offset = time.time() - time.monotonic()  # hosts share the wall clock only
    starts = world.together("timeline", lambda comm: allgather_object(comm, time.time()))
    label = f"learner {world.rank} (super learner {world.super_rank}, {world.hostname})"

    def open_it(create: bool) -> Timeline:
        return Timeline(
            path,
            rank=world.rank,
            clock=time.monotonic,
            origin_s=starts[0] - offset,
            create=create,
            label=label,
        )

    first = world.rank == 0
    created = unanimous(world, "timeline", lambda: open_it(True) if first else None)
    _shared_timeline = unanimous(world, "timeline", lambda: created or open_it(False))
    world.at_shutdown(functools.partial(_close_timeline, world.comm))
    return _shared_timeline


def _close_timeline(comm: Any) -> None:
    """Learner 0 closes last, and ends the file only if the others have written theirs by then."""
    global _shared_timeline
    timeline, _shared_timeline = _shared_timeline, None
    if timeline is None:
        return
    if timeline.rank > 0:
        timeline.close()
    met = worlds._meet(comm, time.monotonic() + 5.0)
    timeline.close(final=met)


# ---- for the user --------------------------------------------------------------------------------


def metrics() -> dict[str, Any]:
    """Numbers of this learner since the optimizer was wrapped.

    Always: steps, steps_per_s, and the seconds of step() by part: inner_allreduce_s (waiting for the
    node's gradients), optimizer_s (the user's), collect_s (corrections in, model into the mirror),
    offer_s (handing it over), each with a moving average `*_ema_s`; nonfinite_steps.

    Of the engine, so 0 or NaN on learners that do not lead: exchanges (active + passive), refused
    and declined questions, parked partners, bytes_sent and bytes_received, staleness (chunks by age
    in steps, 0 to 63 and more) and staleness_mean, consensus_distance (estimated from the exchanges
    since the last call; NaN if no element was compared yet), partners (exchanges with each),
    engine_cpu_s.

    Returns:
        The numbers; with several wrapped optimizers those of the first, and all in "optimizers".
        All 0 or NaN if nothing is averaged between super learners.
    """
    every = [averaging.metrics() for averaging in _live]
    if not every:
        nothing = Counters(time.monotonic).to_dict()
        return {**nothing, "nonfinite_steps": 0, **exchange_metrics(None)}
    if len(every) < 2:
        return every[0]
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

    Raises:
        ModelMismatchError: on every learner, if their models differ.
    """
    world = worlds.current()
    if world.super_size == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    _require_same(world, "average_model", _described(named))
    tensors = [tensor for _, tensor in named]
    concerned = [a for a in _live if any(t in a.parameters for t in tensors)]
    for averaging in concerned:
        averaging.settle()
    _become_means(world, [t for t in tensors if t.is_floating_point()])
    for averaging in concerned:
        averaging.resume()


def _become_means(world: Any, tensors: list[torch.Tensor]) -> None:
    """Each tensor becomes its mean over the leaders, in its precision or float32 if it has less."""
    hosts = [
        t.detach().to("cpu", torch.float64 if t.dtype == torch.float64 else torch.float32)
        for t in tensors
    ]

    def operation(comm: Any) -> list[NDArray[Any]]:
        leaders = sum(allgather_object(comm, world.is_leader))
        return [_mean(comm, world.is_leader, leaders, h.contiguous().numpy()) for h in hosts]

    for tensor, mean in zip(tensors, world.together("average_model", operation), strict=True):
        tensor.data.copy_(torch.from_numpy(mean))


def _mean(comm: Any, is_leader: bool, leaders: int, mine: NDArray[Any]) -> NDArray[Any]:
    """Mean over the leaders, as a difference to one learner's values: equal models stay as they are."""
    reference = mine.copy()
    wait(comm.Ibcast(reference, root=0))
    difference = mine - reference if is_leader else np.zeros_like(mine)
    total = np.empty_like(mine)
    wait(comm.Iallreduce(difference, total))
    return np.asarray(reference + total / leaders)
