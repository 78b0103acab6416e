"""The averaging of one optimizer: the order of what a step does, from gradients to the offer of the model."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.shard_memory import Arrivals
from hvd_adpsgd.errors import (
    ModelMismatchError,
    NonFiniteModelError,
    NotInitializedError,
    UnsupportedOptimizerError,
    WorldError,
)
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.strategies.plan import Rounds
from hvd_adpsgd.training.auto_share import AutoShare
from hvd_adpsgd.training.averaged_tensors import AveragedTensors
from hvd_adpsgd.training.drift import FirstModels
from hvd_adpsgd.training.engines import Engines
from hvd_adpsgd.training.parameters import AveragingSpec
from hvd_adpsgd.training.round_accounting import Steps
from hvd_adpsgd.training.shared_moments import share
from hvd_adpsgd.training.super_learner import SuperLearner
from hvd_adpsgd.training.timeline import StepRecord
from hvd_adpsgd.training.update_rules import make_rule

log = logging.getLogger("hvd_adpsgd")
_BOUNDARY_S = 0.2


class Averaging:
    """Averages the tensors of one optimizer between super learners. Made by all learners together.

    Args:
        world: the World of this learner.
        spec: what to average, and how; equal on all learners.
        number: differs from those of the other running averagings; equal on all learners.

    Attributes:
        plan: the strategy's plan for this super learner.
        engine: the present engine, which exchanges models with peers; `move_to` may replace it.
        rule: the strategy's update rule, which changes the model besides averaging.
        step: number of steps made; with a strategy in step the same on all super learners.
        restart: whether the rule resets to the model at the next step.
        tensors: the averaged tensors, and the engine's memory for them.
        engines: makes, replaces and stops the engine.
        share: chooses the share of the model that exchanges move; None where it is given.
        first_models: finds a forgotten broadcast of the model.
        stopped: why averaging has stopped; "" while it runs.
        at_stop: functions that `stop` calls.
        at_boundary: called at the end of a step, when the model is offered, a few times a second.
        optimizer: the wrapped optimizer, None once it is freed.
        super_learner: the learners that step together with the optimizer.
        pauses: depth of nested pauses of averaging.
        changing: with op=Adasum, parameters that hold their change, from backward() to step().
        holds_mean: depth of nested `averaged` blocks, in which the tensors hold the mean.
        waits_for_peers: whether the trainer waits for a round, or for exchanges, where staleness is bounded.
        owes_nonfinite: whether this learner's part of a sharded model is not finite, so that all learners of
            its super learner raise in the next step.
    """

    def __init__(self, world: World, spec: AveragingSpec, number: int = 0):
        self.world, self.spec, self.number = world, spec, number
        self.record = StepRecord(world)
        self.nonfinite_steps = 0
        self.nonfinite_step = -1  # the last step whose parameters were not finite
        self.owes_nonfinite = False
        self._is_finite = True  # else each step looks at the whole model, until it is finite
        self.plan = spec.strategy.plan(world.super_rank, world.super_size)
        self.share = AutoShare(spec.config, world.local_size) if spec.config.chooses_share else None
        # number of exchanges of each chunk per step
        rate = spec.config.exchanges_per_step * spec.config.first_share
        self.rule = make_rule(self.plan.rule, spec.trained, rate)
        if spec.moments is not None:
            told = _Exchanged(self)
            asked = told.optimizer, told.weight, told.training, told.arrivals
            self.rule = share(spec.moments, spec.trained, *asked)
        self.step = 0
        self.restart = True
        self.stopped = ""
        self.at_stop: list[Callable[[], object]] = []
        self.at_boundary: Callable[[], object] = lambda: None
        self._boundary_s = 0.0  # when it is called next
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self.changing: Collection[torch.Tensor] = ()
        self.pauses = self.holds_mean = 0
        self.waits_for_peers = False
        self._submitted = 0  # number of gradients submitted to Horovod for the step under way
        self._waits = self.plan.in_step is not None or spec.config.bounds_staleness
        self._steps = None if self.plan.in_step is None else Steps()
        self._averages_gradients = spec.strategy.averages == "gradients"
        self.tensors = AveragedTensors(world, spec, self.rule.averaged(), self.rule.moments)
        self.super_learner = SuperLearner(world, self, self.plan.in_step is not None)
        self.first_models = FirstModels(world, spec, self.super_learner.mates)
        self.engines = Engines(self.super_learner, spec, self.tensors, self.record)
        self.engine = self.engines.current

    @property
    def _lands_later(self) -> bool:
        """Whether steps go on before devices have copied the model to the engine and checked it for NaN."""
        return self.tensors.are_staged and not self._waits

    @property
    def is_at_rest(self) -> bool:
        """Whether the tensors are this learner's model, not a mean or changes of it."""
        return not (self.changing or self.holds_mean or self.stopped)

    def move_to(self, world: World, engine: Engine, within_s: float) -> None:
        """Use `world` and `engine` from now on: a super learner has joined, and averaging pauses."""
        self.engines.replace(engine, within_s)
        self.engine = engine
        self.world = self.tensors.world = self.super_learner.world = world
        for shard in engine.memory.shards:
            shard.inner = self.engines.holders(world.inner)
        self.super_learner.mates.regains_quorum()
        self.plan = self.spec.strategy.plan(world.super_rank, world.super_size)
        self.rule.adapt(self.plan.rule)

    def require_running(self, also_before_joining: bool = False) -> None:
        """Raise NotInitializedError or WorldError if this optimizer may not step now.

        Args:
            also_before_joining: whether a super learner that has not joined yet passes this check.
        """
        preemption.block_if_leaving()
        inner = self.super_learner
        if inner.broken is not None:
            self.stop("a learner of this super learner failed")
            raise inner.broken
        if self.stopped:
            raise NotInitializedError(
                f"this optimizer has stopped averaging: {self.stopped} after it was wrapped. Use an "
                "optimizer that was wrapped after that."
            )
        if self.holds_mean:
            raise WorldError(
                "the parameters hold the mean of all super learners inside `with hvd.averaged(...)`, and "
                "get their own values back after it. Leave the block before backward(), step(), "
                "average_model or averaging_paused."
            )
        if inner.mates.is_away or self.world.collectives.joining:
            inner.require_joined(also_before_joining)

    def before_gradient(self, count: int, total: int) -> None:
        """Prepare for the submission of `count` of the step's `total` gradients to Horovod.

        The leader publishes corrections before it submits the last gradient: when that all-reduce is over,
        every learner of the super learner may read the published corrections. If the leader published later,
        their buffer (slot) could change while a learner reads it.
        """
        if self._submitted == 0:
            self.require_running()
            self.tensors.parameters.check()
            self.super_learner.note_quorum()
        self._submitted += count
        if self._submitted >= total:
            self._publish()

    @contextlib.contextmanager
    def stepping(self, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Context manager of a step: checks tensors and engine; if the step raises, peers are owed its round.

        Args:
            groups: the optimizer's param_groups.
        """
        self.require_running()
        self.engine.check()
        self.tensors.require_known(groups)
        # with several learners before_gradient() has checked the tensors
        if self.world.inner_size == 1:
            self.tensors.parameters.check()
        self.super_learner.thread = threading.get_ident()
        if self.restart and not self.step:
            self.first_models.before_first_step()
        if self.restart:
            self.restart = False
            with torch.no_grad():
                self.rule.start()
        if not self.first_models.is_over:
            self.first_models.before_update()
        self.tensors.before_update()
        if self._steps is not None:
            self._steps.begin()
        try:
            yield
        finally:
            if self._steps is not None:
                self._steps.leave()

    @contextlib.contextmanager
    def reducing(
        self, gradients: int, again: bool = False, are_averaged: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Context manager around Horovod's wait for the super learner's gradient all-reduces.

        Args:
            gradients: number of gradients.
            again: whether the gradients were averaged before, so that no further round belongs to them.
            are_averaged: tells whether Horovod has finished with the submitted gradients, with or without an
                error. If given, this waits for the submissions of the other learners before the block, since
                Horovod's wait cannot be interrupted.

        Raises:
            CollectiveMismatchError: if another learner of the super learner never submits its gradients: it
                waits in an operation for this learner, or has closed its optimizer.
        """
        self.require_running()
        self.super_learner.mates.submitted()
        with self.record.part("inner_allreduce", self.step):
            if are_averaged is not None:
                self.super_learner.await_mates(are_averaged)
            with self.super_learner.reducing():
                yield
        self._submitted = 0
        self.super_learner.mates.averaged()
        if not self.first_models.is_over:
            self.first_models.after_gradients(self.step)
        if self._steps is not None and not again:
            self._steps.averaged()
        if gradients:
            self.engine.memory.all_met(self.super_learner.mates.has_joined)
        self.super_learner.require_quorum()

    @torch.no_grad()
    def before_optimizer(self) -> bool:
        """Prepare the averaged gradients for the optimizer; return False if it has none to step with yet.

        With delayed_gradients, the first step has no mean gradient of a step before.
        """
        if not self._averages_gradients:
            return True
        if any(p.grad is not None and p.grad.is_sparse for p in self.rule.model):
            self.spec.strategy.refuse("a sparse gradient", ModelMismatchError)
        self.take_in()
        self.rule.before_optimizer()
        return self.step > 0

    @torch.no_grad()
    def finish_step(self) -> None:
        """Add corrections from exchanges to the model, offer it to peers, run the round of this step, if any.

        Raises:
            NonFiniteModelError: with nonfinite="raise", if a parameter is infinite or not a number; the
                model was not offered to peers.
        """
        rounds, later = self._steps, self._lands_later
        if rounds is not None:
            self._run_owed_rounds(rounds)
        with self.record.part("collect", self.step):
            finite = self._collect(later)
        with self.record.part("offer", self.step):
            self._offer(finite, later, in_step=rounds is None or rounds.due)
        if rounds is not None:
            rounds.end()
        self.record.end_step(self.engine)
        if self.share is not None:
            self.share.after_step(self.engine, self.record.counters)
        if (now := time.monotonic()) > self._boundary_s:
            self._boundary_s = now + _BOUNDARY_S
            self.at_boundary()
        if not finite:
            _report_nonfinite(self)

    def require_finite_shards(self) -> None:
        """Raise NonFiniteModelError on all learners if the part of one was not finite in the step before.

        Call it after the learners of the super learner have met, with those refusing to step that found it.
        """
        self.owes_nonfinite = False
        refusing = self.super_learner.mates.refusing() if self.spec.is_sharded else []
        if refusing:
            learners = ", ".join(str(self.world.groups[self.world.super_rank][i]) for i in refusing)
            raise NonFiniteModelError(
                f"step {self.step}: the part of the model that learner {learners} of super learner "
                f"{self.world.super_rank} holds has NaN or Inf since the step before. Lower the learning "
                "rate, or clip gradients."
            )

    def _collect(self, later: bool) -> bool:
        """Add corrections from exchanges to the model, copy it to the engine; return whether it is finite."""
        if self._averages_gradients:  # before_optimizer() has added this step's corrections
            return self.absorb()
        self._publish_inside()
        self.rule.pass_time(self.step)
        self.rule.before_corrections()
        finite = self.absorb(waits=not later, whole=not self._is_finite)
        self._is_finite = finite
        self.rule.after_corrections()
        return finite

    def _offer(self, finite: bool, later: bool, in_step: bool = True) -> None:
        """Offer the model to peers, unless staging does `later`, when its copy to the engine is complete.

        With `in_step`, also begin the round that is due, and count the step.
        """
        if not later:
            self.engine.offer(self.step, finite)
        if self.engines.tells and (news := self.engine.report()):
            self.world.membership.update(self.engines.noticed(news), self.step)
        self.engine.memory.own.training = self.world.membership.training_count
        if in_step:
            if self.plan.in_step is not None:
                self._round(self.plan.in_step)
            self.step += 1

    def _round(self, rounds: Rounds) -> None:
        """Begin the round that is due after this step, if any; wait for the round if `Rounds.waits`."""
        if not rounds.is_due(self.step):
            return
        self.super_learner.begun = self.step
        self.engine.rounds.begin(self.step // rounds.period)
        if not rounds.waits:
            return
        self.rule.before_round()
        self.take_in()  # waits for the round
        self.rule.after_round()
        self.absorb()
        if not self.pauses:
            self.engine.resume()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Run the rounds of skipped steps before an operation over all learners; else learners deadlock.

        A round is owed if a step is skipped after synchronize() (GradScaler does on overflow), or if an
        operation over all learners comes between synchronize() and step().
        """
        rounds = self._steps
        if self.stopped or rounds is None or rounds.inside or self.engine.failed:
            return
        rounds.all_wait()
        self._run_owed_rounds(rounds)

    def _run_owed_rounds(self, rounds: Steps) -> None:
        """Run the rounds of skipped steps, for which peers wait, with the current parameters.

        Raises:
            UnsupportedOptimizerError: if the strategy refuses skipped steps.
        """
        while rounds.owed:
            self.spec.strategy.refuse("a skipped step()", UnsupportedOptimizerError)
            rounds.owed -= 1
            self._offer(self.take_in(), self._lands_later)

    def take_in(self) -> bool:
        """Add corrections from all exchanges so far to the parameters; return whether these are finite."""
        self.tensors.settle()  # while parameters are being copied to the engine, publish() is deferred
        self._publish_inside()
        return self.absorb()

    def _publish_inside(self) -> None:
        """Let the super learner read corrections from exchanges, by a barrier, unless its all-reduce did so.

        If a learner has called join(), nothing is published, as that learner does not enter the barrier:
        corrections stay in the engine's open buffer.
        """
        if (
            not self.engine.memory.own.readable
            and not self.super_learner.mates.someone_has_joined()
        ):
            self._publish()
            if not self.engine.memory.own.is_alone:
                self.engines.inner_barrier()

    def _publish(self) -> None:
        self.waits_for_peers = True
        try:
            self.engine.publish(self.step)
        finally:
            self.waits_for_peers = False

    def absorb(self, waits: bool = True, whole: bool = True) -> bool:
        """Add corrections from exchanges, if any, to the tensors; copy the tensors to the engine (mirror).

        Args:
            waits: whether to wait until devices have added and copied. Else the model is offered to peers
                when its copy is complete.
            whole: whether to copy and check all of the model; else chunks that no exchange has changed take
                turns, where exchanges move small shares.

        Returns:
            Whether every parameter is finite; without `waits`, in steps whose check devices have finished,
            and without `whole`, in chunks that were checked.
        """
        bad = self.tensors.absorb(self.engine, self.step, waits, whole)
        if bad is not None:
            self.nonfinite_step = bad
        return bad is None

    def retire(self, why: str) -> None:
        """Make further steps of this optimizer raise, with reason `why`; `stop` ends the averaging."""
        self.stopped = self.stopped or why

    def stop(self, why: str = "hvd.shutdown() was called") -> None:
        """Stop averaging and notify the peers, in bounded time; also called by hvd.shutdown()."""
        self.retire(why)
        self.super_learner.mates.closes(ends=self.world.teardown.has_begun)
        # pop() may find the list empty: another thread runs `stop`, too
        with contextlib.suppress(IndexError):
            while True:
                self.at_stop.pop()()
        self.engines.end()


class _Exchanged:
    """What shared moments ask of the averaging of an optimizer."""

    def __init__(self, averaging: Averaging):
        self._averaging = averaging

    def optimizer(self) -> torch.optim.Optimizer:
        found = self._averaging.optimizer()
        assert found is not None, "called in steps of the optimizer, and where it is loaded"
        return found

    def training(self) -> int:
        return self._averaging.engine.memory.shards[0].training or self._averaging.world.super_size

    def arrivals(self) -> Arrivals:
        return self._averaging.engine.memory.take_arrivals()

    def weight(self) -> float:
        return self._averaging.plan.weight


def _report_nonfinite(averaging: Averaging) -> None:
    averaging.nonfinite_steps += 1
    raises = averaging.spec.config.nonfinite == "raise"
    if not raises and averaging.nonfinite_steps > 1:
        return
    if raises and averaging.spec.is_sharded and averaging.world.inner_size > 1:
        averaging.owes_nonfinite = True  # the other learners do not know of it
        return
    names = ", ".join(averaging.tensors.parameters.nonfinite()[:3])
    where = f" ({names})" if names else ""
    message = (
        f"step {averaging.nonfinite_step}: the model of super learner {averaging.world.super_rank} holds "
        f"NaN or Inf{where}; it is not offered to other super learners. Lower the learning rate, warm it up, "
        "or clip gradients; if they are clipped, look at the last batch. "
        "HVD_ADPSGD_NONFINITE=skip trains on alone until the model is finite."
    )
    if raises:
        raise NonFiniteModelError(message)
    log.warning("%s", message)
