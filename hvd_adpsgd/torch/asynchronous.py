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
from typing import Any

import torch

from hvd_adpsgd.collectives.collectives import Collectives
from hvd_adpsgd.collectives.usage import Caller, counted, on_behalf, waiting
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.torch.basics import global_process_set, inner_process_set
from hvd_adpsgd.torch.collectives.broadcasts import broadcast_all
from hvd_adpsgd.torch.collectives.calls import require_tensors
from hvd_adpsgd.torch.collectives.gathers import gather
from hvd_adpsgd.torch.collectives.reductions import Reduction, reduce, reduce_, reduction
from hvd_adpsgd.training.devices import Stream, device_of
from hvd_adpsgd.training.inside import told


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
    if not isinstance(handle, Handle):
        return told(horovod.synchronize)(handle)
    with waiting(handle.caller), handle.collectives.blocking():
        wait([handle])
    return handle.result()


def poll(handle: Any) -> bool:
    """Whether an asynchronous operation is complete, so that `synchronize` does not wait."""
    return handle.done() if isinstance(handle, Handle) else bool(horovod.poll(handle))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """See hvd.allreduce; not differentiable. Returns a handle, whose result is a new tensor."""
    how = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce("allreduce_async", tensor, how, lambda what: reduce([tensor], what)[0])


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """See hvd.allreduce_. Returns a handle, whose result is `tensor`."""
    how = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce("allreduce_async_", tensor, how, lambda what: reduce_([tensor], what)[0])


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """See hvd.grouped_allreduce; not differentiable. Returns a handle, whose result is new tensors."""
    how = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce("grouped_allreduce_async", tensors, how, lambda what: reduce(tensors, what))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """See hvd.grouped_allreduce_. Returns a handle, whose result is `tensors`."""
    how = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce("grouped_allreduce_async_", tensors, how, lambda what: reduce_(tensors, what))


def _allreduce(
    operation: str, given: Any, how: tuple[Any, ...], act: Callable[[Reduction], Any]
) -> Any:
    """Begin an asynchronous allreduce: Horovod's inside a super learner, else `act` on this module's thread.

    Args:
        operation: name of the function that the script calls.
        given: a tensor, or the list of tensors of a grouped operation.
        how: the further arguments of the call.
        act: reduces the tensors over all learners; called with a Reduction.

    Returns:
        A handle for `synchronize`.
    """
    *arguments, process_set = how
    inner = inner_process_set(process_set, operation)
    if inner is not None:
        return told(getattr(horovod, operation))(given, *arguments, inner)
    is_group = operation.startswith("grouped")
    require_tensors(operation, given if is_group else [given])
    reduced = reduction("grouped_allreduce" if is_group else "allreduce", *arguments)
    return _begin(operation, given if is_group else [given], lambda: act(reduced))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """See hvd.allgather; not differentiable. Returns a handle, whose result is the gathered tensor."""
    inner = inner_process_set(process_set, "allgather_async")
    if inner is not None:
        return told(horovod.allgather_async)(tensor, name, inner)
    require_tensors("allgather_async", [tensor])
    return _begin(
        "allgather_async", [tensor], lambda: gather("allgather", name, [tensor])[0].tensor
    )


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """See hvd.grouped_allgather; not differentiable. Returns a handle, whose result is a list of tensors."""
    inner = inner_process_set(process_set, "grouped_allgather_async")
    if inner is not None:
        return told(horovod.grouped_allgather_async)(tensors, name, inner)
    require_tensors("grouped_allgather_async", tensors)
    return _begin(
        "grouped_allgather_async",
        tensors,
        lambda: [one.tensor for one in gather("grouped_allgather", name, tensors)],
    )


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int | None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """See hvd.broadcast; not differentiable. Returns a handle, whose result is a new tensor."""
    inner = inner_process_set(process_set, "broadcast_async")
    if inner is not None:
        return told(horovod.broadcast_async)(tensor, root_rank or 0, name, inner)
    require_tensors("broadcast_async", [tensor])
    output = tensor.detach().clone()
    return _begin("broadcast_async", [output], lambda: _broadcast(output, root_rank, name))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int | None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """See hvd.broadcast_. Returns a handle, whose result is `tensor`."""
    inner = inner_process_set(process_set, "broadcast_async_")
    if inner is not None:
        return told(horovod.broadcast_async_)(tensor, root_rank or 0, name, inner)
    require_tensors("broadcast_async_", [tensor])
    return _begin("broadcast_async_", [tensor], lambda: _broadcast(tensor, root_rank, name))


def _broadcast(tensor: torch.Tensor, root_rank: int | None, name: str | None) -> torch.Tensor:
    broadcast_all("broadcast", name, [(None, tensor)], root_rank)
    return tensor


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
        operate = functools.partial(stream.do, operate)
    try:
        with torch.no_grad(), collectives.lock.as_taken(number), on_behalf(handle.caller):
            operate()
    except BaseException as error:
        handle.set_exception(error)
    else:
        handle.set_result(result)
