"""Creation, replacement and end of an optimizer's engine, and its reports to membership and timeline."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.engine.shard_memory import ModelMemory
from hvd_adpsgd.launch.world import Communicators, World
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.training.averaged_tensors import AveragedTensors
from hvd_adpsgd.training.parameters import AveragingSpec
from hvd_adpsgd.training.super_learner import SuperLearner, meeting_of
from hvd_adpsgd.training.timeline import StepRecord


class Engines:
    """The engine of one optimizer: made, replaced when a super learner joins, stopped and released.

    All learners of all super learners make an `Engines` together.

    Args:
        super_learner: the super learner whose model the engine averages.
        spec: what is averaged, and how.
        tensors: the averaged tensors.
        record: timeline of the steps, which also gets the engine's events.

    Attributes:
        tells: whether this learner's engine tells of peers.
        current: the engine; on a joining super learner it has no thread until that has joined.
    """

    def __init__(
        self,
        super_learner: SuperLearner,
        spec: AveragingSpec,
        tensors: AveragedTensors,
        record: StepRecord,
    ):
        self._super_learner, self._strategy, self._tensors = super_learner, spec.strategy, tensors
        self._record = record
        self.tells = super_learner.world.is_leader or tensors.are_sharded
        self._config = _with_chunks_for(spec.config, tensors.specs[0])
        self._ahead: ModelMemory | None = None
        self.current = self._first_engine()
        try:
            tensors.bind(self.current.memory)
        except BaseException:
            self.current.stop()  # stop here: the caller gets no reference to the engine
            self.current.release()
            raise

    def _first_engine(self) -> Engine:
        world, has_shard = self._world, self._has_shard

        def gather(value: Any) -> list[Any]:
            return _gather_from_counterparts(world, has_shard, value)

        names, holders = world.membership.names, self.holders(world.inner)
        gathers = None if world.collectives.joining else gather
        return self._make(
            names, holders, world.outer if has_shard else None, world.members, gathers
        )

    def for_new_group(
        self, names: Sequence[str], comms: Communicators, members: Sequence[int]
    ) -> Engine:
        """Make an engine for the job that includes a joining super learner, in the paused engine's memory.

        Args:
            names: of that job's super learners.
            comms: new communicators of that job's learners.
            members: super_ranks of the super learners in comms.outer, by rank there.
        """
        outer = comms.outer if self._has_shard else None
        memory = self._ahead or self.current.memory
        inner = self.holders(comms.inner)
        return self._make(names, inner, outer, members, None, memory, wire="tcp")

    def holders(self, inner: Any) -> Any:
        """Return the communicator of the learners that hold the same tensors, of a super learner's `inner`.

        None where each learner holds a part of its own.
        """
        return None if self._tensors.are_sharded else inner

    def make_memory_ahead(self) -> None:
        """Allocate, on a joining super learner, its next engine's memory before the other learners wait."""
        shows = self._has_shard and self._config.same_host == "memory"
        chunk, holders = self._config.chunk_kib * 1024, self.holders(self._world.inner)
        self._ahead = ModelMemory(chunk, holders, self._has_shard, shows, self._tensors.shards)
        for specs in self._tensors.specs:
            self._ahead.extend(specs)

    def replace(self, engine: Engine, within_s: float) -> None:
        """Replace the current engine by `engine`, in a pause between steps. Its counters start at 0.

        `within_s`: longest time in which the current one ends.
        """
        old = self.current
        # stop before `events`, which would miss events that the thread adds later; `release` frees the events
        old.stop(within_s=within_s)
        self._record.events(old)
        self._tensors.release()
        old.release(keeps_memory=old.memory is engine.memory)
        self.current, self._ahead = engine, None
        self._tensors.bind(engine.memory)

    def inner_barrier(self) -> None:
        """Wait at a barrier, after which learners of the super learner may read corrections from exchanges.

        After the barrier no learner reads another slot than the published one.
        """
        self._tensors.settle()  # devices may still read a buffer of corrections
        self._super_learner.barrier()
        self.current.memory.all_met()

    def peer_news(self) -> list[tuple[int, PeerState]]:
        """Return (super_rank, state) of peers whose state has changed; [] on learners that do not lead.

        Where each learner averages a part of its own, its engine tells it; the leader logs it.
        """
        return self.noticed(self.current.report()) if self.tells else []

    def noticed(self, news: list[tuple[int, PeerState]]) -> list[tuple[int, PeerState]]:
        """Return an engine's report, after looking for learners of failed peers that have left in order."""
        if any(state is PeerState.FAILED for _, state in news):
            self._world.collectives.poll_departures()
        return news

    def depart(self) -> None:
        """Stop the engine on SIGTERM, in bounded time, whatever the trainer's thread does meanwhile."""
        self.current.stop(within_s=preemption.DEPARTURE_S)

    def end(self) -> None:
        """Stop the engine, which notifies the peers, and free its memory; takes bounded time."""
        world = self._world
        self.current.stop(broken=world.teardown.fails or self._has_lost_a_learner())
        self._world.membership.update(self.peer_news(), self._super_learner.steps.step, ends=True)
        self.current.memory.own.training = self._world.membership.training_count
        if not world.teardown.has_begun:
            world.membership.rejoin()
        self._record.events(self.current)
        self._tensors.close()
        self.current.release()
        self._tensors.memory = self.current.memory  # after release() the engine's memory is empty

    def _has_lost_a_learner(self) -> bool:
        """Whether a learner of this super learner has ended without having said that it leaves.

        The script may not know it: it gets torch's error where torch averages its gradients.
        """
        world = self._world
        return not world.failed_inside(0) <= set(world.collectives.left())

    @property
    def _world(self) -> World:
        return self._super_learner.world

    @property
    def _has_shard(self) -> bool:
        """Whether this learner averages a shard of the model, or, as the leader, all of it."""
        return self._tensors.are_sharded or self._world.inner_rank < self._tensors.shards

    def _make(
        self,
        names: Sequence[str],
        inner: Any,
        outer: Any,
        members: Sequence[int],
        gather: Callable[[Any], list[Any]] | None,
        memory: ModelMemory | None = None,
        **options: Any,
    ) -> Engine:
        world = self._world
        engine = Engine(
            inner=inner,
            outer=outer,
            plan=self._strategy.plan(world.super_rank, len(names)),
            config=self._config.replace(**options),
            names=names,
            members=members,
            has_neighbours=world.local_size > world.inner_size,
            memory=memory,
            shards=self._tensors.shards,
        )
        engine.rounds.look = self._super_learner.require_step
        try:
            with meeting_of(world, "averaging", "wrapping"):
                for specs in self._tensors.specs if memory is None else ():
                    engine.memory.extend(specs)
            engine.start(gather)
        except BaseException:
            # the caller gets no reference to the engine, so nothing else would free it
            engine.stop()
            engine.release(keeps_memory=memory is not None)
            raise
        # at exit hvd.shutdown() stops the engine, and reports failures
        atexit.unregister(engine.stop)
        return engine


def _gather_from_counterparts(world: World, has_shard: bool, value: Any) -> list[Any]:
    """Return the values of all learners with this learner's shard, by rank in `outer`; None for a failed one.

    A collective of all learners.
    """
    mine = (world.inner_rank, world.super_rank, value) if has_shard else None
    told = {
        peer: given
        for place, peer, given in filter(None, world.collectives.gather("averaging", mine))
        if place == world.inner_rank
    }
    return [told.get(peer) for peer in world.members or range(world.super_size)]


def _with_chunks_for(config: Config, tensors: Sequence[TensorSpec]) -> Config:
    """Return `config` with its chunk size limited to an eighth of the model, but not below the default size.

    An engine allocates memory for about 200 chunks.
    """
    model_kib = sum(tensor.nbytes for tensor in tensors) // 1024
    return config.replace(chunk_kib=min(config.chunk_kib, max(Config.chunk_kib, model_kib // 8)))
