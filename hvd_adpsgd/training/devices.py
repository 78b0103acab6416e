"""Devices on which parameters lie, as staging needs them: streams, events, page-locked memory.

A stream does what it is given in order, later than the host gives it, and waits for events of other
streams. The host waits in `Event.wait` only. `KINDS` has a class for each type of torch device that is behind
the host; others are `Host`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["KINDS", "Cuda", "Device", "Event", "Host", "Stream", "device_of", "is_staged"]

log = logging.getLogger("hvd_adpsgd")

_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether all that the stream was given before it is done, and visible to the host."""

    def wait(self) -> None:
        """Let the calling thread wait for that."""


class Stream(Protocol):
    """Operations that a device carries out in order."""

    def do(self, operation: Callable[[], object]) -> None:
        """Carry out a torch operation on tensors of this device. They must live until it is done."""

    def record(self) -> Event:
        """An event behind all that the stream has been given."""

    def wait(self, event: Event) -> None:
        """What the stream is given from now on is not begun before the event; the host does not wait."""


class Device(Protocol):
    """One device of this learner."""

    def current(self) -> Stream:
        """The stream of the trainer's operations on this device."""

    def stream(self) -> Stream:
        """A new stream beside it."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device."""

    def flag(self) -> torch.Tensor:
        """One bool of the host, to which a stream may copy."""

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        """Lock pages of the host, so that copies from and to them run beside the host. False if it cannot."""

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Before locked memory is freed."""


@dataclass(frozen=True)
class Host:
    """The host itself, for CPU tensors of a model that has others on a GPU: everything is done at once."""

    device: torch.device

    def current(self) -> Stream:
        return _AtOnce()

    def stream(self) -> Stream:
        return _AtOnce()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def flag(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bool, device="cpu")

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        return False

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        pass


class _AtOnce:
    """A stream that is never behind the host, and its events."""

    def do(self, operation: Callable[[], object]) -> None:
        operation()

    def record(self) -> Event:
        return _Past()

    def wait(self, event: Event) -> None:
        event.wait()


class _Past:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class Cuda:
    """A GPU. Nothing but torch.cuda."""

    device: torch.device

    def current(self) -> Stream:
        return _CudaStream(torch.cuda.current_stream(self.device))

    def stream(self) -> Stream:
        return _CudaStream(torch.cuda.Stream(self.device))

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def flag(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)

    def pin(self, memory: NDArray[np.uint8]) -> bool:
        """Page-lock memory that torch did not allocate; without it copies are right, and slow."""
        if memory.size == 0:
            return False
        code = self._register(memory)
        if code == _REGISTERED:  # memory that was there before, which copies would reach
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
        """CUDA's error, 0 if there is none."""
        with torch.cuda.device(self.device):
            start, portable = memory.ctypes.data, 1
            code = int(torch.cuda.cudart().cudaHostRegister(start, memory.size, portable))
        if code:
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next launch
                torch.zeros((), device=self.device)
        return code

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


class _CudaStream:
    def __init__(self, stream: Any):
        self._stream = stream

    def do(self, operation: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            operation()

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # synchronize() sleeps instead of spinning
        event.record(self._stream)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()


class _CudaEvent:
    def __init__(self, event: Any):
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


# Types of devices that are behind the host.
KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": Cuda}


def device_of(tensor: torch.Tensor) -> Device:
    """The device of a tensor; equal for all that are there."""
    return KINDS.get(tensor.device.type, Host)(tensor.device)


def is_staged(device: torch.device) -> bool:
    """Whether the engine cannot reach tensors of this device where they lie."""
    return device.type != "cpu" or "cpu" in KINDS
