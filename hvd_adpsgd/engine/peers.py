"""What is known about each peer: alive, suspect, left or lost. No I/O, no clock.

    ALIVE   --missed_deadline-->  SUSPECT      it is passed over, but served when it comes back
    SUSPECT --answered-->         ALIVE
    ALIVE, SUSPECT --said_goodbye--> LEFT      final: it is done, and its process may end
    ALIVE, SUSPECT --failed-->       FAILED      final: its process died or cannot be reached

News may overtake each other on the way here: a process that said goodbye ends, which the transport
may report as a failure; a goodbye may be read after the failure; a deadline may pass for somebody
already gone. A final state therefore stays as it is for these. That somebody gone *answers* cannot
happen, and raises.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvd_adpsgd.errors import WorldError
from hvd_adpsgd.theory.topology import require_rank, require_size

__all__ = ["LAST_WORDS_S", "Event", "Losses", "PeerState", "PeerTable", "Transition"]

LAST_WORDS_S = 5.0  # who has failed so soon after another may not have told of it


class PeerState(enum.Enum):
    """Where a peer stands; see the module's diagram."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LEFT = "left"
    FAILED = "lost"

    @property
    def final(self) -> bool:
        """Whether the peer is gone for good."""
        return self in (PeerState.LEFT, PeerState.FAILED)


class Event(enum.Enum):
    """What may be learned about a peer."""

    MISSED_DEADLINE = "missed a deadline"
    ANSWERED = "answered"
    SAID_GOODBYE = "said goodbye"
    FAILED = "failed"


@dataclass(frozen=True)
class Transition:
    """What one event did.

    Attributes:
        peer: outer rank.
        event: what was learned.
        before: state before the event.
        after: state after it, equal to `before` if nothing changed.
        message: one line for the log, only the first time this peer enters this state; None
            otherwise, so that a peer that comes and goes does not fill the log.
    """

    peer: int
    event: Event
    before: PeerState
    after: PeerState
    message: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the state is another one now."""
        return self.before is not self.after


_TARGET = {
    Event.MISSED_DEADLINE: PeerState.SUSPECT,
    Event.ANSWERED: PeerState.ALIVE,
    Event.SAID_GOODBYE: PeerState.LEFT,
    Event.FAILED: PeerState.FAILED,
}

_NEWS = {
    PeerState.SUSPECT: "is silent{where}{detail}. Averaging passes over it until it answers; "
    "raise HVD_ADPSGD_DEADLINE_S if it is only slow.",
    PeerState.ALIVE: "answers again{where}{detail}. Averaging goes on with it.",
    PeerState.LEFT: "has left{where}{detail}. Averaging goes on among the others.",
    PeerState.FAILED: "has failed{where}{detail}. Training goes on without it.",
}


def next_state(state: PeerState, event: Event) -> PeerState:
    """The state after an event.

    Raises:
        WorldError: if a peer that has left or has failed answers.
    """
    if not state.final:
        return _TARGET[event]
    if event is Event.ANSWERED:
        raise WorldError(
            f"impossible news of a peer: it {event.value} although its state is {state.value}, "
            "which is final. This is an error of the engine; please report it with the log."
        )
    return state


class PeerTable:
    """The state of every super learner as seen by one of them.

    Not thread-safe: one thread tells it the news. Its own row simply stays alive.

    Args:
        n: number of super learners.
        names: what to call each in messages, by outer rank; default: its number only.

    Raises:
        TopologyError: if n < 1.
    """

    def __init__(self, n: int, names: Sequence[str] = ()) -> None:
        require_size(n)
        self._states = [PeerState.ALIVE] * n
        self._names = tuple(names)
        self._told: set[tuple[int, PeerState]] = set()

    def __len__(self) -> int:
        return len(self._states)

    def state(self, peer: int) -> PeerState:
        """The state of one peer.

        Raises:
            TopologyError: if there is no such peer.
        """
        require_rank(len(self), peer)
        return self._states[peer]

    def among(self, *states: PeerState) -> tuple[int, ...]:
        """Outer ranks whose state is one of these, in order."""
        return tuple(rank for rank, state in enumerate(self._states) if state in states)

    def missed_deadline(
        self, peer: int, *, step: int | None = None, detail: str = ""
    ) -> Transition:
        """The peer let a deadline pass.

        Args:
            peer: outer rank.
            step: the trainer's step at which it was learned, for the message.
            detail: value against bound for the message, as "1.3 s of deadline_s = 1.0".

        Raises:
            TopologyError: if there is no such peer.
        """
        return self._learn(peer, Event.MISSED_DEADLINE, step, detail)

    def answered(self, peer: int, *, step: int | None = None, detail: str = "") -> Transition:
        """The peer sent something; arguments as in `missed_deadline`.

        Raises:
            TopologyError: if there is no such peer.
            WorldError: if it has left or has failed.
        """
        return self._learn(peer, Event.ANSWERED, step, detail)

    def said_goodbye(self, peer: int, *, step: int | None = None, detail: str = "") -> Transition:
        """The peer is done; arguments as in `missed_deadline`.

        Raises:
            TopologyError: if there is no such peer.
        """
        return self._learn(peer, Event.SAID_GOODBYE, step, detail)

    def failed(self, peer: int, *, step: int | None = None, detail: str = "") -> Transition:
        """The peer's process died or cannot be reached; arguments as in `missed_deadline`.

        Raises:
            TopologyError: if there is no such peer.
        """
        return self._learn(peer, Event.FAILED, step, detail)

    def _learn(self, peer: int, event: Event, step: int | None, detail: str) -> Transition:
        before = self.state(peer)
        after = next_state(before, event)
        self._states[peer] = after
        message = None
        if before is not after and (peer, after) not in self._told:
            self._told.add((peer, after))
            message = self._news(peer, after, step, detail)
        return Transition(peer, event, before, after, message)

    def _news(self, peer: int, state: PeerState, step: int | None, detail: str) -> str:
        """One line: who, what, when, what now."""
        name = self._names[peer] if peer < len(self._names) else ""
        who = f"super learner {peer}" + (f" ({name})" if name else "")
        news = _NEWS[state].format(
            where="" if step is None else f" at step {step}", detail=detail and f": {detail}"
        )
        return f"{who} {news}"


class Losses:
    """Who tells of a failed super learner: the first leader that can warns, the others only inform.

    All notice a loss within a second or so. That leader may have failed itself soon after, or leave before
    it has noticed: then the next one warns. A goodbye says which losses were known.

    Args:
        rank: outer rank of this leader.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._when: dict[int, float] = {}
        self._knew: dict[int, frozenset[int]] = {}  # by leader that is gone
        self._open: dict[int, str] = {}  # losses whose warning somebody may still owe
        self._informed: set[int] = set()

    def noticed(self, peer: int, message: str, when: float) -> None:
        """A peer has failed; `when` in seconds."""
        self._when[peer] = when
        self._open[peer] = message

    def left(self, peer: int, knew: Iterable[int]) -> None:
        """A leader, maybe this one, is gone: the failures that its goodbye knew."""
        self._knew[peer] = frozenset(knew)

    def to_tell(self, alive: Sequence[int]) -> list[tuple[bool, str]]:
        """What to log now: (whether as a warning, the line).

        Args:
            alive: leaders that are neither lost nor have left; this one too until it leaves.
        """
        told = []
        for peer, message in list(self._open.items()):
            teller = self._teller(peer, alive)
            warn = teller == self._rank
            if warn or peer not in self._informed:
                told.append((warn, message))
            self._informed.add(peer)
            if warn or teller not in alive:
                del self._open[peer]
        return told

    def _teller(self, peer: int, alive: Sequence[int]) -> int:
        """Who warns, or has warned, of a loss; this leader if there is nobody else."""
        left = [leader for leader in self._knew if self._told(leader, peer)]
        lost = [leader for leader in self._when if self._spoke(leader, peer)]
        return min([*alive, *left, *lost], default=self._rank)

    def _told(self, leader: int, peer: int) -> bool:
        """Whether a leader that is gone knew of a loss, and of no lower leader that would warn of it."""
        knew = self._knew[leader]
        return peer in knew and all(lower in knew for lower in self._when if lower < leader)

    def _spoke(self, leader: int, peer: int) -> bool:
        """Whether a leader failed so long after a peer that it has warned of it."""
        return self._when[leader] - self._when[peer] >= LAST_WORDS_S
