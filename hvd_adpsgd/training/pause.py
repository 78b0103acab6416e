"""Pauses of averaging, in which no exchange runs: for exact means, checkpoints and joining super learners."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence

import torch

from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.presence import held

log = logging.getLogger("hvd_adpsgd")


@contextlib.contextmanager
def averaging_paused() -> Iterator[None]:
    """Pause averaging: no exchange runs in the `with` block; the model includes corrections of earlier ones.

    For checkpoints of every super learner's own model, `with hvd.averaging_paused(): torch.save(...)`:
    the mean of these models is the mean of the run. All learners enter the block together; entering waits for
    the slowest super learner.

    A pause does not change strategies in step, except those whose mean or round runs during the next
    gradient (delay_by_one, synchronous_gossip:order=awc). For these, the pause applies the result one step
    early, and the next gradient is computed at the averaged models. a2cid2 resumes from the middle of its two
    models.
    """
    doing = "averaging_paused"
    if not worlds.is_initialized() or worlds.current().is_plain:
        yield
        return
    world = worlds.current()
    with held(world, doing) as averagings, paused(world, doing, averagings):
        yield


@contextlib.contextmanager
def paused(
    world: World,
    doing: str,
    averagings: Sequence[Averaging],
    keeping_pending: Collection[Averaging] = (),
) -> Iterator[None]:
    """Inside the `with` block, no exchange of `averagings` runs. All learners enter the block together.

    Args:
        world: the World of this learner.
        doing: name of the operation that needs the pause, for messages.
        averagings: the Averaging of each optimizer to pause: equal optimizers on all learners of a super
            learner; another super learner may pause others.
        keeping_pending: those of `averagings` whose corrections stay pending; the corrections of all others
            are added to the parameters.
    """
    with contextlib.ExitStack() as stack:
        _come_to_rest(world, doing, averagings)
        for averaging in averagings:
            keeps = averaging in keeping_pending
            if not keeps:
                _apply_all(averaging)
            averaging.pauses += 1
            stack.callback(_resume_engine if keeps else resume, averaging)
        yield


@torch.no_grad()
def _apply_all(averaging: Averaging) -> None:
    """Add all pending corrections of a paused Averaging to the parameters, at any point of a step.

    Corrections may be published already for the current step. `_come_to_rest` has finished a round in
    progress; its result is applied here, not in the next step.
    """
    rule = averaging.rule
    rule.before_corrections()
    averaging.take_in()  # corrections that publish() has released for the current step
    averaging.take_in()  # and those that exchanges have computed since then
    rule.after_corrections()
    rule.settle()


def _come_to_rest(world: World, doing: str, averagings: Sequence[Averaging]) -> None:
    """Finish rounds in progress, pause the engines, wait for all learners' exchanges and for devices."""
    for averaging in averagings:
        averaging.require_running()
        averaging.tensors.parameters.check()
        averaging.catch_up()
        averaging.engine.rounds.finish()  # before pause: a paused engine answers no peer of the round
    with contextlib.ExitStack() as entered:
        for averaging in averagings:
            entered.callback(_resume_unless_paused, averaging)
            averaging.engine.pause(_patience_s(averaging))
        # a barrier: after it all engines are paused. It has a name of its own: a learner that raised before
        # it, and tries again, is in another operation
        world.collectives.gather(f"{doing}, which waits for all engines", None)
        entered.pop_all()  # an error before this ends the pause here, too: the others have not entered it
    for averaging in averagings:
        # a parked exchange may have resumed before the barrier
        if not averaging.engine.pause(_patience_s(averaging)):
            log.warning(
                "%s: an exchange is still running after %g s; its corrections are applied after the pause.",
                doing,
                _patience_s(averaging),
            )
        averaging.tensors.settle()


def _patience_s(averaging: Averaging) -> float:
    return 2 * averaging.spec.config.deadline_s


def _resume_unless_paused(averaging: Averaging) -> None:
    if not averaging.pauses:
        averaging.engine.resume()


def resume(averaging: Averaging) -> None:
    """Copy the changed parameters to the engine's copy (mirror), then resume the engine."""
    # before resume: else peers average with the parameters from before the pause
    averaging.absorb()
    _resume_engine(averaging)


def _resume_engine(averaging: Averaging) -> None:
    """Leave one pause; the outermost of nested pauses resumes the engine."""
    averaging.pauses = max(0, averaging.pauses - 1)  # is 0 on a joining learner, which never paused
    if not averaging.pauses:
        averaging.engine.resume()
