"""Tensors of several element types as chunks of one memory.

A layout grows by parts: the first is laid out when an optimizer is wrapped, one more follows each
added parameter group. A part never changes the chunks of those before it, so two super learners of
which one has more parts still share the chunks of the older ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import ModelMismatchError

__all__ = ["DTYPE_CODES", "WHOLE", "ChunkSpec", "Layout", "LayoutPart", "Shard", "TensorSpec"]

# Codes of ext/c/kernels.h.
DTYPE_CODES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
_ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


class Shard(NamedTuple):
    """Part `number` of `of` parts of a model: whole chunks, about as many bytes as in the others."""

    number: int
    of: int


WHOLE = Shard(0, 1)


@dataclass(frozen=True)
class TensorSpec:
    """What must be equal on all learners about one averaged tensor.

    Attributes:
        name: unique in the optimizer.
        shape: as torch prints it, () for a scalar.
        dtype: one of DTYPE_CODES.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_CODES:
            raise ModelMismatchError(
                f"tensor {self.name!r}: dtype {self.dtype} cannot be averaged; it must be one of "
                f"{', '.join(DTYPE_CODES)}. Convert it, or keep it out of the optimizer."
            )

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * _ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ChunkSpec:
    """A piece of the memory: `count` elements of one dtype from byte `offset` of its part."""

    offset: int
    count: int
    dtype: str

    @property
    def slot_nbytes(self) -> int:
        """Size of its corrections, which are float64 for float64 and float32 for other types; 64-aligned."""
        return -(-self.count * max(4, _ITEMSIZE[self.dtype]) // 64) * 64


@dataclass(frozen=True)
class LayoutPart:
    """One group of tensors laid out together.

    Attributes:
        chunks: pieces, each of one dtype, none longer than the chunk size.
        nbytes: size of the part in memory.
        spans: shape (n, 5), int64; row: tensor, first element in it, chunk, first element there,
            count. Tensors and chunks count through all parts; sorted by chunk.
        last_chunk: number of chunks up to and with this part.
        fingerprint: 63 bits over the chunk size, the shard, and names, shapes and dtypes of all parts up to
            this one.
    """

    chunks: tuple[ChunkSpec, ...]
    nbytes: int
    spans: NDArray[np.int64]
    last_chunk: int
    fingerprint: int


class Layout:
    """Where each element of each tensor lies.

    Args:
        chunk_nbytes: largest size of a chunk.
        shard: chunks of the other shards of each part are left out.
    """

    def __init__(self, chunk_nbytes: int, shard: Shard = WHOLE):
        self.chunk_nbytes = chunk_nbytes
        self._shard = shard
        self.parts: list[LayoutPart] = []
        self.tensors: list[TensorSpec] = []
        self._digest = hashlib.sha256(f"{chunk_nbytes} {shard}\n".encode())

    @property
    def nchunks(self) -> int:
        return self.parts[-1].last_chunk if self.parts else 0

    @property
    def spans(self) -> NDArray[np.int64]:
        """The spans of all parts, shape (n, 5)."""
        return np.ascontiguousarray(np.concatenate([_no_spans(), *(p.spans for p in self.parts)]))

    def names_in(self, chunks: Collection[int]) -> list[str]:
        """The tensors that lie in these chunks, wholly or in part."""
        spans = self.spans
        found = np.unique(spans[np.isin(spans[:, 2], list(chunks)), 0])
        return [self.tensors[i].name for i in found]

    def extend(self, tensors: Sequence[TensorSpec]) -> LayoutPart:
        """Lay out one more group of tensors, dtype by dtype.

        Raises:
            ModelMismatchError: if a name is used twice.
        """
        self._check_names(tensors)
        chunks: list[ChunkSpec] = []
        spans: list[tuple[int, int, int, int, int]] = []
        offset = 0
        for dtype in DTYPE_CODES:
            members = [
                (len(self.tensors) + i, t.count)
                for i, t in enumerate(tensors)
                if t.dtype == dtype and t.count
            ]
            offset = self._pack(members, dtype, offset, chunks, spans)
        chunks, spans, offset = self._mine(chunks, spans, offset)
        self.tensors += tensors
        self._digest.update("".join(f"{t}\n" for t in tensors).encode() + b"\0")
        part = LayoutPart(
            chunks=tuple(chunks),
            nbytes=offset,
            spans=np.array(spans, dtype=np.int64).reshape(-1, 5),
            last_chunk=self.nchunks + len(chunks),
            fingerprint=int.from_bytes(self._digest.digest()[:8], "little") >> 1,
        )
        self.parts.append(part)
        return part

    def _mine(
        self, chunks: list[ChunkSpec], spans: list[tuple[int, int, int, int, int]], nbytes: int
    ) -> tuple[list[ChunkSpec], list[tuple[int, int, int, int, int]], int]:
        """Of the chunks of a part those of the shard, and its spans and bytes, as if there were no others.

        A chunk belongs to the shard in which its first byte lies.
        """
        number, of = self._shard
        if of == 1:
            return chunks, spans, nbytes
        ends = [*(c.offset for c in chunks[1:]), nbytes]
        shards = [c.offset * of // nbytes for c in chunks]
        if number not in shards:
            return [], [], 0
        first, count = shards.index(number), shards.count(number)
        base, end = chunks[first].offset, ends[first + count - 1]
        mine = [ChunkSpec(c.offset - base, c.count, c.dtype) for c in chunks[first : first + count]]
        start = self.nchunks + first
        kept = [
            (tensor, at, chunk - first, offset, n)
            for tensor, at, chunk, offset, n in spans
            if start <= chunk < start + count
        ]
        return mine, kept, end - base

    def _check_names(self, tensors: Sequence[TensorSpec]) -> None:
        names = {t.name for t in self.tensors}
        for tensor in tensors:
            if tensor.name in names:
                raise ModelMismatchError(
                    f"two averaged tensors are called {tensor.name!r}; give each its own name in "
                    "named_parameters."
                )
            names.add(tensor.name)

    def _pack(
        self,
        members: list[tuple[int, int]],
        dtype: str,
        offset: int,
        chunks: list[ChunkSpec],
        spans: list[tuple[int, int, int, int, int]],
    ) -> int:
        """Append the chunks and spans of one dtype. Returns the next free byte, 64-aligned."""
        size = _ITEMSIZE[dtype]
        room = self.chunk_nbytes // size
        filled = room  # so that the first element opens a chunk
        for tensor, count in members:
            start = 0
            while start < count:
                if filled == room:
                    chunks.append(ChunkSpec(offset, 0, dtype))
                    filled = 0
                take = min(count - start, room - filled)
                spans.append((tensor, start, self.nchunks + len(chunks) - 1, filled, take))
                filled += take
                start += take
                offset += take * size
                chunks[-1] = ChunkSpec(chunks[-1].offset, filled, dtype)
        return -(-offset // 64) * 64


def _no_spans() -> NDArray[np.int64]:
    return np.zeros((0, 5), dtype=np.int64)
