"""Operations that a learner has announced, and the handles by which a script waits for them."""

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from hvd_adpsgd.inner.over_torch.names import HorovodInternalError, LearnerEndedError
from hvd_adpsgd.inner.over_torch.requests import Request


class Pending:
    """An operation of this learner, from its announcement to its result.

    Args:
        request: the announcement.
        tensors: what it reads, and in reductions and broadcasts overwrites.
        single: whether the result is one tensor, not a list.
    """

    def __init__(self, request: Request, tensors: Sequence[torch.Tensor], single: bool):
        self.request, self.tensors, self.single = request, tensors, single
        self.result: Any = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.submitted = [torch.cuda.current_stream(d).record_event() for d in self._devices()]
        self.own: list[Any] = []  # `own` of all learners' announcements, once the operation has run

    def _devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors if tensor.is_cuda}

    @property
    def is_over(self) -> bool:
        """Whether `wait` returns at once."""
        return self._over.is_set()

    def succeed(self, result: Any) -> None:
        """Record the result, for `wait`."""
        self.result = result
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Record an error, for `wait`, unless the operation is over."""
        if not self.is_over:
            self._error = error
            self._over.set()

    def wait(self) -> Any:
        """Wait for the result and return it.

        Raises:
            HorovodInternalError: if the operation failed; LearnerEndedError if a learner has ended.
        """
        self._over.wait()
        if self._error is not None:
            ended = isinstance(self._error, LearnerEndedError)
            kind = LearnerEndedError if ended else HorovodInternalError
            raise kind(str(self._error)) from self._error
        # a list of tensors, or alltoall's pair of tensor and sizes
        for tensor in self.result if isinstance(self.result, (list, tuple)) else [self.result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.result


class Handles:
    """Numbers of pending operations, as Horovod's scripts hold them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}

    def add(self, pending: Pending) -> int:
        """Return a new handle of an operation."""
        number = next(self._numbers)
        self._pending[number] = pending
        return number

    def of(self, handle: int) -> Pending:
        """Return the operation of a handle that was not waited for."""
        return self._pending[handle]

    def poll(self, handle: int) -> bool:
        """Whether the operation is over; True for a handle that was waited for."""
        pending = self._pending.get(handle)
        return pending is None or pending.is_over

    def wait(self, handle: int) -> Any:
        """Wait for the operation of a handle, return its result, and forget the handle."""
        pending = self._pending.get(handle)
        if pending is None:
            return None
        try:
            return pending.wait()
        finally:
            self._pending.pop(handle, None)
