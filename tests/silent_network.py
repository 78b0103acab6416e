"""A communicator over which nothing moves: what is sent is kept, and what arrives a test says."""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvd_adpsgd.messaging.messages import CHANNELS

AGREEMENT, ABANDON, LEAVES, WAITS, BETWEEN = 0, 1, 3, 4, 5  # channels, as in messaging/messages


class SilentNetwork:
    """Of `size` learners, of which this one has place 0; a transport of plain messages.

    Attributes:
        sent: (place, channel, bytes) of all that was sent.
        arrived: (place, tag, bytes) of what the next poll finds.
    """

    is_sending = is_busy = False

    def __init__(self, size: int = 3):
        self._size = size
        self.failed: set[int] = set()
        self.sent: list[tuple[int, int, bytes]] = []
        self.arrived: list[tuple[int, int, Any]] = []

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self._size

    def send(self, place: int, tag: int, data: Any) -> None:
        self.sent.append((place, tag % CHANNELS, bytes(data)))

    def poll(self) -> Iterator[tuple[int, int, Any]]:
        while self.arrived:
            yield self.arrived.pop(0)

    def pause(self, seconds: float) -> None:
        pass

    def recycle(self, buffer: Any) -> None:
        pass

    def look_for_failures(self) -> None:
        pass

    def arrives(self, place: int, channel: int, data: bytes, number: int = 0) -> None:
        """The next poll finds these bytes, of the attempt of that number."""
        message = np.frombuffer(data, dtype=np.uint8)
        self.arrived.append((place, number * CHANNELS + channel, message))

    def arrives_pickled(self, place: int, channel: int, value: Any, number: int = 0) -> None:
        self.arrives(place, channel, pickle.dumps(value), number)

    def sent_on(self, channel: int) -> list[tuple[int, Any]]:
        """(place, value) of what was sent pickled on a channel."""
        return [(place, pickle.loads(data)) for place, on, data in self.sent if on == channel]
