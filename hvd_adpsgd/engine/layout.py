"""Lays out tensors of several element types as chunks of one contiguous memory.

A layout grows by parts: the first part is laid out when an optimizer is wrapped, one more for each added
parameter group. A new part never changes the chunks of earlier parts, so two super learners of which one has
more parts can still average the chunks of the parts that both have.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.errors import ModelMismatchError

# Element types by name, with the codes of ext/c/kernels.h.
DTYPE_CODES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
_ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


_Span = tuple[int, int, int, int, int]  # a row of LayoutPart.spans


class Shard(NamedTuple):
    """Shard `number` of a model that is cut into `of` shards of about equal size, each of whole chunks."""

    number: int
    of: int


WHOLE = Shard(0, 1)


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one averaged tensor; must be equal on all learners.

    Attributes:
        name: unique in the optimizer.
        shape: as torch prints it, () for a scalar.
        dtype: a key of DTYPE_CODES.
        period: the tensor is in every `period`th exchange; a model has one period beside 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    period: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_CODES:
            raise ModelMismatchError(
                f"tensor {self.name!r}: dtype {self.dtype} cannot be averaged; it must be one of "
                f"{', '.join(DTYPE_CODES)}. Convert it, or keep it out of the optimizer."
            )

    @property
    def count(self) -> int:
        """Number of elements of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.count * _ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        rarely = f", in every {self.period}th exchange" if self.period > 1 else ""
        return f"{self.name} {self.dtype}{list(self.shape)}{rarely}"


@dataclass(frozen=True)
class ChunkSpec:
    """A chunk of the laid-out memory: `count` elements of one dtype from byte `offset` of a layout part.

    Attributes:
        rare: whether it is of tensors that are not in every exchange.
    """

    offset: int
    count: int
    dtype: str
    rare: bool = False

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the chunk's corrections in a buffer (slot): as float64 or float32; a multiple of 64."""
        return -(-self.count * max(4, _ITEMSIZE[self.dtype]) // 64) * 64


@dataclass(frozen=True)
class LayoutPart:
    """A layout part: one group of tensors that were laid out together.

    Attributes:
        chunks: the pieces of the part, each of one dtype, none longer than the chunk size.
        nbytes: size of the part in bytes.
        spans: which elements of which tensor lie in which chunk: shape (n, 5), int64, sorted by chunk; row:
            tensor, first element in the tensor, chunk, first element in the chunk, count. Tensors and chunks
            are numbered through all parts.
        last_chunk: number of chunks of all parts up to and including this one.
        fingerprint: 63-bit hash of the chunk size, the shard, and the names, shapes and dtypes of all parts
            up to and including this one.
    """

    chunks: tuple[ChunkSpec, ...]
    nbytes: int
    spans: NDArray[np.int64]
    last_chunk: int
    fingerprint: int


class Layout:
    """Where each element of each averaged tensor lies in the chunks of the engine's memory.

    Args:
        chunk_nbytes: largest size of a chunk in bytes.
        shard: lay out only this shard of each part.
    """

    def __init__(self, chunk_nbytes: int, shard: Shard = WHOLE):
        self.chunk_nbytes = chunk_nbytes
        self._shard = shard
        self.parts: list[LayoutPart] = []
        self.tensors: list[TensorSpec] = []
        self.period = 1
        self._digest = hashlib.sha256(f"{chunk_nbytes} {shard}\n".encode())

    @property
    def element_nbytes(self) -> float:
        """Bytes of an element, mean of all tensors; 4 if there is none."""
        count = sum(tensor.count for tensor in self.tensors)
        return sum(tensor.nbytes for tensor in self.tensors) / count if count else 4.0

    @property
    def nchunks(self) -> int:
        return self.parts[-1].last_chunk if self.parts else 0

    def rare(self, last_chunk: int) -> list[int]:
        """Return the numbers of the rare chunks among the first `last_chunk`."""
        chunks = [chunk for part in self.parts for chunk in part.chunks]
        return [i for i, chunk in enumerate(chunks[:last_chunk]) if chunk.rare]

    @property
    def spans(self) -> NDArray[np.int64]:
        """Return which elements lie in which chunk: the spans (see LayoutPart) of all parts, shape (n, 5)."""
        return np.ascontiguousarray(np.concatenate([_no_spans(), *(p.spans for p in self.parts)]))

    def names_in(self, chunks: Collection[int]) -> list[str]:
        """Return the names of the tensors that lie in `chunks`, wholly or in part."""
        spans = self.spans
        found = np.unique(spans[np.isin(spans[:, 2], list(chunks)), 0])
        return [self.tensors[i].name for i in found]

    def extend(self, tensors: Sequence[TensorSpec]) -> LayoutPart:
        """Lay out one more group of tensors, dtype by dtype, the rare ones last, as a new part.

        Raises:
            ModelMismatchError: if a tensor's name is used already.
        """
        self._check_names(tensors)
        chunks: list[ChunkSpec] = []
        spans: list[_Span] = []
        nbytes = 0
        for rare in (False, True):  # each shard has a part of both
            more, places, size = self._of_shard(*self._packed(tensors, rare))
            spans += [(t, at, len(chunks) + c, offset, n) for t, at, c, offset, n in places]
            chunks += [replace(c, offset=nbytes + c.offset) for c in more]
            nbytes += size
        self.tensors += tensors
        self.period = max([self.period, *(tensor.period for tensor in tensors)])
        self._digest.update("".join(f"{t}\n" for t in tensors).encode() + b"\0")
        part = LayoutPart(
            chunks=tuple(chunks),
            nbytes=nbytes,
            spans=np.array(spans, dtype=np.int64).reshape(-1, 5),
            last_chunk=self.nchunks + len(chunks),
            fingerprint=int.from_bytes(self._digest.digest()[:8], "little") >> 1,
        )
        self.parts.append(part)
        return part

    def _packed(
        self, tensors: Sequence[TensorSpec], rare: bool
    ) -> tuple[list[ChunkSpec], list[_Span], int]:
        """Lay out the tensors that are rare, or the others; return chunks, spans and bytes."""
        chunks: list[ChunkSpec] = []
        spans: list[_Span] = []
        offset = 0
        for dtype in DTYPE_CODES:
            members = [
                (len(self.tensors) + i, t.count)
                for i, t in enumerate(tensors)
                if t.dtype == dtype and t.count and (t.period > 1) == rare
            ]
            offset = self._pack(members, dtype, rare, offset, chunks, spans)
        return chunks, spans, offset

    def _of_shard(
        self, chunks: list[ChunkSpec], spans: list[_Span], nbytes: int
    ) -> tuple[list[ChunkSpec], list[_Span], int]:
        """Reduce a layout part's chunks, spans and bytes to this shard, numbered as if it were a part.

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
        mine = [replace(c, offset=c.offset - base) for c in chunks[first : first + count]]
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
        rare: bool,
        offset: int,
        chunks: list[ChunkSpec],
        spans: list[_Span],
    ) -> int:
        """Append chunks and spans of tensors of one dtype, rare or not.

        Returns:
            The next free byte, a multiple of 64.
        """
        size = _ITEMSIZE[dtype]
        room = self.chunk_nbytes // size
        filled = room  # as after a full chunk, so that the first element opens a new one
        for tensor, count in members:
            start = 0
            while start < count:
                if filled == room:
                    chunks.append(ChunkSpec(offset, 0, dtype, rare))
                    filled = 0
                take = min(count - start, room - filled)
                spans.append((tensor, start, self.nchunks + len(chunks) - 1, filled, take))
                filled += take
                start += take
                offset += take * size
                chunks[-1] = replace(chunks[-1], count=filled)
        return -(-offset // 64) * 64


def _no_spans() -> NDArray[np.int64]:
    return np.zeros((0, 5), dtype=np.int64)
