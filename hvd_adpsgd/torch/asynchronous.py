"""Asynchronous operations over all learners, with Horovod's signatures.

With one super learner, or `process_set=hvd.super_learner`, Horovod runs these operations. Over several super
learners a thread runs them one after the other, in the order in which the script calls operations over all
learners, also blocking ones; this order must be the same on all learners. The script must not use the tensors
before `synchronize`, as in Horovod.
"""

import functools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec

import torch

from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.collectives.usage import Caller, counted, on_behalf, waiting
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.torch.collectives.broadcasts import broadcast, broadcast_
from hvd_adpsgd.torch.collectives.calls import or_inside
from hvd_adpsgd.torch.collectives.gathers import allgather, gather, grouped_allgather
from hvd_adpsgd.torch.collectives.reductions import (
    allreduce_,
    grouped_allreduce_,
    reduce,
    reduce_,
    reduction,
)
from hvd_adpsgd.training.async_mean import Mean
from hvd_adpsgd.training.devices import Stream, device_of
from hvd_adpsgd.training.inside import told

__all__ = [
    "allgather_async", "allreduce_async", "allreduce_async_", "broadcast_async", "broadcast_async_",
    "grouped_allgather_async", "grouped_allreduce_async", "grouped_allreduce_async_", "poll", "synchronize",
]  # fmt: skip

P = ParamSpec("P")
Tensors = Sequence[torch.Tensor]


class Handle(Future[Any]):
    """A handle of an asynchronous operation over several super learners; see `synchronize`."""

    def __init__(self, caller: Caller, collectives: Collectives):
        super().__init__()
        self.caller, self.collectives = caller, collectives

    def cancel(self) -> bool:
        """Return False: the operation cannot be cancelled, because the other learners wait for it."""
        return False


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation and return its result; a further call returns the same result.

    Raises:
        CollectiveMismatchError, PeerFailedError, ...: the error of the operation.
    """
    if isinstance(handle, Mean):
        return handle.wait()
    if not isinstance(handle, Handle):
        return told(horovod.synchronize)(handle)
    with waiting(handle.caller), handle.collectives.blocking():
        wait([handle])
    return handle.result()


def poll(handle: Any) -> bool:
    """Whether an asynchronous operation is complete, so that `synchronize` does not wait."""
    return handle.done() if isinstance(handle, Future) else bool(horovod.poll(handle))


def _as(waiting: Callable[P, Any]) -> Callable[[Callable[..., Any]], Callable[P, Any]]:
    """Begin what a function returns, which gets `waiting`'s tensors, in a list, and its other arguments."""

    def decorate(prepare: Callable[..., Callable[[], Any]]) -> Any:
        @functools.wraps(prepare)
        def begin(given: Any, *how: Any) -> Any:
            tensors = given if prepare.__name__.startswith("grouped") else [given]
            return _begin(prepare.__name__, tensors, prepare(tensors, *how[:-1]))

        return or_inside(begin, waiting)

    return decorate


@_as(allreduce_)
def allreduce_async(tensors: Tensors, *how: Any) -> Callable[[], Any]:
    """See hvd.allreduce; not differentiable. Returns a handle, whose result is a new tensor."""
    what = reduction("allreduce", *how)
    return lambda: reduce(tensors, what)[0]


@_as(allreduce_)
def allreduce_async_(tensors: Tensors, *how: Any) -> Callable[[], Any]:
    """See hvd.allreduce_. Returns a handle, whose result is `tensor`."""
    what = reduction("allreduce", *how)
    return lambda: reduce_(tensors, what)[0]


@_as(grouped_allreduce_)
def grouped_allreduce_async(tensors: Tensors, *how: Any) -> Callable[[], Any]:
    """See hvd.grouped_allreduce; not differentiable. Returns a handle, whose result is new tensors."""
    what = reduction("grouped_allreduce", *how)
    return lambda: reduce(tensors, what)


@_as(grouped_allreduce_)
def grouped_allreduce_async_(tensors: Tensors, *how: Any) -> Callable[[], Any]:
    """See hvd.grouped_allreduce_. Returns a handle, whose result is `tensors`."""
    what = reduction("grouped_allreduce", *how)
    return lambda: reduce_(tensors, what)


@_as(allgather)
def allgather_async(tensors: Tensors, name: str | None) -> Callable[[], Any]:
    """See hvd.allgather; not differentiable. Returns a handle, whose result is the gathered tensor."""
    return lambda: gather("allgather", name, tensors)[0].tensor


@_as(grouped_allgather)
def grouped_allgather_async(tensors: Tensors, name: str | None) -> Callable[[], Any]:
    """See hvd.grouped_allgather; not differentiable. Returns a handle, whose result is a list of tensors."""
    return lambda: [one.tensor for one in gather("grouped_allgather", name, tensors)]


@_as(broadcast)
def broadcast_async(tensors: Tensors, *root_and_name: Any) -> Callable[[], Any]:
    """See hvd.broadcast; not differentiable. Returns a handle, whose result is a new tensor."""
    output = tensors[0].detach().clone()
    return lambda: broadcast_(output, *root_and_name)


@_as(broadcast_)
def broadcast_async_(tensors: Tensors, *root_and_name: Any) -> Callable[[], Any]:
    """See hvd.broadcast_. Returns a handle, whose result is `tensor`."""
    return lambda: broadcast_(tensors[0], *root_and_name)


# No ThreadPoolExecutor: Python joins its threads at exit, so a learner that waits for a peer would not exit.

_asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def _begin(operation: str, tensors: Sequence[torch.Tensor], act: Callable[[], Any]) -> Handle:
    """Queue `act`, which runs one operation over all learners, for this module's thread; return a handle."""
    global _thread
    collectives = worlds.current().collectives
    with counted(operation) as caller:
        # on the script's thread, because averaging rounds that are run first may change the model
        collectives.prepare()
        streams = [device.current() for device in {device_of(tensor) for tensor in tensors}]
        with _starting:  # so that operations are queued in the order of their numbers
            handle, number = Handle(caller, collectives), collectives.lock.take()
            if _thread is None:
                _thread = threading.Thread(
                    target=_work, args=(_asked,), name="hvd_adpsgd", daemon=True
                )
                _thread.start()
            _asked.put(lambda: _run(collectives, number, handle, streams, act))
    return handle


def _work(asked: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        asked.get()()


def _forget_parents() -> None:
    """In a forked child, which lacks the thread: leave the parent its queued operations."""
    global _asked, _starting, _thread
    _asked, _starting, _thread = queue.SimpleQueue(), threading.Lock(), None


os.register_at_fork(after_in_child=_forget_parents)


def _run(
    collectives: Collectives,
    number: int,
    handle: Handle,
    streams: Sequence[Stream],
    act: Callable[[], Any],
) -> None:
    """Run `act` in the script's streams: after the work already submitted, before what uses the result."""
    result = None

    def operate() -> None:
        nonlocal result
        result = act()

    for stream in streams:
        operate = functools.partial(stream.enqueue, operate)
    try:
        with torch.no_grad(), collectives.lock.as_taken(number), on_behalf(handle.caller):
            operate()
    except BaseException as error:
        handle.set_exception(error)
    else:
        handle.set_result(result)
