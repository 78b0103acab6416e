"""The trainer's pass over its model, by several threads where the model is large."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.layout import Layout
from hvd_adpsgd.engine.store import Store

__all__ = ["Absorbing"]

_LEAST_NBYTES = (
    16 * 2**20
)  # for each thread: a pass of some milliseconds, beside which waking it is short
_MOST_THREADS = 8  # fewer than that saturate the memory of one processor


class Absorbing:
    """Applies corrections to all tensors of a layout, and fills the mirror.

    Chunks are independent of each other, so each thread takes a run of them: the bits do not depend on how
    many threads there are.

    Args:
        store: the chunks.
        layout: where they lie; one that has grown is divided anew.
        least_nbytes: of the model, for each thread.
    """

    def __init__(self, store: Store, layout: Layout, least_nbytes: int = _LEAST_NBYTES):
        self._store, self._layout, self._least_nbytes = store, layout, least_nbytes
        self._divided: tuple[int, int] = (0, 0)  # parts of the layout, threads
        self._runs: list[NDArray[np.int64]] = []
        self._threads: ThreadPoolExecutor | None = None

    def run(
        self, addresses: NDArray[np.uintp] | None, slot: int, step: int, threads: int
    ) -> tuple[bool, bool]:
        """One pass; see Store.absorb.

        Args:
            addresses: of the tensors, or None.
            slot: to apply.
            step: of the parameters.
            threads: that may compute.
        """
        first, *others = self._runs_for(threads)
        if not others:
            return self._store.absorb(first, addresses, slot, step)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS - 1, "hvd_adpsgd-absorbing")
        submit = self._threads.submit
        under_way = [submit(self._store.absorb, run, addresses, slot, step) for run in others]
        try:
            found = [self._store.absorb(first, addresses, slot, step)]
        finally:
            wait(under_way)  # also after an interrupt: they read what the caller may free
        found += [one.result() for one in under_way]
        return all(finite for finite, _ in found), any(corrected for _, corrected in found)

    def _runs_for(self, threads: int) -> list[NDArray[np.int64]]:
        """The spans, divided among so many threads at most."""
        key = len(self._layout.parts), threads
        if key != self._divided:
            self._divided, self._runs = key, self._divide(threads)
        return self._runs

    def _divide(self, threads: int) -> list[NDArray[np.int64]]:
        """Runs of as many chunks, which but for the last ones have as many bytes."""
        spans, chunks = self._layout.spans, self._layout.nchunks
        nbytes = sum(part.nbytes for part in self._layout.parts)
        count = max(1, min(threads, _MOST_THREADS, chunks, nbytes // self._least_nbytes))
        starts = [chunks * i // count for i in range(1, count)]
        rows = np.searchsorted(spans[:, 2], starts)
        return [np.ascontiguousarray(run) for run in np.split(spans, rows)]
