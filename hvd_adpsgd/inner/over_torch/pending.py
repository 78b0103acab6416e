"""Operations that a learner has announced, which are the handles by which a script waits for them."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import torch

from hvd_adpsgd.inner.over_torch.names import HorovodInternalError, LearnerEndedError
from hvd_adpsgd.inner.over_torch.requests import Request


class Pending(Future[Any]):
    """An operation of this learner, from its announcement to its result.

    Args:
        request: the announcement.
        tensors: what it reads, and in reductions and broadcasts overwrites.
        single: whether the result is one tensor, not a list.
    """

    def __init__(self, request: Request, tensors: Sequence[torch.Tensor], single: bool):
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled: the other learners wait for it
        self.request, self.tensors, self.single = request, tensors, single
        self.submitted = [torch.cuda.current_stream(d).record_event() for d in self._devices()]
        self.own: list[Any] = []  # `own` of each learner's announcement, once it has run

    def _devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors if tensor.is_cuda}

    def succeed(self, result: Any) -> None:
        """Record the result, for `wait`, unless the operation is over."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Record an error, for `wait`, unless the operation is over."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)

    def wait(self) -> Any:
        """Wait for the result and return it.

        Raises:
            HorovodInternalError: if the operation failed; LearnerEndedError if a learner has ended.
        """
        if (error := self.exception()) is not None:
            ended = isinstance(error, LearnerEndedError)
            raise (LearnerEndedError if ended else HorovodInternalError)(str(error)) from error
        result = self.result()
        # a list of tensors, or alltoall's pair of tensor and sizes
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return result
