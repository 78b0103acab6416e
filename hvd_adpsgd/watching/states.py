"""States of super learners as one leader sees them: changes are events; they decide which leader speaks."""

from collections.abc import Callable, Mapping

from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.shutdown import script_fails
from hvd_adpsgd.watching.health import late_after_s

Note = Callable[[str, int | None, str], None]

_SILENT_S = 10.0  # seconds after which a suspect leader counts as gone, and the next one speaks
_GONE = (PeerState.LEFT, PeerState.FAILED)


class States:
    """Follows the states of super learners; times `now_s` are those of time.monotonic.

    Args:
        world: the World of this learner.
        note: called with kind, super_rank and text of each event.

    Attributes:
        suspect: suspect super learners by super_rank: since when, time.monotonic.
    """

    def __init__(self, world: World, note: Note):
        self._membership = world.membership
        self._joining = world.collectives.joining
        self._note = note
        self._every_s = world.config.report_s
        self._states = [PeerState.ALIVE] * world.super_size
        self.suspect: dict[int, float] = {}

    def update(self, world: World, now_s: float) -> None:
        """Note which super learners became suspect, answered again, left, failed or joined since then."""
        self._membership = world.membership
        if self._joining and not world.collectives.joining:  # this super learner has joined
            self._joining = False
            self._tell("joined", world.super_rank)
        states = list(world.membership.states)
        for i in range(len(self._states), len(states)):
            self._tell("joined", i)
            self._states.append(PeerState.ALIVE)
        for i, (before, now) in enumerate(zip(self._states, states, strict=False)):
            if now is not before:
                what = "joined" if before in _GONE and now not in _GONE else now.name.lower()
                self._tell(what, i)
        self._states = states
        self.suspect = {
            i: self.suspect.get(i, now_s)
            for i, state in enumerate(states)
            if state is PeerState.SUSPECT
        }

    def end(self) -> None:
        """Note that this super learner has ended its training, unless after a failure."""
        own = self._membership.own
        if self._joining:
            self._tell("failed", own, "ended before it joined")
        elif not self._membership.own_failed and not script_fails():
            self._tell("left", own)

    def speaks(self, world: World, now_s: float, ages: Mapping[int, float]) -> bool:
        """Whether this is the first living leader, which warns and serves metrics.

        Leaders are skipped that have been suspect for _SILENT_S, or whose reports are missing: `ages` has the
        seconds since the newest report of each peer was received.
        """
        late_s = late_after_s(self._every_s, world.super_size)
        return not world.collectives.joining and all(
            state in _GONE
            or now_s - self.suspect.get(i, now_s) > _SILENT_S
            or ages.get(i, 0.0) > late_s
            for i, state in enumerate(world.membership.states[: world.super_rank])
        )

    def _tell(self, what: str, i: int, text: str = "") -> None:
        self._note(what, i, f"super learner {i} ({self._membership.names[i]}): {text or what}")
