"""torch's store, in which processes meet that torchrun or a launcher like it has started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed

from hvd_adpsgd.launch.rendezvous import Place

__all__ = ["TcpStore"]


class TcpStore:
    """The TCPStore at a place: torchrun's own, else one that the first process serves.

    Scripts that use torch.distributed beside this share it; names of a restarted job differ.

    Args:
        place: of this process.
        seconds: longest wait for the store.
    """

    def __init__(self, place: Place, seconds: float):
        store = torch.distributed.TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=place.serves,
            timeout=timedelta(seconds=max(1.0, seconds)),
            wait_for_workers=False,
            multi_tenant=True,
        )
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = torch.distributed.PrefixStore(f"hvd_adpsgd/{start}", store)

    def set(self, key: str, value: str) -> None:
        """See Store."""
        self._store.set(key, value)

    def has(self, key: str) -> bool:
        """See Store."""
        return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """See Store."""
        return bytes(self._store.get(key))
