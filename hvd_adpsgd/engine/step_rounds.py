"""Averaging for which steps wait: rounds of pairs of super learners, or means over all super learners."""

import functools
import logging
import math
import time
from collections.abc import Callable, Collection

from hvd_adpsgd.engine.loop import Loop
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.strategies.plan import NOBODY, Plan

log = logging.getLogger("hvd_adpsgd")

_PATIENCE_S = 60.0  # a step that waits longer logs a warning, as in Horovod's stall check


class StepRounds:
    """Begins and finishes the rounds of one super learner, which average in step with peers.

    Args:
        plan: this super learner's plan.
        loop: the engine's thread; None on learners that are not leaders, whose methods do nothing.
        comm_rank: returns the rank of a super learner in the engine's communicator, NOBODY if it has none.
        check: raises the engine's failure, if there is one.

    Attributes:
        look: called while a step waits, with the super learners for which it waits (None: all); may raise.
    """

    def __init__(
        self,
        plan: Plan,
        loop: Loop | None,
        comm_rank: Callable[[int], int],
        check: Callable[[], None],
    ):
        self._plan = plan
        self._loop = loop
        self._comm_rank = comm_rank
        self._check = check
        # function that waits up to some seconds, and returns whether the round begun last is over
        self._over: Callable[[float], bool] | None = None
        # by super_rank of each peer of the round: number of exchanges with it before the round
        self._met: dict[int, int] = {}
        self.look: Callable[[Collection[int] | None], object] = lambda peers: None

    def begin(self, number: int) -> None:
        """Begin a round of the strategy's plan, which averages the models that super learners offered last.

        A mean over all super learners first pauses the plan's gossip, until the engine's `resume`, so that
        the mean includes all corrections.

        Args:
            number: number of the round, the same on all super learners.

        Raises:
            AdpsgdError: the first fatal failure of the engine.
        """
        rounds, loop = self._plan.in_step, self._loop
        if loop is None or rounds is None:
            return
        if rounds.peers is not None:
            ranks = {peer: self._comm_rank(peer) for peer in rounds.row(number)}
            self._met = {peer: loop.met(rank) for peer, rank in ranks.items() if rank != NOBODY}
            self._over = functools.partial(self._pairs_over, loop)
            asked = ranks[rounds.row(number)[0]]
            loop.begin_round(number + 1, asked)  # + 1, as number 0 stands for gossip without rounds
            return
        if self._plan.width:
            loop.pause(True)
            self._wait(loop, loop.wait_quiet)
        self._over = functools.partial(loop.wait_mean, loop.begin_mean(rounds.replaces))

    def finish(self) -> None:
        """Wait until the current round, if any, is over: learners can read its correction after publish().

        Peers that have left or failed are not waited for. A mean of all continues without failed peers (under
        ULFM), and without peers that have left once their processes have exited.

        Raises:
            PeerFailedError: if a mean of all needs a super learner that has left or has failed.
            AdpsgdError: the first fatal failure of the engine.
        """
        over, self._over = self._over, None
        if over is not None and self._loop is not None:
            self._wait(self._loop, over)

    def _pairs_over(self, loop: Loop, seconds: float) -> bool:
        """Whether every peer of the round has finished its exchange of the round, has left or has failed."""
        finished = loop.finished()
        if not self._missing(loop):
            return True
        loop.wait_finished(finished + 1, min(seconds, 0.05))
        return False

    def _missing(self, loop: Loop) -> list[int]:
        """Return the peers of the round that have neither finished its exchange, nor left or failed."""
        states, ranks = loop.peers(), {peer: self._comm_rank(peer) for peer in self._met}
        return [
            peer
            for peer, met in self._met.items()
            if loop.met(ranks[peer]) <= met and states[ranks[peer]] < PeerState.LEFT
        ]

    def _wait(self, loop: Loop, over: Callable[[float], bool]) -> None:
        """Wait until `over` returns True, in slices of 0.1 s, so that signals and failures are noticed."""
        tell, in_pairs = time.monotonic() + _PATIENCE_S, self._plan.in_pairs
        while not over(0.1):
            self._check()
            self.look(self._missing(loop) if in_pairs else None)
            if time.monotonic() > tell:
                tell = math.inf
                log.warning(
                    "a step has waited %g s for other super learners. They are slow, or have made fewer "
                    "steps and wait elsewhere: with this strategy all must run the same number of steps. "
                    "SIGUSR1 makes every learner write where it is.",
                    _PATIENCE_S,
                )
