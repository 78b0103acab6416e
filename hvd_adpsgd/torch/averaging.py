"""What a wrapped optimizer owns: its tensors, its engine, and the order of things in a step."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from horovod.torch import HorovodInternalError

from hvd_adpsgd.engine.engine import Engine, EngineOptions, exchange_metrics
from hvd_adpsgd.engine.failures import mpi_failures
from hvd_adpsgd.engine.metrics import Counters
from hvd_adpsgd.errors import (
    LearnerFailedError,
    ModelMismatchError,
    NonFiniteModelError,
    NotInitializedError,
    UnsupportedOptimizerError,
)
from hvd_adpsgd.runtime import state_dump
from hvd_adpsgd.runtime.collectives import allgather_object, wait
from hvd_adpsgd.runtime.world import World
from hvd_adpsgd.strategies import same
from hvd_adpsgd.strategies.plan import AFTER, Plan, Rounds
from hvd_adpsgd.torch.consistency import described, difference, unanimous
from hvd_adpsgd.torch.parameters import AveragingSpec, Parameters
from hvd_adpsgd.torch.round_accounting import Steps
from hvd_adpsgd.torch.timeline import open_timeline
from hvd_adpsgd.torch.update_rules import make_rule

__all__ = ["Averaging", "live", "metrics"]

log = logging.getLogger("hvd_adpsgd")

_live: list[Averaging] = []
_EVENT_NAMES = ("exchange (asked)", "exchange (answered)", "merge", "parked", "mean of all")
_NO_SLOT = -1


def live() -> list[Averaging]:
    """The averagings that are running, oldest first."""
    return _live


class Averaging:
    """Averages the tensors of one optimizer between super learners. Made by all learners together.

    Args:
        world: the worlds of this learner.
        spec: what to average, and how; agreed on.
    """

    def __init__(self, world: World, spec: AveragingSpec):
        self.inner_size: int = world.inner_size
        self.parameters = Parameters()
        self.counters = Counters(time.monotonic)
        self.nonfinite_steps = 0
        self._config = spec.config
        self._world = world
        self._step = 0
        self._submitted = 0  # gradients handed to Horovod for the step under way
        self._published = False  # the leader has published for the step under way
        self._slot = _NO_SLOT  # where, once everybody may read it; until it is applied
        self._steps = Steps()
        self._settled = 0  # how often settle() was called and not undone
        self._fresh = True  # the rule has not seen the model yet
        self._stopped = ""  # why
        self._at_stop: list[Callable[[], object]] = []
        self._timeline = open_timeline(world)
        self._wish = spec
        self._plan = spec.strategy.plan(world.super_rank, world.super_size)
        self._trained = {id(tensor) for _, tensor in spec.named}
        self.rule = make_rule(self._plan.rule, spec.trained, spec.config.exchanges_per_step)
        averaged = self.rule.averaged() + spec.buffers
        specs = unanimous(world, "averaging", lambda: self.parameters.add(averaged))
        self._specs = [specs]  # by generation
        self.engine = self.another_engine(world.outer, world.members)
        world.teardown.at_shutdown(self.stop)
        if self._in_step is not None:
            world.collectives.before.append(self.catch_up)
        _live.append(self)
        state_dump.add_source("averaging", lambda: [averaging.view() for averaging in list(_live)])

    def another_engine(self, outer: Any, members: Sequence[int]) -> Engine:
        """An engine for these tensors, started. All learners of all super learners make it together.

        Args:
            outer: the leaders; None on learners that are not leaders. A joining learner's is made and has no
                thread until it has joined.
            members: the super learners that they lead; () means all.
        """
        engine = _engine(self._world, self._wish, self._plan, outer, members)
        for specs in self._specs:
            engine.extend(specs)
        engine.start()
        atexit.unregister(engine.stop)  # shutdown() comes first, and knows how the script ends
        self._world.teardown.owned += engine.communicators
        return engine

    def replace_engine(self, engine: Engine) -> None:
        """Go on with another engine; between steps, settled. Numbers of exchanges begin anew."""
        self.engine.stop()
        self._trace_engine()
        self.engine = engine

    # ---- the step, in order ----------------------------------------------------------------

    def begin_step(self, groups: Iterable[dict[str, Any]]) -> None:
        """Nothing may be done with a failed engine, nor with tensors that have changed.

        Args:
            groups: the optimizer's param_groups.
        """
        self.require_running()
        self.engine.check()
        self._require_known(groups)
        if self.inner_size == 1:
            self.parameters.check()
        if self._fresh:
            self._fresh = False
            with torch.no_grad():
                self.rule.start()
        self._steps.begin()

    @contextlib.contextmanager
    def stepping(self, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
        """A step, from begin_step on. Its round is still owed if an exception leaves it."""
        self.begin_step(groups)
        try:
            yield
        finally:
            self._steps.leave()

    def require_running(self) -> None:
        """Raise NotInitializedError if this optimizer has been retired."""
        if self._stopped:
            raise NotInitializedError(
                f"this optimizer averages no longer: {self._stopped} after it was wrapped. Use an "
                "optimizer that was wrapped after that."
            )
        if self._world.collectives.joining:
            raise NotInitializedError(
                "this learner replaces a failed one, and has not joined: call hvd.replace_failed("
                "model, optimizer) before the first step."
            )

    def _require_known(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ModelMismatchError if a parameter is trained now that was frozen when wrapped."""
        for i, group in enumerate(groups):
            for j, p in enumerate(group["params"]):
                if p.requires_grad and not self.trains(p):
                    raise ModelMismatchError(
                        f"parameter {j} of group {i}, shape {list(p.shape)}, is trained now and was "
                        "frozen (requires_grad=False) when the optimizer was wrapped, so nobody "
                        "averages it. Wrap first and freeze then, or wrap a new optimizer."
                    )

    def before_gradient(self, count: int, total: int) -> None:
        """`count` of the step's `total` gradients go to Horovod now.

        Before the last of them the leader publishes: whoever gets past this all-reduce may read
        the published slot.
        """
        if self._submitted == 0:
            self.require_running()
            self.parameters.check()
        self._submitted += count
        if self._submitted >= total:
            self._publish()

    def _publish(self) -> None:
        """Once per step; a step that the user skipped leaves its publication to the next."""
        if self._published:
            return
        if self.engine.is_leader:
            self.engine.finish_round()
            self.engine.publish(self._step)
        self._published = True

    def _count_published(self) -> None:
        """On every learner, once per publication, when all may read it."""
        if self._published and self._slot == _NO_SLOT:
            self._slot = self.engine.published()

    def synchronized(self, began: float, gradients: int) -> None:
        """The node's all-reduces that began at `began` are done."""
        self._count("inner_allreduce", began)
        self._submitted = 0
        if self._in_step is not None:
            self._steps.averaged()
        if gradients:
            self.engine.reopen()
            self._count_published()

    @torch.no_grad()
    def before_optimizer(self) -> bool:
        """The node's gradients are averaged. False if there is nothing to step with."""
        if not self._averages_gradients:
            return True
        if self._slot == _NO_SLOT:  # no all-reduce in the node came after the last step
            self._publish_here()
        if any(p.grad is not None and p.grad.is_sparse for p in self.rule.model):
            self._wish.strategy.refuse("a sparse gradient", ModelMismatchError)
        self._absorb()
        self.rule.before_optimizer()
        return self._step > 0

    def require_whole_step(self) -> None:
        """Raise UnsupportedOptimizerError if the strategy refuses closures."""
        self._wish.strategy.refuse("step(closure)", UnsupportedOptimizerError)

    def count_optimizer(self, began: float) -> None:
        self._count("optimizer", began)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Take the published corrections in, offer the model, and do what comes in step with others.

        Raises:
            NonFiniteModelError: if a parameter is infinite or not a number, and the configuration
                says "raise". The model was not offered.
        """
        self._make_up()
        began = time.monotonic()
        fit = self._collect()
        self._count("collect", began)
        began = time.monotonic()
        self._offer(fit, in_step=self._steps.due)
        self._count("offer", began)
        self._steps.end()
        self.counters.end_step()
        self._trace_engine()
        if not fit:
            self._nonfinite()

    def _offer(self, fit: bool, in_step: bool = True) -> None:
        """The end of a step: the model is the others' to average, and a round may begin."""
        self.engine.offer(self._step, fit)
        self._world.membership.update(self.engine.report(), self._step)
        if in_step:
            self._round()
            self._step += 1

    @torch.no_grad()
    def catch_up(self) -> None:
        """Before all wait for each other: nobody may still wait for a round of this super learner.

        Whoever skips a step after synchronize() (GradScaler does on overflow) owes its round. So does
        who has averaged gradients and comes to a global operation before it steps.
        """
        if self._stopped or self._steps.inside or self._in_step is None or self.engine.failed:
            return
        self._steps.all_wait()
        self._make_up()

    def _make_up(self) -> None:
        """Take part in the rounds of skipped steps, with the model as it is.

        Raises:
            UnsupportedOptimizerError: if the strategy refuses skipped steps.
        """
        while self._steps.owed:
            self._wish.strategy.refuse("a skipped step()", UnsupportedOptimizerError)
            self._steps.owed -= 1
            self._offer(self._take_in())

    def _collect(self) -> bool:
        """Apply what exchanges owe the model; it is in the mirror then. True if all is finite."""
        if self._averages_gradients:  # applied before the optimizer; these are the next ones
            return self._refresh()
        if self._slot == _NO_SLOT:  # no all-reduce in the node came after the last step
            self._publish_here()
        self.rule.pass_time()
        self.rule.before_corrections()
        fit = self._absorb()
        self.rule.after_corrections()
        return fit

    def _round(self) -> None:
        """Begin the round that follows this step, if one does; wait for it if the law says so."""
        if self._in_step is None or not self._in_step.is_due(self._step):
            return
        self.engine.begin_round(self._step // self._in_step.period)
        if self._in_step.order != AFTER:
            return
        self.rule.before_round()
        self._take_in()  # publishing waits for the round
        self.rule.after_round()
        self._refresh()
        self.engine.resume()

    def _refresh(self) -> bool:
        """The mirror holds what the tensors hold now. True if all of it is finite."""
        return self.engine.absorb(self.parameters.addresses(), _NO_SLOT, self._step)

    def _take_in(self) -> bool:
        """Publish and apply, beside the step's own order. True if every parameter is finite."""
        self._publish_here()
        return self._absorb()

    def _publish_here(self) -> None:
        """Publish without an all-reduce of gradients."""
        self._publish()
        if self.inner_size > 1:
            self._meet_in_node()
        self._count_published()

    def _absorb(self) -> bool:
        """Apply what was published, if anything was. True if every parameter is finite."""
        slot, self._slot, self._published = self._slot, _NO_SLOT, False
        fit = self.engine.absorb(self.parameters.addresses(), slot, self._step)
        if slot != _NO_SLOT and self.engine.corrections(slot):
            self.parameters.write_back()
        return fit

    def _nonfinite(self) -> None:
        self.nonfinite_steps += 1
        where = ", ".join(self._nonfinite_names()[:3])
        message = (
            f"step {self._step - 1}: the model of super learner {self._world.super_rank} holds NaN "
            f"or Inf ({where}); it is not offered to the others. Lower the learning rate or clip "
            "gradients; HVD_ADPSGD_NONFINITE=skip trains on alone until the model is finite."
        )
        if self._config.nonfinite == "raise":
            raise NonFiniteModelError(message)
        if self.nonfinite_steps == 1:
            log.warning("%s", message)

    def _nonfinite_names(self) -> list[str]:
        pairs = zip(self.parameters.names, self.parameters.tensors, strict=True)
        return [name for name, tensor in pairs if not torch.isfinite(tensor).all()]

    # ---- beside the step ---------------------------------------------------------------------

    def trains(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one that the optimizer trains."""
        return id(tensor) in self._trained

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Average these tensors too, from the next step on. All learners of the node call it.

        Raises:
            ModelMismatchError: on every learner of the node, if they add different tensors.
        """
        named = list(named)
        told = allgather_object(self._world.inner, described(named))
        for inner_rank, other in enumerate(told):
            if other != told[0]:
                raise ModelMismatchError(
                    "add_param_group: "
                    + difference(told[0], other, f"inner learner {inner_rank}", "inner learner 0")
                )
        self._trained.update(id(tensor) for _, tensor in named)
        self._specs.append(self.parameters.add(named))
        self.engine.extend(self._specs[-1])

    def require_growing(self) -> None:
        """Raise a typed error if tensors cannot be added."""
        self.require_running()
        if self._plan.rule is not None:
            raise UnsupportedOptimizerError(
                f"add_param_group with averaging={self._spec}, which keeps tensors of its own for each "
                "parameter: wrap a new optimizer with all groups instead."
            )

    @torch.no_grad()
    def settle(self) -> None:
        """Pause the engine and take in every correction. All learners call it together.

        A round under way is finished first; what comes of it is taken in here, not in the next step.

        It may come at any place of a step, also when that step's corrections are published but not
        yet applied.
        """
        self.require_running()
        self.parameters.check()
        self.catch_up()
        self._meet_in_node()  # exchanges may be waiting for the slot that is held
        self.engine.finish_round()  # a paused engine would never answer a peer of the round
        self._pause()
        self._world.collectives.run("average_model", lambda comm: wait(comm.Ibarrier()))
        if not self._pause():  # what was parked may have gone on meanwhile
            log.warning(
                "average_model: an exchange is still under way after %g s; what it brings later is "
                "not in the mean.",
                2 * self._config.deadline_s,
            )
        self.rule.before_corrections()
        self._take_in()  # what is published for the step under way
        self._take_in()  # and what was merged after that
        self.rule.after_corrections()
        self.rule.settle()
        self._settled += 1

    def _pause(self) -> bool:
        return self.engine.pause(2 * self._config.deadline_s)

    def _meet_in_node(self) -> None:
        """All learners of the node are past the slot that is held."""
        with mpi_failures("average_model, in the node"):
            wait(self._world.inner.Ibarrier())
        self.engine.reopen()

    def resume(self) -> None:
        """Refresh the mirror after the parameters were changed, and go on.

        Inside another settle() only that one's end goes on. A joining learner, whose engine is new, has not
        settled.
        """
        self._settled = max(0, self._settled - 1)
        self._refresh()
        if not self._settled:
            self.engine.resume()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the model; {} if that is nothing."""
        held = {name: [t.clone() for t in ts] for name, ts in self.rule.tensors().items()}
        if not held and self._in_step is None:
            return {}
        world = self._world
        return {
            "strategy": self._spec,
            "of": [world.super_rank, world.super_size],
            "step": self._step,
            "rule": held,
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any] | None) -> None:
        """Go on where `state` was taken, if it is of any use here; else start anew.

        Start anew: what the strategy remembers is that of its first step, with the model loaded.

        Args:
            state: of `state`; None if there was none, as in checkpoints of plain optimizers.
        """
        if self._step and not self._settled:
            log.warning(
                "a state is loaded after step %d, outside `with hvd.settled():`. What exchanges still "
                "owe the model before it is added to the one loaded; load both inside.",
                self._step,
            )
        if state is None:
            self._fresh = True
            return
        reason = self._reason_against(state)
        if reason:
            log.warning("%s: it starts anew with the model loaded.", reason)
            self._fresh = True
            return
        self._step = int(state["step"])
        self._fresh = self._step == 0
        for name, tensors in self.rule.tensors().items():
            for mine, theirs in zip(tensors, state["rule"][name], strict=True):
                mine.copy_(theirs)

    def _reason_against(self, state: dict[str, Any]) -> str:
        """Why the state is of no use here; "" if it is of use."""
        here = [self._world.super_rank, self._world.super_size]
        if not same(str(state.get("strategy")), self._spec):  # older ones lack a key of today
            return f"the checkpoint is of averaging={state.get('strategy')}, this is {self._spec}"
        there = state.get("of", here)
        if self.rule.own and there != here and state["step"]:
            return (
                f"what {self._spec} remembers is each super learner's own; the checkpoint is of number "
                f"{there[0]} of {there[1]}, this is {here[0]} of {here[1]}"
            )
        return ""

    def terms(self) -> tuple[str, list[str]]:
        """What must be equal on all learners that average with this one."""
        return self._spec, described(self._wish.named)

    def memory(self) -> tuple[int, dict[str, Any]]:
        """What a joining learner must know besides the model."""
        return self._step, self.state()

    def remember(self, memory: tuple[int, dict[str, Any]]) -> None:
        """Go on where another learner is."""
        self._step = memory[0]
        if memory[1] and not self.rule.own:
            self.load_state(memory[1])

    def at_stop(self, call: Callable[[], object]) -> None:
        """Have `call` called when this averages no longer."""
        self._at_stop.append(call)

    @contextlib.contextmanager
    def in_node(self) -> Iterator[None]:
        """What is done inside needs all learners of the super learner.

        Without one of them it leaves: its engine serves nobody any longer, and the others count it as
        lost.

        Raises:
            LearnerFailedError: if a learner of this super learner has ended.
        """
        try:
            yield
        except HorovodInternalError as error:
            lost = self._world.failed_in_node(self._config.deadline_s)
            if not lost and "shut down" not in str(error):
                raise
            raise self._broken(lost) from None

    def _broken(self, lost: set[int]) -> LearnerFailedError:
        world = self._world
        who = f"learner {', '.join(map(str, sorted(lost)))}" if lost else "another learner"
        message = (
            f"step {self._step}, learner {world.rank} of super learner {world.super_rank}: {who} of it "
            "has failed, so this super learner leaves, and the others train on without it. Start the job "
            "again from a checkpoint to have it back."
        )
        world.membership.fail([world.rank])
        self.stop("a learner of this super learner failed")
        return _LearnerLostError(message)

    def stop(self, why: str = "hvd.shutdown() was called") -> None:
        """Leave the others; bounded. Called by hvd.shutdown()."""
        self._stopped = self._stopped or why
        while self._at_stop:
            self._at_stop.pop()()
        if self.catch_up in self._world.collectives.before:
            self._world.collectives.before.remove(self.catch_up)
        self._world.teardown.forget(self.stop)
        if self in _live:
            _live.remove(self)
        self.engine.stop(broken=self._world.teardown.fails)
        self._world.membership.update(self.engine.report(), self._step)
        if not self._world.teardown.has_begun:
            self._world.membership.rejoin()
        self._trace_engine()

    def metrics(self) -> dict[str, Any]:
        """See hvd_adpsgd.torch.metrics."""
        return {
            **self.counters.to_dict(),
            "nonfinite_steps": self.nonfinite_steps,
            **self.engine.metrics(),
        }

    def view(self) -> dict[str, Any]:
        """What a state file shows of this."""
        return {
            "strategy": self._spec,
            "step": self._step,
            "gradients_submitted": self._submitted,
            "published": self._published,
            "slot": self._slot,
            "stopped": self._stopped,
            "engine": self.engine.view(),
        }

    @property
    def _spec(self) -> str:
        """Of the strategy."""
        return self._wish.strategy.spec()

    @property
    def _in_step(self) -> Rounds | None:
        """What is done in step with the other super learners."""
        return self._plan.in_step

    @property
    def _averages_gradients(self) -> bool:
        return self._wish.strategy.averages == "gradients"

    # ---- numbers -----------------------------------------------------------------------------

    def _count(self, part: str, began: float) -> None:
        ended = time.monotonic()
        self.counters.add(part, ended - began)
        if self._timeline is not None:
            self._timeline.complete(part, "trainer", began, ended, step=self._step)

    def _trace_engine(self) -> None:
        if self._timeline is None:
            return
        for kind, peer, began, ended, nbytes, step in self.engine.take_events():
            name = _EVENT_NAMES[kind]
            self._timeline.complete(
                name, "engine", began, ended, peer=peer, bytes=nbytes, step=step
            )


class _LearnerLostError(LearnerFailedError, HorovodInternalError):
    """Ours, which is Horovod's as well, so that what catches that goes on working."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LearnerFailedError, self.args


_LearnerLostError.__name__ = _LearnerLostError.__qualname__ = LearnerFailedError.__name__
_LearnerLostError.__module__ = LearnerFailedError.__module__

# ---- set-up ----------------------------------------------------------------------------------


def _engine(
    world: World, spec: AveragingSpec, plan: Plan, outer: Any, members: Sequence[int]
) -> Engine:
    """An engine with a communicator of its own; not yet started."""
    if outer is not None:
        from mpi4py import MPI

        with mpi_failures("averaging"):
            outer = outer.Dup()
        outer.Set_errhandler(MPI.ERRORS_RETURN)
    return Engine(
        inner=world.inner,
        outer=outer,
        plan=plan,
        options=EngineOptions.from_config(spec.config),
        names=[
            f"{world.placements[group[0]].hostname}, learner {group[0]}" for group in world.groups
        ],
        members=members,
    )


# ---- for the user --------------------------------------------------------------------------------


def metrics() -> dict[str, Any]:
    """Numbers of this learner since the optimizer was wrapped.

    Always: steps, steps_per_s, and the seconds of step() by part: inner_allreduce_s (waiting for the
    node's gradients), optimizer_s (the user's), collect_s (corrections in, model into the mirror),
    offer_s (handing it over), each with a moving average `*_ema_s`; nonfinite_steps.

    Of the engine, so 0 or NaN on learners that do not lead: exchanges (active + passive), refused
    and declined questions, parked peers, bytes_sent and bytes_received, staleness (chunks by age
    in steps, 0 to 63 and more) and staleness_mean, consensus_distance (estimated from the exchanges
    since the last call; NaN if no element was compared yet), peers (exchanges with each),
    engine_cpu_s.

    Returns:
        The numbers; with several wrapped optimizers those of the first, and all in "optimizers".
        All 0 or NaN if nothing is averaged between super learners.
    """
    every = [averaging.metrics() for averaging in _live]
    if not every:
        nothing = Counters(time.monotonic).to_dict()
        return {**nothing, "nonfinite_steps": 0, **exchange_metrics(None)}
    if len(every) < 2:
        return every[0]
    return {**every[0], "optimizers": every}
