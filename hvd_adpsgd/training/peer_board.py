"""What the learners of a super learner know of each other's operations in torch: a table in shared memory."""

import os

from hvd_adpsgd.engine.kernels import fence
from hvd_adpsgd.engine.shared_memory import shared_table
from hvd_adpsgd.launch.world import World

_TEXT_NBYTES = 1000
_NUMBERS = "ended", "begun", "failed", "looks", "pid", "pids"
COLUMNS = (*((name, "i8") for name in _NUMBERS), ("text", f"S{_TEXT_NBYTES}"))


class PeerBoard:
    """A row per learner.

    Columns of a learner's row:

        ended       0 until the learner enters shutdown(), then 1 + the number of operations it had begun
        begun       number of operations of torch that it has begun, up to a second ago
        failed      1 once it has detected an error that ends the super learner
        looks       number of looks of its watch at this board; -1 after the last one
        pid, pids   of its process, and the namespace that this number is of
        text        that error; before, the operation inside the super learner that it is in, or ""
    """

    def __init__(self, world: World):
        self._rows = shared_table(COLUMNS, world.inner)
        self.mine = self._rows[world.inner_rank]
        self.mine["pid"], self.mine["pids"] = os.getpid(), os.stat("/proc/self/ns/pid").st_ino

    def column(self, name: str) -> list[int]:
        """Return what all learners have in a column."""
        values: list[int] = self._rows[name].tolist()
        return values

    def write(self, text: str) -> None:
        """Write this learner's text."""
        self.mine["text"] = text.encode()[:_TEXT_NBYTES]

    def text(self, peer: int) -> str:
        """Return a learner's text, which that one may just be writing."""
        text: bytes = self._rows["text"][peer]
        return text.decode(errors="replace")

    def report(self, error: str) -> None:
        """Write an error that this learner has detected, for good."""
        self.write(error)
        fence()
        self.mine["failed"] = 1

    def error(self) -> str | None:
        """Return the error that a learner has reported."""
        failed = self.column("failed")
        fence()
        return self.text(failed.index(1)) if any(failed) else None
