"""Pauses of averaging, in which no exchange runs: for exact means, checkpoints and joining super learners."""

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
    """Pause averaging: inside the `with` block no exchange runs, the parameters include all corrections.

    For checkpoints of every super learner's own model, `with hvd.averaging_paused(): torch.save(...)`:
    the mean of these models is the mean of the run. All learners enter the block together; entering waits for
    the slowest super learner.

    A pause does not change strategies in step, except those whose mean or round runs during the next
    gradient (delay_by_one, synchronous_gossip:order=awc). For these, the pause applies the result one step
    early, and the next gradient is computed at the averaged models. a2cid2 resumes from the middle of its two
    models.
    """
    with paused("averaging_paused", live_on_all()):
        yield


@contextlib.contextmanager
def paused(
    doing: str, averagings: Iterable[Averaging], keeps_pending: bool = False
) -> Iterator[None]:
    """Inside the `with` block, no exchange of these averagings runs. All learners enter it together.

    Args:
        doing: name of the operation that needs the pause, for messages.
        averagings: the averagings to pause.
        keeps_pending: whether corrections stay pending; else they are all applied to the parameters.
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
    """Apply all corrections of a paused averaging; at any point of a step, also after a slot is published.

    `_come_to_rest` has finished a round in progress; its result is applied here, not in the next step.
    """
    rule = averaging.rule
    rule.before_corrections()
    averaging.take_in()  # corrections published for the current step
    averaging.take_in()  # and those that exchanges have added since that publication
    rule.after_corrections()
    rule.settle()


def _come_to_rest(doing: str, averaging: Averaging) -> None:
    """Finish the round in progress, pause the engine, wait for all learners' exchanges and for devices."""
    engine = averaging.engine
    patience_s = 2 * averaging.spec.config.deadline_s
    averaging.require_running()
    averaging.tensors.parameters.check()
    averaging.catch_up()
    engine.rounds.finish()  # before pause: a paused engine answers no peer of the round
    engine.pause(patience_s)
    try:
        # a barrier: after it all engines are paused
        averaging.world.collectives.gather(doing, None)
    except Exception:  # the other learners have not entered the pause: end it here, too
        if not averaging.pauses:
            engine.resume()
        raise
    if not engine.pause(patience_s):  # a parked exchange may have resumed before the barrier
        log.warning(
            "%s: an exchange is still running after %g s; its corrections are applied after the pause.",
            doing,
            patience_s,
        )
    averaging.tensors.settle()


def resume(averaging: Averaging) -> None:
    """Copy the changed parameters to the mirror, then resume the engine."""
    # before resume: else peers average with the parameters from before the pause
    averaging.absorb()
    _resume_engine(averaging)


def _resume_engine(averaging: Averaging) -> None:
    """Leave one pause; the outermost of nested pauses resumes the engine."""
    averaging.pauses = max(0, averaging.pauses - 1)  # is 0 on a joining learner, which never paused
    if not averaging.pauses:
        averaging.engine.resume()
