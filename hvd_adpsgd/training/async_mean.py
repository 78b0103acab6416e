"""The mean of all models without waiting: each leader contributes its model between two of its own steps.

    the asking leader                 each other leader, two at a time: no more copies are under way
    ask (number, places)  ->
                          <-          at the end of a step, soon: model + pending corrections: step, arrays

A copy counts once all of it has arrived. So a leader that fails before is left out, nothing is repeated, and
the mean is exact over those named. New connections may lose messages: what has not arrived is asked again.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch

from hvd_adpsgd.collectives.topics import Topics
from hvd_adpsgd.errors import ConfigError, NonFiniteModelError, NotInitializedError, WorldError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.sharded import is_sharded, local, reshard

_TOPIC = "mean"
_AT_ONCE = 2  # leaders that are asked and have not answered
_REST_S = 0.01  # between two contributions of a learner that waits for a mean
_numbers = itertools.count()

Key = tuple[int, int]  # the rank of the leader that asks, and its number of the mean
Wants = list[tuple[int, Sequence[int]]]  # numbers of averagings, with the places of their tensors


class Mean(Future[Any]):
    """A mean on the leader that asks for it, and the handle of average_model_async.

    Args:
        missing: super_rank by rank of the leaders to ask.
        timeout_s: how long to wait for the answer of a leader.
        make: makes the result of the means of the tensors.
    """

    def __init__(self, missing: dict[int, int], timeout_s: float, make: Callable[[Any], Any]):
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled
        # by super_rank: the step after which its model was contributed, or why it was not
        self.steps: dict[int, int] = {}
        self.left_out: dict[int, str] = {}
        self._missing, self._timeout_s, self._make = missing, timeout_s, make
        self._sum: list[Any] = []
        self.asked: dict[int, float] = {}  # by rank, when its answer is due

    def wait(self) -> Any:
        """Return the result; this learner's models, at rest meanwhile, are contributed to others' means."""
        while not self.done():
            for averaging in live():
                averaging.at_boundary()
            wait([self], _REST_S)
        return self.result()

    def add(self, super_rank: int, step: int, arrays: Sequence[Any]) -> None:
        """Add a contribution to the sum, unless it is not finite."""
        if not all(np.isfinite(array).all() for array in arrays):
            self.left_out[super_rank] = "not finite"
            return
        self.steps[super_rank] = step
        self._sum = self._sum or [np.zeros(array.shape) for array in arrays]
        for total, array in zip(self._sum, arrays, strict=True):
            total += array

    def receive(self, rank: int, step: int, arrays: Sequence[Any]) -> None:
        """Take a leader's answer, unless it comes too late."""
        if self.asked.pop(rank, None) is not None:
            self.add(self._missing.pop(rank), step, arrays)

    def progress(self, living: Collection[int], now: float) -> list[int]:
        """Return the ranks to ask; set the result once no contribution is missing."""
        for rank in list(self._missing):
            if rank not in living or now > self.asked.get(rank, now):
                why = "late" if rank in living else "ended"
                self.left_out[self._missing.pop(rank)] = why
                self.asked.pop(rank, None)
        asks = [rank for rank in self._missing if rank not in self.asked]
        asks = asks[: _AT_ONCE - len(self.asked)]
        self.asked.update(dict.fromkeys(asks, now + self._timeout_s))
        if not self._missing and self.steps:
            self.set_result(self._make([total / len(self.steps) for total in self._sum]))
        elif not self._missing:
            what = f"average_model_async: no model is finite: {self.left_out}"
            self.set_exception(NonFiniteModelError(f"{what}. Load a checkpoint."))
        return asks


class Means:
    """The topic (see Topics) of means: those that this leader asks for, and its answers to others.

    `newcomers` grows with each replacement of the connections; `wake` is called when there are messages.
    """

    def __init__(self, newcomers: Sequence[object], wake: Callable[[], object]) -> None:
        self._own: dict[Key, tuple[Mean, Callable[[], Wants]]] = {}
        self._asked: dict[Key, Wants] = {}
        self._out: list[tuple[int, Any]] = []
        self._newcomers, self._meetings = newcomers, len(newcomers)
        self._wake, self._lock = wake, threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether a mean is under way here."""
        return bool(self._own or self._asked)

    def begin(self, key: Key, mean: Mean, ask: Callable[[], Wants]) -> None:
        """Ask for a mean; `ask` returns what is wanted: averagings have new numbers after a joining."""
        with self._lock:
            self._own[key] = mean, ask
        self._wake()

    def contribute(self, number: int, copied: Callable[[Wants], tuple[int, Any] | None]) -> None:
        """Copy what was asked for of the averaging `number`, which has ended a step, and of others."""
        if not self._asked:  # without the lock, which `talk` holds while it adds a model
            return
        with self._lock:
            for key, wants in list(self._asked.items()):
                if number in dict(wants) and (copy := copied(wants)) is not None:
                    self._out.append((key[0], (key, *copy)))
                    del self._asked[key]
        self._wake()

    def talk(self, living: set[int], received: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Take messages, and return those to send."""
        now = time.monotonic()
        with self._lock:
            if len(self._newcomers) > self._meetings:
                self._meetings = len(self._newcomers)
                for mean, _ in self._own.values():
                    mean.asked.clear()
            for rank, (key, *content) in received:
                if rank == key[0]:
                    self._asked[key] = content[0]
                    self._wake()
                elif key in self._own:
                    self._own[key][0].receive(rank, *content)
            for key, (mean, ask) in list(self._own.items()):
                self._out += [(rank, (key, ask())) for rank in mean.progress(living, now)]
                if mean.done():
                    del self._own[key]
            self._asked = {key: ask for key, ask in self._asked.items() if key[0] in living}
            out, self._out = self._out, []
            return [(rank, message) for rank, message in out if rank in living]

    def fail(self, error: Exception) -> None:
        """End the means with an error, which synchronize raises."""
        while self._own:
            self._own.popitem()[1][0].set_exception(error)


@torch.no_grad()
def contribution(averaging: Averaging, places: Sequence[int]) -> list[Any]:
    """Return copies of averaged tensors plus the pending corrections of exchanges, as arrays."""
    averaging.tensors.settle()
    tensors = [local(averaging.tensors.parameters.given[i]) for i in places]
    copies = [t.to("cpu", torch.promote_types(t.dtype, torch.float32), copy=True) for t in tensors]
    given = averaging.tensors.parameters.given
    averaging.tensors.add_pending({id(given[i]): c for i, c in zip(places, copies, strict=True)})
    return [each.numpy() for each in copies]


def contributions(wants: Wants) -> tuple[int, list[Any]] | None:
    """Return the step of the first averaging, and copies of all; None while that is not possible."""
    at_rest = {averaging.number: averaging for averaging in live() if averaging.is_at_rest}
    if not at_rest.keys() >= dict(wants).keys():
        return None
    copies = [contribution(at_rest[number], places) for number, places in wants]
    return at_rest[wants[0][0]].step, [array for each in copies for array in each]


def serve_means(averaging: Averaging) -> None:
    """Contribute a leader's model at the end of steps, where it is asked for."""
    world = averaging.world
    gives = world.is_leader or averaging.spec.is_sharded
    if not gives or averaging.plan.in_step is not None:
        return
    topics = world.collectives.topics
    if _TOPIC not in topics.by_name:
        topics.by_name[_TOPIC] = Means(world.collectives.newcomers, topics.wake)
        world.teardown.at_shutdown(functools.partial(_close, topics))
    means = topics.by_name[_TOPIC]

    def at_boundary() -> None:
        topics.serve()
        means.contribute(averaging.number, contributions)

    averaging.at_boundary = at_boundary


def _close(topics: Topics) -> None:
    what = "average_model_async: hvd.shutdown() came before its end. Call hvd.synchronize before."
    if (means := topics.remove(_TOPIC)) is not None:  # None: they were closed before
        means.fail(NotInitializedError(what))


def average_model_async(
    model: torch.nn.Module, *, buffers: bool = True, timeout: float | None = None
) -> Future[Any]:
    """Start averaging the super learners' models while all of them train on; return a handle.

        handle = hvd.average_model_async(model)  # on one leader, or several
        ...                                      # train, until hvd.poll(handle) is true
        state = hvd.synchronize(handle)          # a state dict in host memory
        handle.steps, handle.left_out            # by super_rank: steps of the models in it; why one is not

    Each leader contributes its model plus pending corrections, as they stand at the end of one of its steps:
    the mean is exact over these. No other learner waits, or calls anything: its step copies the model. One
    that is stopped, or waits elsewhere, delays the result until `timeout`, and is left out then. So are
    leaders that fail before all of their model has arrived, and models that are not finite. Tensors that the
    optimizer does not average have this learner's values. After `fully_shard` each learner asks for its part,
    which its counterparts contribute at steps of their own, and gets DTensors in host memory. Memory: here a
    sum in float64, and two copies.

    Args:
        model: the module, or a part of it, that wrapped optimizers train; call this between steps. Of
            several, each leader's step of the oldest is named.
        buffers: whether those given to DistributedOptimizer are averaged.
        timeout: seconds for which to wait for a leader's model; None: HVD_ADPSGD_FAILURE_TIMEOUT_S.

    Raises:
        ConfigError: for a wrong timeout; if no optimizer averages the model, or one that waits, or
            HVD_ADPSGD_SHARD cuts it.
        WorldError: on a learner that is no leader, inside `averaged`, or in a step of op=Adasum.
        NonFiniteModelError: in synchronize, if no model is finite.
    """
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise ConfigError(f"average_model_async(timeout={timeout!r}): give a number of seconds.")
    reshard(model)
    world, own = worlds.current(), model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
    if not (world.is_leader or any(map(is_sharded, tensors.values()))):
        raise WorldError(
            f"average_model_async: learner {world.rank} is not the leader of its super learner. Call it "
            "where hvd.is_leader() is true."
        )
    state = {**own, **{name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}}
    groups = enumerate(world.groups)
    others = {group[world.inner_rank]: i for i, group in groups if i != world.super_rank}
    timeout_s = world.config.failure_timeout_s if timeout is None else timeout
    if world.is_plain:
        (mean := Mean({}, timeout_s, list)).set_result(state)
        return mean
    averagings = _averagings_of(world, tensors.values())
    wanted = set(map(id, tensors.values() if buffers else model.parameters()))
    given = [averaging.tensors.parameters.given for averaging in averagings]
    places = [[place for place, t in enumerate(ts) if id(t) in wanted] for ts in given]
    averaged = [id(ts[place]) for ts, its in zip(given, places, strict=True) for place in its]

    def wants() -> Wants:
        return [(averaging.number, its) for averaging, its in zip(averagings, places, strict=True)]

    def make(means: list[Any]) -> dict[str, Any]:
        found = dict(zip(averaged, means, strict=True))
        for name, t in tensors.items():  # tied parameters have several names
            if id(t) in found:
                local(state[name]).copy_(torch.from_numpy(found[id(t)]))
        return state

    mean, key = Mean(others, timeout_s, make), (world.rank, next(_numbers))
    copies = contributions(wants())
    if copies is None:
        raise WorldError("average_model_async: op=Adasum is in a step. Call it after step().")
    mean.add(world.super_rank, *copies)
    world.collectives.topics.by_name[_TOPIC].begin(key, mean, wants)
    return mean


def _averagings_of(world: World, tensors: Iterable[torch.Tensor]) -> list[Averaging]:
    """Return the running Averaging of each optimizer of a model; off leaders, of parts of a model."""
    ids = set(map(id, tensors))
    given = [a for a in live() if world.is_leader or a.spec.is_sharded]
    averagings = [a for a in given if not ids.isdisjoint(map(id, a.tensors.parameters.given))]
    waiting = [a for a in averagings if a.plan.in_step is not None]
    sharded = [a for a in averagings if a.tensors.shards > 1]
    if not averagings or waiting or sharded:
        raise ConfigError(
            f"average_model_async: {len(averagings)} optimizers average this model, {len(waiting)} with a "
            f"strategy that waits, {len(sharded)} with HVD_ADPSGD_SHARD. Use hvd.averaged."
        )
    for averaging in averagings:
        averaging.require_running()
    return averagings
