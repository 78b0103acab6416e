"""What else in the process calls an averaging, from its start to its stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.lifecycle import preemption

if TYPE_CHECKING:
    from hvd_adpsgd.training.averaging import Averaging

__all__ = ["Presence", "live", "stop_dropped"]

_live: list[Averaging] = []


def live(also_stopping: bool = False) -> list[Averaging]:
    """The running averagings, oldest first; also those whose stop is due or under way, if asked for."""
    return [averaging for averaging in _live if also_stopping or not averaging.stopped]


def stop_dropped() -> None:
    """Stop the averagings whose optimizer was garbage collected; on a thread of the script."""
    for averaging in live(also_stopping=True):
        if averaging.dropped:
            averaging.stop()


class Presence:
    """An averaging among what the world calls: at shutdown, on SIGTERM, before and in operations.

    Args:
        averaging: which begins now.
    """

    def __init__(self, averaging: Averaging):
        self._averaging = averaging
        world, order = averaging.world, averaging.order
        world.teardown.at_shutdown(averaging.stop)
        world.departure.at_leave(self._depart)
        if stop_dropped not in world.collectives.before:
            world.collectives.before.append(stop_dropped)
        self._entries: list[tuple[list[Any], Callable[..., Any]]] = [
            (world.membership.sources, self.peer_news),
            (world.collectives.asked, averaging.mates.asks),
            (world.collectives.steps, order.averaged_sets),
        ]
        if averaging.plan.in_step is not None:
            self._entries.append((world.collectives.before, averaging.catch_up))
            self._entries.append((world.collectives.steps, order.made))
        for entries, mine in self._entries:
            entries.append(mine)
        _live.append(averaging)

    def end(self) -> None:
        """Nothing calls the averaging any more; again, nothing happens."""
        world = self._averaging.world
        for entries, mine in self._entries:
            _remove(entries, mine)
        world.teardown.forget(self._averaging.stop)
        world.departure.forget(self._depart)
        _remove(_live, self._averaging)

    def peer_news(self) -> list[tuple[int, PeerState]]:
        """Of the leaders; a learner that has failed takes its super learner, and so its leader, along."""
        averaging = self._averaging
        news = averaging.engine.report() if averaging.world.is_leader else []
        if any(state is PeerState.FAILED for _, state in news):
            averaging.world.collectives.look_for_departures()  # of one that has left without an engine
        return news

    def _depart(self) -> None:
        """Leave the peers, beside a trainer's thread that may be anywhere; the process ends next."""
        self._averaging.engine.stop(within_s=preemption.DEPARTURE_S)


def _remove(items: list[Any], item: Any) -> None:
    """Remove it if it is there, in one step: another thread may do the same."""
    with contextlib.suppress(ValueError):
        items.remove(item)
