"""What a wrapped optimizer owns: tensors, engine, and the order of operations in a step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.collectives.collectives import barrier
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.failures import mpi_failures
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.model_memory import ModelMemory
from hvd_adpsgd.engine.model_shards import ModelShards, make_memory
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.errors import (
    CollectiveMismatchError,
    ModelMismatchError,
    NonFiniteModelError,
    NotInitializedError,
    QuorumLostError,
    UnsupportedOptimizerError,
    WorldError,
)
from hvd_adpsgd.joining.candidates import JoinOffer
from hvd_adpsgd.joining.reconnect import NewGroup
from hvd_adpsgd.launch.world import World, names_of
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.strategies.plan import AFTER, Plan
from hvd_adpsgd.training.consistency import require_known, require_same_inside, unanimous
from hvd_adpsgd.training.cores import engine_cores, pass_threads
from hvd_adpsgd.training.gradients import Replacements
from hvd_adpsgd.training.mates import Mates
from hvd_adpsgd.training.parameters import AveragingSpec, Parameters
from hvd_adpsgd.training.round_accounting import Steps
from hvd_adpsgd.training.shard_staging import ShardStaging
from hvd_adpsgd.training.super_learner import (
    horovods,
    inner_failures,
    inside_super_learner,
    wrapping_failures,
)
from hvd_adpsgd.training.supported import require_no_ddp
from hvd_adpsgd.training.timeline import StepRecord
from hvd_adpsgd.training.update_rules import make_rule

__all__ = ["Averaging", "live", "stop_dropped"]

log = logging.getLogger("hvd_adpsgd")

# a wait for gradients of a mate: before it looks what that mate does, between two looks, between two polls
_LATE_S, _AGAIN_S, _PAUSE_S = 1.0, 0.1, 1e-3

_live: list[Averaging] = []


def live(also_stopping: bool = False) -> list[Averaging]:
    """The running averagings, oldest first; also those whose stop is due or under way, if asked for."""
    return [averaging for averaging in _live if also_stopping or not averaging.stopped]


def stop_dropped() -> None:
    """Stop the averagings whose optimizer was garbage collected; on a thread of the script."""
    for averaging in live(also_stopping=True):
        if averaging.dropped:
            averaging.stop()


class Averaging:
    """Averages the tensors of one optimizer between super learners. Made by all learners together.

    Args:
        world: the worlds of this learner.
        spec: what to average, and how; equal on all learners.

    Attributes:
        plan: of the strategy, for this super learner.
        rule: what is done to the model besides averaging.
        step: steps made; of strategies in step the same on all super learners.
        restart: the rule resets to the model at the next step.
        trained: ids of the tensors that the optimizer trains.
        specs: the averaged tensors, as they were added.
        shards: into how many the model is cut; 1: the leader averages all of it.
        stopped: why averaging has stopped; "" while it runs.
        dropped: the optimizer was garbage collected, and `stop_dropped` has not seen it yet.
        at_stop: called by `stop`.
        optimizer: the wrapped optimizer, None once it is freed.
        mates: where the other learners of the super learner are.
        replacements: whether they step with the same gradients, where these replace averaged ones.
        pauses: depth of nested pauses.
        holds_mean: depth of nested `averaged` blocks, in which the tensors hold the mean.
    """

    def __init__(self, world: World, spec: AveragingSpec):
        self.world = world
        self.spec = spec
        self.parameters = Parameters()
        self.record = StepRecord(world)
        self.nonfinite_steps = 0
        self.nonfinite_step = -1  # the last of them
        self.plan = spec.strategy.plan(world.super_rank, world.super_size)
        rate = spec.config.exchanges_per_step * spec.config.exchange_share  # of each chunk
        self.rule = make_rule(self.plan.rule, spec.trained, rate)
        self.step = 0
        self.restart = True
        self.trained = {id(tensor) for _, tensor in spec.named}
        self.stopped = ""
        self.dropped = False
        self.at_stop: list[Callable[[], object]] = []
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self.pauses = self.holds_mean = 0
        self._alone_in_model = (
            False  # no DistributedDataParallel averages it: known at the first step
        )
        self._submitted = 0  # gradients handed to Horovod for the step under way
        self._steps = Steps()
        self._thread = threading.get_ident()  # that makes the steps
        self._begun = 0  # the step whose round was begun last
        self._staging: ShardStaging | None = None  # of parameters on devices
        self._averages_gradients = spec.strategy.averages == "gradients"
        averaged = self.rule.averaged() + spec.buffers
        self._ahead: ModelMemory | ModelShards | None = None
        self.specs = [unanimous(world, "averaging", lambda: self.parameters.add(averaged))]
        self.spec = replace(spec, config=_with_chunks_for(spec.config, self.specs[0]))
        self.shards = _shards(world, spec)
        with wrapping_failures(world, spec.config.deadline_s), mpi_failures("averaging"):
            self.mates = Mates(world.inner, world.inner_rank)
            self.replacements = Replacements(world.inner, world.inner_rank)
        self.engine = self.make_engine(
            world.outer if self._has_shard else None,
            world.members,
            functools.partial(_gather_from_counterparts, world, self._has_shard),
        )
        try:
            self._stage()
        except BaseException:
            self.engine.stop()  # nobody else can
            self.engine.release()
            raise
        world.teardown.at_shutdown(self.stop)
        world.departure.at_leave(self._depart)
        world.membership.sources.append(self._peer_news)
        if stop_dropped not in world.collectives.before:
            world.collectives.before.append(stop_dropped)
        world.collectives.asked.append(self.mates.asks)
        world.collectives.steps.append(self.averaged_sets)
        if self.plan.in_step is not None:
            world.collectives.before.append(self.catch_up)
            world.collectives.steps.append(self.made)
        _live.append(self)

    def make_engine(
        self,
        outer: Any,
        members: Sequence[int],
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> Engine:
        """An engine for these tensors, started. All learners of all super learners make it together.

        Args:
            outer: the leaders, with shards the counterparts; None on learners without a shard, and on joining
                learners until they have joined: without it the engine has no thread.
            members: the leaders' super learners, by rank in `outer`; () means all.
            gather: see Engine.start.
        """
        world = self.world
        names = world.membership.names
        gather = None if world.collectives.joining else gather
        return self._make(self.plan, names, world.inner, outer, members, gather)

    def _make(
        self,
        plan: Plan,
        names: Sequence[str],
        inner: Any,
        outer: Any,
        members: Sequence[int],
        gather: Callable[[Any], list[Any]] | None,
        config: Config | None = None,
        memory: ModelMemory | ModelShards | None = None,
    ) -> Engine:
        engine = Engine(
            inner=inner,
            outer=outer,
            plan=plan,
            config=config or self.spec.config,
            names=names,
            members=members,
            has_neighbours=self.world.local_size > (inner.Get_size() if inner else 1),
            memory=memory,
            shards=self.shards,
            cores=engine_cores(),
        )
        engine.rounds.look = self._require_step
        node = wrapping_failures(self.world, self.spec.config.deadline_s)
        with node, mpi_failures("averaging"):
            for specs in self.specs if memory is None else ():
                engine.memory.extend(specs)
        engine.start(gather)
        atexit.unregister(engine.stop)  # shutdown() must come first: it reports failures
        return engine

    def make_engine_for(self, offer: JoinOffer, new_group: NewGroup) -> Engine:
        """As `make_engine`, for the job with a joining super learner, in the memory of the paused one."""
        plan = self.spec.strategy.plan(self.world.super_rank, len(offer.groups))
        names = names_of(offer.groups, offer.placements)
        comms, config = new_group.comms, self.spec.config.replace(wire="tcp")
        memory = self._ahead or self.engine.memory
        outer = comms.outer if self._has_shard else None
        return self._make(plan, names, comms.inner, outer, new_group.members, None, config, memory)

    def prepare_memory(self) -> None:
        """On a joining super learner, whose engine has had no thread: make its memory before others wait."""
        config, world = self.spec.config, self.world
        shows = self._has_shard and config.same_host == "memory"
        self._ahead = make_memory(
            config.chunk_kib * 1024, world.inner, self._has_shard, shows, self.shards
        )
        for specs in self.specs:
            self._ahead.extend(specs)

    def replace_engine(self, engine: Engine) -> None:
        """Go on with another engine, between steps, paused. Exchange counters restart at 0."""
        self.engine.stop()  # before `events`, which misses what the thread adds later; `release` frees them
        self.record.events(self.engine)
        if self._staging is not None:
            self._staging.release()
        self.engine.release(keeps_memory=self.engine.memory is engine.memory)
        self.engine, self._ahead = engine, None
        self._stage()

    def _stage(self) -> None:
        """Copy parameters on devices from and to the memory of the engine, from now on."""
        if self.parameters.staged:
            own = min(self.world.inner_rank, self.shards - 1)
            self._staging = self._staging or ShardStaging(self.shards, own)
            self._staging.bind(self.engine.memory, self.parameters.tensors)

    @property
    def _has_shard(self) -> bool:
        """Whether this learner averages a shard of the model, or, as the leader, all of it."""
        return self.world.inner_rank < self.shards

    @property
    def _lands_later(self) -> bool:
        """Whether a step waits neither for its copy of the model nor for what devices say of it."""
        waits = self.plan.in_step is not None or self.spec.config.max_staleness is not None
        return self._staging is not None and not waits

    def before_update(self) -> None:
        """Parameters change next: their devices wait for copies of them, the host does not."""
        if self._staging is not None:
            self._staging.before_update()

    def settle(self) -> None:
        """Wait until devices have applied the last corrections, and the mirror holds its copy."""
        if self._staging is not None:
            self._staging.settle()

    def move_to(self, world: World) -> None:
        """The world has changed: the engine is of the new one already."""
        self.world = world
        self.engine.memory.inner = world.inner
        self.plan = self.spec.strategy.plan(world.super_rank, world.super_size)
        self.rule.adapt(self.plan.rule)

    def require_running(self, also_before_joining: bool = False) -> None:
        """Raise NotInitializedError if this optimizer has been retired.

        Args:
            also_before_joining: a super learner that has not joined yet may do this.
        """
        preemption.block_if_leaving()
        stop_dropped()
        if self.stopped:
            raise NotInitializedError(
                f"this optimizer averages no longer: {self.stopped} after it was wrapped. Use an "
                "optimizer that was wrapped after that."
            )
        if self.holds_mean:
            raise WorldError(
                "the parameters hold the mean of all super learners inside `with hvd.averaged(...)`, and "
                "get their own values back after it. Leave the block before backward(), step(), "
                "average_model or averaging_paused."
            )
        if self.mates.is_away:
            raise WorldError(
                "join() was not completed on this learner, because it raised: its super learner counts it as "
                "without data, and does not wait for it. Save the model, and start the job again."
            )
        if self.world.collectives.joining and not also_before_joining:
            raise NotInitializedError(
                "this super learner has not joined the job yet: call hvd.admit(model, optimizer) before "
                "the first step."
            )

    # ---- the step, in order ----------------------------------------------------------------

    def before_gradient(self, count: int, total: int) -> None:
        """`count` of the step's `total` gradients are passed to Horovod next.

        The leader publishes before the last one: that all-reduce tells every learner of the super learner
        that the slot may be read. Published after it, the slot could change while a learner reads it.
        """
        if self._submitted == 0:
            self.require_running()
            self.parameters.check()
        self._submitted += count
        if self._submitted >= total:
            self.engine.publish(self.step)

    @contextlib.contextmanager
    def stepping(self, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Check tensors and engine, and enclose a step. If the step raises, its round is owed.

        Args:
            groups: the optimizer's param_groups.
        """
        self.require_running()
        self._thread = threading.get_ident()
        self.engine.check()
        require_known(self.trained, groups)
        if (
            not self._alone_in_model
        ):  # frameworks put DDP around the model after the optimizer is wrapped
            require_no_ddp({p for group in groups for p in group["params"]})
            self._alone_in_model = True
        if self.world.inner_size == 1:
            self.parameters.check()
        if self.restart:
            self.restart = False
            with torch.no_grad():
                self.rule.start()
        self.before_update()
        self._steps.begin()
        try:
            yield
        finally:
            if self.plan.in_step is None:  # no peer waits for a round of it
                self._steps.end()
            self._steps.leave()

    def all_submit(self, are_averaged: Callable[[], bool]) -> bool:
        """Wait until every learner of the super learner has submitted its gradients; see Mates.all_submit."""
        others = [averaging.mates for averaging in live() if averaging is not self]
        return self.mates.all_submit(others, are_averaged)

    @contextlib.contextmanager
    def reducing(
        self,
        gradients: int,
        again: bool = False,
        are_averaged: Callable[[], bool] | None = None,
    ) -> Iterator[None]:
        """Inside, wait for the super learner's all-reduces.

        Args:
            gradients: how many.
            again: they are those of the last time: no round belongs to them.
            are_averaged: whether Horovod has finished with them, also in failure. With it they are submitted,
                and this waits for the other learners first, as Horovod's wait cannot be ended.

        Raises:
            CollectiveMismatchError: if another learner of the super learner makes no such step: it waits
                in an operation for this one, or has closed its optimizer.
        """
        self.require_running()
        self.mates.submitted()
        with self.record.part("inner_allreduce", self.step):
            if are_averaged is not None:
                self._await_mates(are_averaged)
            with inside_super_learner(self):
                yield
        self._submitted = 0
        self.mates.averaged()
        if self.plan.in_step is not None and not again:
            self._steps.averaged()
        if gradients:
            self.engine.memory.all_met(self.mates.has_joined)
        self._require_quorum()

    def _await_mates(self, are_averaged: Callable[[], bool]) -> None:
        look = time.monotonic() + _LATE_S
        while (late := self.mates.late()) and not are_averaged():
            if time.monotonic() > look:
                self._require_mates(late)
                look = time.monotonic() + _AGAIN_S
            time.sleep(_PAUSE_S)

    def _require_mates(self, late: list[int]) -> None:
        """Raise CollectiveMismatchError if one of these mates, by inner rank, never submits its gradients."""
        world, ranks = self.world, self.world.groups[self.world.super_rank]
        for mate in self.mates.have_closed(late):
            raise horovods(CollectiveMismatchError)(
                f"step {self.step}, learner {world.rank}: learner {ranks[mate]}, of the same super learner, "
                "makes no more steps with this optimizer: it has closed it, or has left after an error (see "
                "there). Make the same number of steps on all learners of a super learner, then close."
            )
        try:
            world.collectives.require_step(
                self.averaged_sets, self.mates.sets, [ranks[mate] for mate in late]
            )
        except CollectiveMismatchError as error:
            if self.plan.in_step is not None:  # the round of this step would wait for that mate
                self._leave(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    def _leave(self, error: CollectiveMismatchError) -> None:
        """Make no more steps, and take part in no more operations."""
        self.mates.closes()
        self.stopped = self.stopped or "a step and an operation waited for each other"
        self.world.collectives.leave(str(error))

    def averaged_sets(self) -> tuple[int, int]:
        """See Collectives.steps; of sets of gradients, which may differ from steps."""
        return self._thread, self.mates.sets

    def _require_quorum(self) -> None:
        """On all learners of the super learner alike: the leader noted it before the step's all-reduce."""
        membership, quorum = self.world.membership, self.spec.config.quorum
        if quorum is not None and membership.is_minority:
            raise QuorumLostError(
                f"step {self.step}, super learner {membership.own}: half or more of the super learners have "
                "failed, or a cut network hides them, and HVD_ADPSGD_QUORUM is majority. The model is that "
                "before this step: save a checkpoint and exit. Start the job again from the newest one."
            )

    @torch.no_grad()
    def before_optimizer(self) -> bool:
        """The super learner's gradients are averaged. False if there is nothing to step with."""
        if not self._averages_gradients:
            return True
        if any(p.grad is not None and p.grad.is_sparse for p in self.rule.model):
            self.spec.strategy.refuse("a sparse gradient", ModelMismatchError)
        self.take_in()
        self.rule.before_optimizer()
        return self.step > 0

    @torch.no_grad()
    def finish_step(self) -> None:
        """Apply the published corrections, offer the model, and run the round of this step, if any.

        Raises:
            NonFiniteModelError: if a parameter is infinite or not a number, with nonfinite="raise". The
                model was not offered.
        """
        self._run_owed_rounds()
        with self.record.part("collect", self.step):
            finite = self._collect()
        with self.record.part("offer", self.step):
            self._offer(finite, in_step=self._steps.due)
        self._steps.end()
        self.record.end_step(self.engine)
        usage.end_step(self.world.rank == self.world.collectives.ranks[0])
        if not finite:
            _report_nonfinite(self)

    def _collect(self) -> bool:
        """Apply pending corrections, then refresh the mirror. True if all parameters are finite."""
        if self._averages_gradients:  # applied before the optimizer; these are for the next step
            return self.absorb()
        self._publish_inside()
        self.rule.pass_time()
        self.rule.before_corrections()
        finite = self.absorb(waits=not self._lands_later)
        self.rule.after_corrections()
        return finite

    def _offer(self, finite: bool, in_step: bool = True) -> None:
        """Offer the model to peers; with `in_step`, begin the round and count the step."""
        if not self._lands_later:  # else it is offered when it has come
            self.engine.offer(self.step, finite)
        self.world.membership.update(self._peer_news(), self.step)
        if in_step:
            self._round()
            self.step += 1

    def _round(self) -> None:
        """Begin the round that follows this step, if one is due; with order AFTER, wait for it."""
        rounds = self.plan.in_step
        if rounds is None or not rounds.is_due(self.step):
            return
        self._begun = self.step
        self.engine.rounds.begin(self.step // rounds.period)
        if rounds.order != AFTER:
            return
        self.rule.before_round()
        self.take_in()  # publishing waits for the round
        self.rule.after_round()
        self.absorb()
        self.engine.resume()

    def made(self) -> tuple[int, int]:
        """The thread that makes the steps, and how many were made; see Collectives.steps."""
        return self._thread, self.step

    def _require_step(self, peers: Collection[int] | None) -> None:
        """While a round waits for these super learners, None for all: see Collectives.require_step."""
        groups = self.world.groups
        leaders = [groups[peer][0] for peer in (range(len(groups)) if peers is None else peers)]
        try:
            self.world.collectives.require_step(self.made, self._begun, leaders)
        except CollectiveMismatchError as error:
            if self.world.inner_size > 1:  # its mates wait for this step
                self._leave(error)
            raise horovods(CollectiveMismatchError)(*error.args) from None

    @torch.no_grad()
    def catch_up(self) -> None:
        """Run owed rounds before an operation over all learners; else it and the rounds deadlock.

        A round is owed if a step is skipped after synchronize() (GradScaler does on overflow), or if a
        global operation comes between synchronize() and step().
        """
        if self.stopped or self._steps.inside or self.plan.in_step is None or self.engine.failed:
            return
        self._steps.all_wait()
        self._run_owed_rounds()

    def _run_owed_rounds(self) -> None:
        """Run the rounds of skipped steps with the current parameters.

        Raises:
            UnsupportedOptimizerError: if the strategy refuses skipped steps.
        """
        while self._steps.owed:
            self.spec.strategy.refuse("a skipped step()", UnsupportedOptimizerError)
            self._steps.owed -= 1
            self._offer(self.take_in())

    def take_in(self) -> bool:
        """Publish and apply. True if every parameter is finite."""
        self.settle()  # else the publication is put off
        self._publish_inside()
        return self.absorb()

    def _publish_inside(self) -> None:
        """Publish, unless this step's gradient all-reduce has made a published slot readable.

        A learner that has called join() does not come: corrections wait in the open slot.
        """
        if not self.engine.memory.readable and not self.mates.someone_has_joined():
            self.engine.publish(self.step)
            if self.world.inner_size > 1:
                self.inner_barrier()

    def inner_barrier(self) -> None:
        """Barrier of its learners: afterwards the published slot is readable, the other one is not read."""
        self.settle()  # devices read it too
        with inner_failures(self), mpi_failures("in the super learner"):
            barrier(self.world.inner)
        self.engine.memory.all_met()

    def absorb(self, waits: bool = True) -> bool:
        """Apply the readable slot, if there is one, and copy the tensors to the mirror.

        Args:
            waits: until devices have done so. Else the model is offered when its copy has come.

        Returns:
            Whether every parameter is finite; without `waits` those of the last steps that devices know of.
        """
        bad = self._absorb_staged(waits) if self._staging is not None else self._absorb_in_place()
        if bad is not None:
            self.nonfinite_step = bad
        return bad is None

    def _absorb_in_place(self) -> int | None:
        """On the host. The step, if a parameter is not finite."""
        finite, corrected = self.engine.memory.absorb(
            self.parameters.addresses(), self.step, pass_threads(self.world.local_size)
        )
        if corrected:
            self.parameters.write_back()
        return None if finite else self.step

    def _absorb_staged(self, waits: bool) -> int | None:
        """On devices. The last step whose parameters are not finite, if one is found."""
        assert self._staging is not None
        if waits:
            self._staging.settle()
            self._staging.absorb(self.step, True)
            self._staging.settle()
            found = self._staging.nonfinite()
        else:
            wants = self.engine.wants_copy(self.step)
            self._staging.absorb(self.step, wants, self.engine.offer)
            found = self._staging.nonfinite(self.step if self.world.inner_size > 1 else None)
        return max(found, default=None)

    def add_pending(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Add to copies of tensors the corrections that these lack, which stay pending. Leaders only.

        Args:
            copies: by id of the tensor; contiguous, on the host, float64 for float64 tensors, else float32.
        """
        places = [
            copies[id(t)].data_ptr() if id(t) in copies else 0 for t in self.parameters.tensors
        ]
        assert isinstance(self.engine.memory, ModelMemory), "with shards nothing is pending then"
        self.engine.memory.add_pending(np.array(places, dtype=np.uintp))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were replaced while averaging is paused: drop what rounding to 16 bits holds back of them."""
        replaced = {id(tensor) for tensor in tensors}
        mine = enumerate(self.parameters.tensors)
        self.engine.memory.forget([i for i, tensor in mine if id(tensor) in replaced])

    # ---- beside the step ---------------------------------------------------------------------

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Average these tensors too, from the next step on. All learners of the super learner call it.

        Raises:
            ModelMismatchError: on every learner of the super learner, if they add different tensors.
        """
        named = list(named)
        require_same_inside(self.world, "add_param_group", named)
        self.trained.update(id(tensor) for _, tensor in named)
        self.settle()
        self.specs.append(self.parameters.add(named))
        self.engine.memory.extend(self.specs[-1])
        self._stage()

    def drop(self) -> None:
        """The optimizer was garbage collected: `stop_dropped` stops this later.

        The collector runs this on any thread, which may hold any lock or be one that `stop` waits for.
        """
        self.dropped = not self.stopped
        self.stopped = self.stopped or "the optimizer was dropped"

    def stop(self, why: str = "hvd.shutdown() was called") -> None:
        """Stop averaging and leave the peers; bounded. Called by hvd.shutdown()."""
        self.dropped = False
        self.stopped = self.stopped or why
        with contextlib.suppress(IndexError):  # another thread stops it, too
            while True:
                self.at_stop.pop()()
        world = self.world
        _remove(world.collectives.asked, self.mates.asks)
        _remove(world.collectives.before, self.catch_up)
        _remove(world.collectives.steps, self.averaged_sets)
        _remove(world.collectives.steps, self.made)
        world.teardown.forget(self.stop)
        world.departure.forget(self._depart)
        _remove(world.membership.sources, self._peer_news)
        _remove(_live, self)
        self.engine.stop(broken=world.teardown.fails)
        world.membership.update(self._peer_news(), self.step)
        if not world.teardown.has_begun:
            world.membership.rejoin()
        self.record.events(self.engine)
        if self._staging is not None:
            self._staging.close()
        self.engine.release()

    def _peer_news(self) -> list[tuple[int, PeerState]]:
        """Of the leaders; a learner that has failed takes its super learner, and so its leader, along."""
        news = self.engine.report() if self.world.is_leader else []
        if any(state is PeerState.FAILED for _, state in news):
            self.world.collectives.look_for_departures()  # of one that has left without an engine
        return news

    def _depart(self) -> None:
        """Leave the peers, beside a trainer's thread that may be anywhere; the process ends next."""
        self.engine.stop(within_s=preemption.DEPARTURE_S)


def _remove(items: list[Any], item: Any) -> None:
    """Remove it if it is there, in one step: another thread may do the same."""
    with contextlib.suppress(ValueError):
        items.remove(item)


def _report_nonfinite(averaging: Averaging) -> None:
    averaging.nonfinite_steps += 1
    raises = averaging.spec.config.nonfinite == "raise"
    if not raises and averaging.nonfinite_steps > 1:
        return
    names = ", ".join(averaging.parameters.nonfinite()[:3])
    where = f" ({names})" if names else ""
    message = (
        f"step {averaging.nonfinite_step}: the model of super learner {averaging.world.super_rank} holds "
        f"NaN or Inf{where}; it is not offered to the others. Lower the learning rate, warm it up, or "
        "clip gradients; if they are clipped, look at the last batch. "
        "HVD_ADPSGD_NONFINITE=skip trains on alone until the model is finite."
    )
    if raises:
        raise NonFiniteModelError(message)
    log.warning("%s", message)


def _shards(world: World, spec: AveragingSpec) -> int:
    """The number of shards of the model, the same on all learners; logged where HVD_ADPSGD_SHARD is set."""
    if spec.config.shard is None:
        return 1
    why = ""
    if not spec.strategy.is_gossip:
        why = f"averaging={spec.strategy.spec()} is not of pairs alone"
    elif spec.buffers:
        why = "buffers= are those of the leader"
    elif world.shards == 1:
        why = "one super learner, or one learner in a super learner"
    if world.rank == 0:
        sizes = sorted({len(group) for group in world.groups})
        log.info(
            "HVD_ADPSGD_SHARD: %s (learners per super learner: %s).",
            f"no shards, {why}" if why else f"{world.shards} shards",
            ", ".join(map(str, sizes)),
        )
    return 1 if why else world.shards


def _gather_from_counterparts(world: World, has_shard: bool, value: Any) -> list[Any]:
    """The values by rank in `outer`; None for one that has failed. A collective of all learners."""
    mine = (world.inner_rank, world.super_rank, value) if has_shard else None
    told = {
        peer: given
        for place, peer, given in filter(None, world.collectives.gather("averaging", mine))
        if place == world.inner_rank
    }
    return [told.get(peer) for peer in world.members or range(world.super_size)]


def _with_chunks_for(config: Config, tensors: Sequence[TensorSpec]) -> Config:
    """With chunks of at most an eighth of the model, or the default size: an engine holds about 200."""
    model_kib = sum(tensor.nbytes for tensor in tensors) // 1024
    return config.replace(chunk_kib=min(config.chunk_kib, max(Config.chunk_kib, model_kib // 8)))
