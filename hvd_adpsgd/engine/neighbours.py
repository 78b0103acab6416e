"""Shared memory between leaders on one host: each maps the others' models and outboxes (differences)."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_adpsgd.engine.shared_memory import File, host_name, try_file, try_map


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
    """Sizes of a leader's outbox: differences that peers on the host read, and its engine's doorbell.

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
    """Outboxes (differences of models) and models of the leaders on this host, mapped into this process.

    All leaders make their Neighbours together: each calls `gather` GATHERS times. Two leaders that cannot map
    both of each other (different hosts or containers, no room), or whose layouts differ, send their chunks as
    messages.

    Args:
        shape: sizes of each leader's outbox.
        me: rank of this leader.
        gather: returns the values of all leaders, by rank, with None for a failed leader.
        model: this leader's model, if peers may map it.

    Attributes:
        own: address of this leader's outbox, 0 if no peer maps it.
        outboxes: by rank, the address at which that leader's outbox is mapped read-only; 0 if not shared.
        doorbell, doorbells: address of this leader's doorbell, and by rank of the others'; 0 if not shared.
        models: by rank, the address at which that leader's model is mapped; 0 if not shared.
        areas: by rank, the address at which copy and corrections of that model begin; 0 if not shared.
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
        near = [
            offer if i != me and _is_near(mine, offer) else _NOTHING
            for i, offer in enumerate(offers)
        ]
        own = _mapped(outbox, shape.nbytes, True)
        self._outboxes = [_mapped(offer.outbox, shape.doorbell_at, False) for offer in near]
        self._doorbells = [
            _mapped(offer.outbox, shape.nbytes - shape.doorbell_at, True, shape.doorbell_at)
            for offer in near
        ]
        self._models = [
            _mapped(offer.model.file, offer.model.nbytes, False) if offer.model else None
            for offer in near
        ]
        maps = zip(self._outboxes, self._doorbells, self._models, strict=True)
        reach = gather([all(area is not None for area in areas) for areas in maps])
        both = [bool(reach[i] and reach[me][i] and reach[i][me]) for i in range(len(offers))]
        self.outboxes = _addresses(self._outboxes, both)
        self.doorbells = _addresses(self._doorbells, both)
        self.models = _addresses(self._models, both)
        area = model.area if model else 0
        self.areas = [address and address + area for address in self.models]
        self._own = own if any(self.outboxes) else None
        self.own = own.ctypes.data if own is not None and any(self.outboxes) else 0
        self.doorbell = self.own and self.own + shape.doorbell_at


def _is_near(mine: _Offer, other: _Offer) -> bool:
    """Whether two leaders are on one host, and each chunk has the same offset in both models."""
    if not (mine.outbox and other.outbox and mine.model and other.model):
        return False
    alike = (mine.model.fingerprint, mine.model.area) == (other.model.fingerprint, other.model.area)
    return alike and mine.host == other.host


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
