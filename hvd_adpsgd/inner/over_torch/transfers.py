"""Runs operations in torch's process group of the super learner: Gloo for CPU tensors, NCCL for CUDA ones.

Where learners share a GPU Gloo moves CUDA tensors, too.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_adpsgd.inner.gpus import abort_nccl, cuda_backend
from hvd_adpsgd.inner.over_torch.names import Average, Max, Min, Product, Sum
from hvd_adpsgd.inner.over_torch.pending import Pending
from hvd_adpsgd.inner.over_torch.requests import Decision
from hvd_adpsgd.inner.tensor_bytes import bytes_of, overwrite

_REDUCE: dict[int, Any] = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
}

Work = tuple[Decision, Pending | None]


class Transfers:
    """The process groups of one learner in its super learner. Used by one thread, but for abort().

    Args:
        rank: this learner's rank in the super learner.
        size: number of learners of the super learner.
        store: a torch.distributed store that the learners of the super learner share.
        address: address of this host that the other learners reach.
        seconds: longest wait for the others, when a group is made and in an operation that all have begun.

    Attributes:
        join_device: number of the GPU of zeros that this learner contributes during join(); -1: CPU.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, address: str, seconds: float):
        self._rank, self._size, self._store, self._address = rank, size, store, address
        self._timeout = timedelta(seconds=seconds)
        self.join_device = -1
        self._groups: dict[str, Any] = {}
        self._nccl: Any = None
        self._aborted = False
        self._streams: dict[torch.device, Any] = {}
        if size > 1:
            self._group(torch.device("cpu"))

    def _group(self, device: torch.device) -> Any:
        """Return the process group for tensors on such devices; all learners make it together."""
        kind = device.type
        if kind not in self._groups:
            store = dist.PrefixStore(kind, self._store)
            if kind == "cuda":
                group = self._over_gpus(store, device)
            else:
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._timeout = self._timeout
                options._devices = [gloo.create_device(hostname=self._address)]
                group = gloo(store, self._rank, self._size, options)
            self._groups[kind] = group
            if self._aborted:  # abort() may not have seen this group
                raise RuntimeError("a learner has ended, or an operation has failed")
        return self._groups[kind]

    def _over_gpus(self, store: dist.Store, device: torch.device) -> Any:
        gpus = dist.PrefixStore("gpus", store)
        if cuda_backend(self._rank, self._size, gpus, device.index) == "gloo":
            return self._group(torch.device("cpu"))
        nccl: Any = dist.ProcessGroupNCCL
        self._nccl = nccl(store, self._rank, self._size)
        return self._nccl

    def abort(self) -> None:
        """End operations on GPUs, which do not notice that a learner has ended. On any thread."""
        self._aborted = True
        if self._nccl is not None:
            abort_nccl(self._nccl)

    def run(self, batch: Sequence[Work]) -> str:
        """Run decided operations in their order; this learner gives zeros where it is in join().

        Returns:
            "", or the error of an operation. Nothing may run after it: other learners may be in the middle of
            that operation, and would take messages of the next one for it.
        """
        for decision, own in batch:
            pending = own or self._zeros(decision)
            if pending is None:
                continue
            try:
                with self._in_order(pending):
                    result = self._run(decision, pending)
            except Exception as error:
                pending.fail(error)
                return f"{decision.request.name}: {error}"
            pending.succeed(result)
        return ""

    @contextlib.contextmanager
    def _in_order(self, pending: Pending) -> Iterator[None]:
        """Context manager of an operation on GPUs: after what the script had submitted, on a stream apart.

        It ends when the GPUs have run it, or raises RuntimeError if they were aborted: NCCL leaves part of
        a sum then.
        """
        devices = {tensor.device for tensor in pending.tensors if tensor.is_cuda}
        with contextlib.ExitStack() as stack:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)
                stream = self._streams[device]
                for event in pending.submitted:
                    stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield
            for device in devices:
                ended = torch.cuda.Event(blocking=True)  # the wait leaves the core to others
                self._streams[device].record_event(ended)
                ended.synchronize()
            if devices and self._aborted:
                raise RuntimeError("a learner has ended, or an operation has failed")

    def _run(self, decision: Decision, pending: Pending) -> Any:
        """Run one operation; return this learner's result."""
        pending.own = decision.own
        result = getattr(self, f"_{decision.request.kind}")(decision, pending)
        return result[0] if pending.single else result

    def _zeros(self, decision: Decision) -> Pending | None:
        """Return what a learner in join() gives to a reduction; None for other operations."""
        if decision.request.kind != "allreduce":
            return None
        *_, kind, specs = decision.request.same
        device = torch.device(kind, max(self.join_device, 0)) if kind != "cpu" else "cpu"
        zeros = [torch.zeros(shape, dtype=getattr(torch, d), device=device) for d, shape in specs]
        return Pending(decision.request, zeros, single=False)

    def _allreduce(self, decision: Decision, pending: Pending) -> list[torch.Tensor]:
        """Reduce tensors in place."""
        op, before, after = decision.request.same[:3]
        for dtype in dict.fromkeys(tensor.dtype for tensor in pending.tensors):
            alike = [tensor for tensor in pending.tensors if tensor.dtype == dtype]
            self._reduce(alike, op, before, after)
        return list(pending.tensors)

    def _reduce(self, tensors: list[torch.Tensor], op: int, before: float, after: float) -> None:
        """Reduce tensors of one dtype in place."""
        wide = _WIDER.get(tensors[0].dtype, tensors[0].dtype)
        together = len(tensors) > 1 or tensors[0].dtype != wide or not tensors[0].is_contiguous()
        if together:
            flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])
        else:
            flat = tensors[0].view(-1)
        _scale(flat, before)
        if self._size > 1 and flat.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = _REDUCE[op]
            self._group(flat.device).allreduce([flat], options).wait()
        _scale(flat, after / self._size if op == Average else after)
        if together:
            parts = flat.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _reducescatter(self, decision: Decision, pending: Pending) -> list[torch.Tensor]:
        op, before, after = decision.request.same[:3]
        parts = []
        for tensor in pending.tensors:
            self._reduce([tensor], op, before, after)
            rows = _split_rows(tensor.shape[0], self._size)
            parts.append(tensor.split(rows)[self._rank].clone())
        return parts

    def _exchanged(self, tensor: torch.Tensor, nbytes: Sequence[int] | None) -> list[torch.Tensor]:
        """Return the bytes of all learners' tensors, by rank; `nbytes`: their lengths, None: equal ones."""
        mine = bytes_of(tensor)
        lengths = nbytes or [mine.numel()] * self._size
        longest = max(lengths)
        if self._size == 1 or longest == 0:
            return [mine] * self._size
        padded = mine.new_zeros(longest)
        padded[: mine.numel()] = mine
        found = [torch.empty_like(padded) for _ in lengths]
        self._group(tensor.device).allgather([found], [padded]).wait()
        return [each[:n] for each, n in zip(found, lengths, strict=True)]

    def _allgather(self, decision: Decision, pending: Pending) -> list[torch.Tensor]:
        gathered = []
        for i, tensor in enumerate(pending.tensors):
            rows = [own[i] for own in decision.own]
            row = tensor.element_size() * math.prod(tensor.shape[1:])
            found = torch.cat(self._exchanged(tensor, [n * row for n in rows]))
            shape = (sum(rows), *tensor.shape[1:])
            gathered.append(found.view(tensor.dtype).view(shape))
        return gathered

    def _broadcast(self, decision: Decision, pending: Pending) -> list[torch.Tensor]:
        root = decision.request.same[0]
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        for tensor in pending.tensors:
            data = bytes_of(tensor)
            if self._size > 1 and data.numel():
                self._group(tensor.device).broadcast([data], options).wait()
            if data.data_ptr() != tensor.data_ptr():
                values = data.view(tensor.dtype).view(tensor.shape)
                overwrite(decision.request.name, tensor, values)
        return list(pending.tensors)

    def _alltoall(self, decision: Decision, pending: Pending) -> list[Any]:
        tensor = pending.tensors[0]
        received = [own[self._rank] for own in decision.own]
        row = tensor.element_size() * math.prod(tensor.shape[1:])
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        ends = [list(itertools.accumulate(own, initial=0)) for own in decision.own]
        # every learner sends all it has: simple, and fast enough inside a super learner
        found = self._exchanged(tensor, [sum(own) * row for own in decision.own])
        pieces = [
            data[end[self._rank] * row : end[self._rank + 1] * row]
            for data, end in zip(found, ends, strict=True)
        ]
        if output.numel():
            output = torch.cat(pieces).view(tensor.dtype).view(output.shape)
        is_even = decision.request.same[3]
        return [
            output if is_even else (output, torch.tensor(received, dtype=torch.int32, device="cpu"))
        ]

    def _barrier(self, decision: Decision, pending: Pending) -> list[None]:
        return [None]  # all learners have announced it: that was the wait

    def _join(self, decision: Decision, pending: Pending) -> list[int]:
        return [decision.request.same]  # the rank that called join() last


def _split_rows(rows: int, size: int) -> list[int]:
    """Return how many rows each learner gets of a reducescatter: the first ones one more, as in Horovod."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))
