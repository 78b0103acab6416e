"""Averaging at rest, with nothing pending: for means of all, checkpoints and replacements."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import torch

from hvd_adpsgd.runtime.collectives import wait
from hvd_adpsgd.torch.averaging import Averaging, live

__all__ = ["averaging_paused", "paused", "resume"]

log = logging.getLogger("hvd_adpsgd")


@contextlib.contextmanager
def averaging_paused() -> Iterator[None]:
    """Inside, nothing is pending: the parameters hold all that exchanges owe them.

    For checkpoints of every super learner's own model, `with hvd.averaging_paused(): torch.save(...)`:
    their mean is that of the run. All learners enter together; waits for the slowest super learner.

    Strategies in step continue from there as if nothing had been, but for those whose mean or round runs
    during the next gradient (delay_by_one, synchronous_gossip:order=awc): it is taken in here, one
    step early, and the next gradient is that of the averaged models. a2cid2 continues from the middle
    of its two models.
    """
    with paused(live()):
        yield


@contextlib.contextmanager
def paused(averagings: Iterable[Averaging]) -> Iterator[None]:
    """Inside, these are at rest. All learners enter together."""
    with contextlib.ExitStack() as stack:
        for averaging in list(averagings):
            _pause(averaging)
            stack.callback(resume, averaging)
        yield


@torch.no_grad()
def _pause(averaging: Averaging) -> None:
    """Pause the engine and take in every correction.

    It may come at any place of a step, also when that step's corrections are published but not yet
    applied. A round under way is finished first; what comes of it is taken in here, not in the next step.
    """
    engine, rule = averaging.engine, averaging.rule
    patience_s = 2 * averaging.spec.config.deadline_s
    averaging.require_running()
    averaging.parameters.check()
    averaging.catch_up()
    averaging.meet_in_node()  # exchanges may be waiting for the slot that is held
    engine.rounds.finish()  # a paused engine would never answer a peer of the round
    engine.pause(patience_s)
    averaging.world.collectives.run("average_model", lambda comm: wait(comm.Ibarrier()))
    if not engine.pause(patience_s):  # what was parked may have gone on meanwhile
        log.warning(
            "average_model: an exchange is still under way after %g s; what it brings later is not in "
            "the mean.",
            patience_s,
        )
    rule.before_corrections()
    averaging.take_in()  # what is published for the step under way
    averaging.take_in()  # and what was merged after that
    rule.after_corrections()
    rule.settle()
    averaging.pauses += 1


def resume(averaging: Averaging) -> None:
    """Refresh the mirror after the parameters were changed, and go on.

    Inside another pause only the end of that one goes on. A joining learner, whose engine is new, was not
    paused.
    """
    averaging.pauses = max(0, averaging.pauses - 1)
    averaging.absorb()
    if not averaging.pauses:
        averaging.engine.resume()
