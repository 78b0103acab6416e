"""The rendezvous store of processes that torchrun or a similar launcher has started: torch's TCPStore."""

import os
from datetime import timedelta

import torch.distributed

from hvd_adpsgd.launch.rendezvous import Place


class TcpStore:
    """A client of the TCPStore at an address: torchrun's store, else one that the first process serves.

    A script that uses torch.distributed may share this store: keys have a prefix, which differs after a
    restart by torchrun.

    Args:
        place: the store's address, and whether this process serves it.
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
        """Store a value under a key."""
        self._store.set(key, value)

    def has(self, key: str) -> bool:
        """Whether the store has a value of this key; does not wait for one."""
        return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """Return the value of a key that the store has."""
        return bytes(self._store.get(key))
