"""The averaged torch tensors of an optimizer, and their memory addresses for the engine's loops."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.errors import DeviceMovedError, ModelMismatchError
from hvd_adpsgd.strategies import Strategy
from hvd_adpsgd.training.devices import is_staged
from hvd_adpsgd.training.sharded import local
from hvd_adpsgd.training.shared_moments import Adaptive
from hvd_adpsgd.training.shared_momentum import Momentum

_ALWAYS: Mapping[int, int] = {}


@dataclass(frozen=True)
class AveragingSpec:
    """Strategy, options and tensors with which one learner calls hvd.DistributedOptimizer.

    Attributes:
        strategy: the strategy, which chooses peers and weights of exchanges.
        config: the options, with those given for this optimizer.
        trained: (name, tensor) pairs of the parameters that the optimizer trains.
        buffers: (name, tensor) pairs of tensors that are averaged but not trained.
        moments: the moments of the optimizer that super learners share; None: none.
        averages_gradients: whether this library, not the script, averages gradients in the super learner.
        is_sharded: whether each learner holds, and averages, a part of every tensor (DTensors).
        arguments: "name=value" of each argument of DistributedOptimizer that is no tensor.
    """

    strategy: Strategy
    config: Config
    trained: list[tuple[str, torch.Tensor]]
    buffers: list[tuple[str, torch.Tensor]]
    arguments: list[str]
    moments: Adaptive | Momentum | None = None
    averages_gradients: bool = True
    is_sharded: bool = False

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return the (name, tensor) pairs of all tensors that the user wants averaged."""
        return self.trained + self.buffers


def averaged_dtype(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype in the engine's layout, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def statistics(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of buffers whose mean makes sense: dense, floating-point, in the state dict.

    Those that are not in the state dict are caches, such as masks and tables of rotary embeddings. The
    vectors of spectral_norm have length 1 and either sign: their mean may be 0, and weights then NaN.
    """
    without = {id(b) for each in module.modules() for b in (*_vectors(each), *_caches(each))}
    for name, buffer in module.named_buffers():
        dense = buffer.layout == torch.strided and buffer.is_floating_point()
        if dense and id(buffer) not in without:
            yield name, buffer


def _caches(module: torch.nn.Module) -> list[torch.Tensor]:
    names = module._non_persistent_buffers_set
    return [b for name, b in module._buffers.items() if name in names and b is not None]


def _vectors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the power-iteration vectors of a module's spectral_norm, of its parametrization or its hooks."""
    if isinstance(module, _SpectralNorm):
        return list(module.buffers(recurse=False))
    hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
    return [getattr(module, f"{hook.name}_{which}") for hook in hooks for which in "uv"]


class Parameters:
    """The averaged tensors of one optimizer, each once, in a fixed order.

    The engine reads and corrects a contiguous CPU tensor in place. A strided CPU tensor has a contiguous
    copy, which is filled before a step's corrections are applied and copied back after. If a tensor is on
    another device, `staging` copies all tensors, and `addresses` is not used. Of a DTensor this learner's
    part is averaged.

    Attributes:
        given: the tensors as the user has them; `tensors` the parts of them that this learner holds.
        staged: whether a tensor is on a device that the engine's loops cannot access.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.given: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self._known: set[int] = set()
        self.staged = False
        self._as_wrapped: list[tuple[torch.device, torch.dtype, torch.Size]] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._addresses = np.zeros(0, dtype=np.uintp)

    def add(
        self, named: Iterable[tuple[str, torch.Tensor]], periods: Mapping[int, int] = _ALWAYS
    ) -> list[TensorSpec]:
        """Add the tensors that are not averaged yet; return name, shape and dtype of each added one.

        Args:
            named: (name, tensor) pairs.
            periods: exchanges per exchange of a tensor, by id; those that are not in it are in each.

        Raises:
            ModelMismatchError: if two tensors share memory, or for a dtype that is not averaged.
        """
        added: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for name, given in named:
            if given not in self and id(given) not in added:
                added[id(given)] = name, given, local(given)
        parts = [(name, part) for name, _, part in added.values()]
        _require_own_memory(zip(self.names, self.tensors, strict=True), parts)
        specs = []
        for name, given, tensor in added.values():
            self._known.add(id(given))
            self.given.append(given)
            dtype, period = averaged_dtype(tensor), periods.get(id(given), 1)
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype, period))
            self.names.append(name)
            self.tensors.append(tensor)
            self.staged |= is_staged(tensor.device)
            self._as_wrapped.append((tensor.device, tensor.dtype, tensor.shape))
        self._addresses = np.zeros(len(self.tensors), dtype=np.uintp)
        return specs

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._known  # ids stay unique, as self.given keeps the tensors alive

    def addresses(self) -> NDArray[np.uintp]:
        """Return the address of each tensor's memory, or of its contiguous copy, which this call fills."""
        reached = self.tensors
        if not all(map(torch.Tensor.is_contiguous, self.tensors)):
            reached = [self._contiguous(i, tensor) for i, tensor in enumerate(self.tensors)]
        elif self._copies:
            self._copies.clear()
        # map runs in C: there may be thousands of tensors
        self._addresses[:] = list(map(torch.Tensor.data_ptr, reached))
        return self._addresses

    def write_back(self) -> None:
        """Copy the contiguous copies, to which corrections were added, back to the strided tensors."""
        with torch.no_grad():
            for i, copy in self._copies.items():
                self.tensors[i].data.copy_(copy.view(self.tensors[i].shape))

    def nonfinite(self) -> list[str]:
        """Return the names of the tensors that hold NaN or infinity."""
        pairs = zip(self.names, self.tensors, strict=True)
        return [name for name, tensor in pairs if not torch.isfinite(tensor).all()]

    def _contiguous(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor if it is contiguous, else a contiguous copy with its values."""
        if tensor.is_contiguous():
            self._copies.pop(i, None)
            return tensor
        copy = self._copies.get(i)
        if copy is None:
            copy = self._copies[i] = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        copy.view(tensor.shape).copy_(tensor.detach())
        return copy

    def check(self) -> None:
        """Raise if a tensor's device, shape or dtype has changed since the optimizer was wrapped.

        Raises:
            DeviceMovedError: if a tensor is on another device than when the optimizer was wrapped.
            ModelMismatchError: if a tensor's shape or dtype has changed.
        """
        self._follow()
        now = [(t.device, t.dtype, t.shape) for t in self.tensors]
        if now != self._as_wrapped:
            changed = next(i for i, kind in enumerate(self._as_wrapped) if now[i] != kind)
            self._refuse(changed, *now[changed])

    def _follow(self) -> None:
        """Find the parts of DTensors where they are now: fully_shard may move them in the first forward."""
        for given, tensor in zip(self.given, self.tensors, strict=True):
            if given is not tensor and (now := local(given)).data_ptr() != tensor.data_ptr():
                tensor.data = now

    def _refuse(self, i: int, device: torch.device, dtype: torch.dtype, shape: torch.Size) -> None:
        """Raise DeviceMovedError or ModelMismatchError for tensor number `i`, which has changed."""
        its_device, its_dtype, its_shape = self._as_wrapped[i]
        name, is_parameter = self.names[i], isinstance(self.given[i], torch.nn.Parameter)
        is_buffer = name.startswith("buffer.") and not is_parameter  # from the argument buffers=
        what = f"{'tensor' if is_buffer else 'parameter'} {name!r}"
        if device != its_device:
            raise DeviceMovedError(
                f"{what} is on {device}, it was on {its_device} when the optimizer was wrapped. Move the "
                "model before hvd.DistributedOptimizer, or wrap a new optimizer."
            )
        now = f"{what} is {dtype}{list(shape)}, it was {its_dtype}{list(its_shape)}"
        if is_buffer:
            raise ModelMismatchError(
                f"{now} when the optimizer was wrapped. Run one batch through the model before "
                "hvd.DistributedOptimizer, as observers have no buffers before, or leave it out of buffers=."
            )
        raise ModelMismatchError(
            f"{now} when the optimizer was wrapped. Wrap a new optimizer after changing a parameter."
        )


def _require_own_memory(*named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelMismatchError if tensors share memory, to which the corrections of each would be added."""
    everything = {id(tensor): (name, tensor) for name, tensor in itertools.chain(*named)}
    for name, tensor in everything.values():
        if shares_elements(tensor):
            raise ModelMismatchError(
                f"tensor {name!r} is expanded: several of its elements are one number in memory, and a "
                "correction would be added to it several times. Train the tensor that it expands, or a clone."
            )
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), key)
        for key, (_, tensor) in everything.items()
        if tensor.numel()
    )
    group: list[int] = []  # ids of tensors whose address ranges overlap, directly or through others
    on, ends = "", 0
    for device, start, end, key in spans:
        if device != on or start >= ends:
            group, on, ends = [], device, 0
        group.append(key)
        ends = max(ends, end)
        if len(group) > 1:
            _require_apart([everything[k] for k in group])


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of the tensor share memory with each other, as elements of an expanded tensor do."""
    if tensor.layout != torch.strided:
        return False
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the tensor's first to its last element, both included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()


def _require_apart(group: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelMismatchError if two of these tensors, whose address ranges overlap, have a byte in common.

    Views of one memory may be interleaved without sharing elements, so each byte is marked with the tensor
    that has it.
    """
    first = group[0][1].data_ptr()
    marks = np.zeros(max(t.data_ptr() - first + _extent(t) for _, t in group), dtype=np.int32)
    for i, (name, tensor) in enumerate(group, start=1):
        strides = [4 * stride * tensor.element_size() for stride in tensor.stride()]
        mine = np.lib.stride_tricks.as_strided(
            marks[tensor.data_ptr() - first :],
            (*tensor.shape, tensor.element_size()),
            (*strides, 4),
        )
        if mine.any():
            raise ModelMismatchError(
                f"parameters {group[mine.max() - 1][0]!r} and {name!r} share memory. Tie weights by using "
                "one torch.nn.Parameter in both places."
            )
        mine[...] = i
