"""Shared memory between leaders on one host: each maps the others' models and outboxes (data they send)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import File, host_name, try_file, try_map

__all__ = ["Neighbours", "OutboxShape", "ShownModel"]


class ShownModel(NamedTuple):
    """A model in a shared-memory file that peers on the host may map.

    Attributes:
        file: the file.
        nbytes: size of the file.
        area: byte of the file at which the engine's copy of the model and the corrections begin.
        fingerprint: hash of the layout, which determines where each chunk lies.
    """

    file: File
    nbytes: int
    area: int
    fingerprint: int


class OutboxShape(NamedTuple):
    """Sizes of a leader's outbox: chunks that peers on the host read, and a doorbell that wakes its engine.

    Attributes:
        nbytes: size of the outbox, the doorbell included.
        doorbell_at: byte at which the doorbell begins, a multiple of the page size.
    """

    nbytes: int
    doorbell_at: int


class _Offer(NamedTuple):
    """The host of a leader, and the outbox and model that it offers to other leaders for mapping."""

    host: str
    outbox: File | None
    model: ShownModel | None


_NOTHING = _Offer("", None, None)


class Neighbours:
    """Outboxes (memory with sent chunks) and models of the leaders on this host, mapped into this process.

    All leaders make their Neighbours together: each calls `gather` GATHERS times. Two leaders that cannot map
    each other's outboxes (different hosts or containers, no room) send their chunks as messages; two that
    cannot map each other's models, or whose layouts differ, exchange snapshots through the outboxes.

    Args:
        shape: sizes of each leader's outbox.
        me: rank of this leader.
        gather: returns the values of all leaders, by rank, with None for a failed leader.
        model: this leader's model, if peers may map it.

    Attributes:
        own: address of this leader's outbox, 0 if no peer maps it.
        outboxes: by rank, the address at which that leader's outbox is mapped read-only; 0 if not shared.
        doorbell, doorbells: address of this leader's doorbell, and by rank of the others'; 0 if not shared.
        models: by rank, the address at which that leader's model is mapped; 0 unless both map the other's.
        areas: by rank, the address at which copy and corrections of that model begin; 0 if not mapped.
    """

    GATHERS = 2

    def __init__(
        self,
        shape: OutboxShape,
        me: int,
        gather: Callable[[Any], list[Any]],
        model: ShownModel | None = None,
    ):
        outbox = try_file(shape.nbytes)
        try:
            self._meet(shape, me, gather, model, outbox)
        finally:
            # close the file only after the second gather: until then a peer may open it by its descriptor
            if outbox is not None:
                os.close(outbox.handle)

    def _meet(
        self,
        shape: OutboxShape,
        me: int,
        gather: Callable[[Any], list[Any]],
        model: ShownModel | None,
        outbox: File | None,
    ) -> None:
        mine = _Offer(host_name(), outbox, model)
        offers = [offer or _NOTHING for offer in gather(mine)]
        near = [offer if offer.host == mine.host and outbox else _NOTHING for offer in offers]
        own = _mapped(outbox, shape.nbytes, True)
        self._outboxes = [_mapped(offer.outbox, shape.doorbell_at, False) for offer in near]
        self._doorbells = [
            _mapped(offer.outbox, shape.nbytes - shape.doorbell_at, True, shape.doorbell_at)
            for offer in near
        ]
        self._models = [
            _mapped(offer.model.file, offer.model.nbytes, False)
            if model and offer.model and _alike(model, offer.model) and i != me
            else None
            for i, offer in enumerate(near)
        ]
        reach = gather(
            [
                (outbox is not None and bell is not None, model is not None)
                for outbox, bell, model in zip(
                    self._outboxes, self._doorbells, self._models, strict=True
                )
            ]
        )
        both = [
            [bool(reach[i] and reach[me][i][k] and reach[i][me][k] and i != me) for k in range(2)]
            for i in range(len(offers))
        ]
        self.outboxes = _addresses(self._outboxes, [sharing for sharing, _ in both])
        self.doorbells = _addresses(self._doorbells, [sharing for sharing, _ in both])
        self.models = _addresses(self._models, [sharing and showing for sharing, showing in both])
        area = model.area if model else 0
        self.areas = [address and address + area for address in self.models]
        self._own = own if any(self.outboxes) else None
        self.own = own.ctypes.data if own is not None and any(self.outboxes) else 0
        self.doorbell = self.own and self.own + shape.doorbell_at


def _alike(model: ShownModel, other: ShownModel) -> bool:
    """Whether each chunk has the same offset in the shared memory of both models."""
    return (model.fingerprint, model.area) == (other.fingerprint, other.area)


def _mapped(
    file: File | None, nbytes: int, writes: bool, offset: int = 0
) -> NDArray[np.uint8] | None:
    # To touch all pages of 15 peers takes more than a second of each join (docs/log/0210-cheaper-joins.md).
    area = try_map(file, nbytes, writes, offset, touch=False) if file else None
    return None if area is None else np.frombuffer(area, dtype=np.uint8)


def _addresses(areas: Sequence[NDArray[np.uint8] | None], used: Sequence[bool]) -> list[int]:
    return [
        area.ctypes.data if area is not None and use else 0
        for area, use in zip(areas, used, strict=True)
    ]
