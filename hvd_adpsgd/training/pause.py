"""Pauses of averaging, with no correction pending: for exact means, checkpoints and replacements."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

import torch

from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.presence import live_on_all

__all__ = ["averaging_paused", "paused", "resume"]

log = logging.getLogger("hvd_adpsgd")


@contextlib.contextmanager
def averaging_paused() -> Iterator[None]:
    """Inside, no exchange runs and the parameters include all corrections.

    For checkpoints of every super learner's own model, `with hvd.averaging_paused(): torch.save(...)`:
    their mean is the mean of the run. All learners enter together; waits for the slowest super learner.

    A pause does not change strategies in step, except those whose mean or round runs during the next
    gradient (delay_by_one, synchronous_gossip:order=awc). Their result is applied here, one step early,
    and the next gradient is computed at the averaged models. a2cid2 resumes from the middle of both models.
    """
    with paused("averaging_paused", live_on_all()):
        yield


@contextlib.contextmanager
def paused(
    doing: str, averagings: Iterable[Averaging], keeps_pending: bool = False
) -> Iterator[None]:
    """Inside, no exchange of these runs. All learners enter together.

    Args:
        doing: what they do, for messages.
        averagings: which.
        keeps_pending: corrections stay pending; else the parameters include all of them.
    """
    with contextlib.ExitStack() as stack:
        for averaging in list(averagings):
            _come_to_rest(doing, averaging)
            if not keeps_pending:
                _apply_all(averaging)
            averaging.pauses += 1
            stack.callback(_resume_engine if keeps_pending else resume, averaging)
        yield


@torch.no_grad()
def _apply_all(averaging: Averaging) -> None:
    """Apply every correction, at any point of a step, also between publishing corrections and applying them.

    A round in progress was finished; its result is applied here, not in the next step.
    """
    rule = averaging.rule
    rule.before_corrections()
    averaging.take_in()  # corrections published for the current step
    averaging.take_in()  # and those merged since
    rule.after_corrections()
    rule.settle()


def _come_to_rest(doing: str, averaging: Averaging) -> None:
    """Finish the round in progress, pause the engine, and wait for exchanges of all and for devices."""
    engine = averaging.engine
    patience_s = 2 * averaging.spec.config.deadline_s
    averaging.require_running()
    averaging.tensors.parameters.check()
    averaging.catch_up()
    engine.rounds.finish()  # before pause: a paused engine answers no peer of the round
    engine.pause(patience_s)
    try:
        averaging.world.collectives.gather(doing, None)  # all engines are paused
    except Exception:  # the other learners are elsewhere: no one pauses
        if not averaging.pauses:
            engine.resume()
        raise
    if not engine.pause(patience_s):  # a parked exchange may have resumed before the barrier
        log.warning(
            "%s: an exchange is still running after %g s; its corrections come after the pause.",
            doing,
            patience_s,
        )
    averaging.tensors.settle()


def resume(averaging: Averaging) -> None:
    """Copy the changed parameters to the mirror, then resume the engine."""
    averaging.absorb()  # before resume: else peers average with the parameters from before the pause
    _resume_engine(averaging)


def _resume_engine(averaging: Averaging) -> None:
    """In nested pauses only the outermost one resumes it. A joining learner's new engine was not paused."""
    averaging.pauses = max(0, averaging.pauses - 1)
    if not averaging.pauses:
        averaging.engine.resume()
