"""Devices that hold parameters, for copies to and from the engine: streams, events, page-locked memory.

A stream runs operations in order, asynchronously to the host, and waits for events of other streams. The host
waits in `Event.wait` only. `KINDS` has a class for each type of torch device that runs asynchronously to the
host; tensors of all other types are on the host, whose classes are the bases of the others.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger("hvd_adpsgd")

_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Event:
    """A point in a stream's queue of operations; on the host it is past."""

    def done(self) -> bool:
        """Whether all operations before this event are done, and their results visible to the host."""
        return True

    def wait(self) -> None:
        """Block the calling thread until all operations before this event are done."""


class Stream:
    """Operations that a device carries out in order; the host does each before `do` returns."""

    def enqueue(self, operation: Callable[[], object]) -> None:
        """Queue a torch operation on tensors of this device; the tensors must live until it is done."""
        operation()

    def record(self) -> Event:
        """Return an event behind all operations that the stream has queued so far."""
        return Event()

    def wait(self, event: Event) -> None:
        """Let operations queued from now on begin after the event; of a GPU, the host does not wait."""
        event.wait()


@dataclass(frozen=True)
class Device:
    """A device that holds parameters: the host, for the CPU tensors of a model that is partly on a GPU."""

    device: torch.device

    def current(self) -> Stream:
        """Return the stream in which the trainer's operations on this device run."""
        return Stream()

    def stream(self) -> Stream:
        """Return a new stream of this device, which runs concurrently with the trainer's."""
        return Stream()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized memory of the device, `nbytes` bytes as a uint8 tensor."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def flag(self) -> torch.Tensor:
        """Return a bool tensor of one element in host memory, to which a stream may copy."""
        return torch.zeros((), dtype=torch.bool, device="cpu")

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        """Page-lock host memory, so that copies to and from it do not block the host. False if that fails."""
        return False

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Unlock memory that `pin` has locked, before it is freed."""


@dataclass(frozen=True)
class Cuda(Device):
    """A CUDA GPU, through torch.cuda."""

    def current(self) -> Stream:
        return _CudaStream(torch.cuda.current_stream(self.device))

    def stream(self) -> Stream:
        return _CudaStream(torch.cuda.Stream(self.device))

    def flag(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        """Page-lock memory that torch did not allocate; unlocked memory makes copies slow, not wrong."""
        if memory.size == 0:
            return False
        code = self._register(memory)
        # registered for freed memory that had this address: copies would go to the old pages
        if code == _REGISTERED:
            self.unpin(memory)
            code = self._register(memory)
        if code:
            log.warning(
                "%.0f MiB of host memory could not be page-locked (CUDA error %d): copies between %s and "
                "the host hold up training. Free memory of the host, or give its container more.",
                memory.size / 2**20,
                code,
                self.device,
            )
        return not code

    def _register(self, memory: NDArray[np.uint8]) -> int:
        """Register the memory with CUDA as page-locked; return CUDA's error code, 0 for success."""
        with torch.cuda.device(self.device):
            start, portable = memory.ctypes.data, 1
            code = int(torch.cuda.cudart().cudaHostRegister(start, memory.size, portable))
        if code:
            # clear the error of cudaHostRegister, which CUDA raises at the next launch
            with contextlib.suppress(RuntimeError):
                torch.zeros((), device=self.device)
        return code

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class _CudaStream(Stream):
    def __init__(self, stream: Any):
        self._stream = stream

    def enqueue(self, operation: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            operation()

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # so synchronize() sleeps instead of spinning
        event.record(self._stream)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()


class _CudaEvent(Event):
    def __init__(self, event: Any):
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


# Types of torch devices that run asynchronously to the host.
KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": Cuda}


def device_of(tensor: torch.Tensor) -> Device:
    """Return the Device of a tensor; Devices of tensors on the same torch device are equal."""
    return KINDS.get(tensor.device.type, Device)(tensor.device)


def is_staged(device: torch.device) -> bool:
    """Whether the engine needs copies of this device's tensors, as it cannot access their memory."""
    return device.type != "cpu" or "cpu" in KINDS
