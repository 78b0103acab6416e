"""How the engine of an optimizer is made: at first, and again for the job with a joining super learner."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.model_memory import ModelMemory
from hvd_adpsgd.joining.candidates import JoinOffer
from hvd_adpsgd.joining.reconnect import NewGroup
from hvd_adpsgd.launch.world import World, names_of
from hvd_adpsgd.training.cores import engine_cores
from hvd_adpsgd.training.parameters import AveragingSpec
from hvd_adpsgd.training.super_learner import wrapping_failures

__all__ = ["Engines"]


class Engines:
    """Makes engines for the same tensors; all learners of all super learners make one together.

    Args:
        spec: what is averaged, and how.
        specs: of the tensors, as they were added.
        shards: into how many the model is cut.
        look: called while an engine waits for a round: see StepRounds.look.
    """

    def __init__(
        self,
        spec: AveragingSpec,
        specs: Sequence[list[TensorSpec]],
        shards: int,
        look: Callable[..., None],
    ):
        self._spec, self._specs, self._shards, self._look = spec, specs, shards, look
        self._ahead: ModelMemory | None = None

    def first(self, world: World) -> Engine:
        """The engine of an optimizer that is wrapped, started.

        Until a super learner has joined its engine has no thread.
        """
        outer = world.outer if self._has_shard(world) else None

        def gather(value: Any) -> list[Any]:
            return _gather_from_counterparts(world, self._has_shard(world), value)

        return self._make(
            world,
            world.membership.names,
            world.inner,
            outer,
            world.members,
            None if world.collectives.joining else gather,
        )

    def for_new_group(
        self, world: World, offer: JoinOffer, new_group: NewGroup, memory: ModelMemory
    ) -> Engine:
        """An engine for the job with a joining super learner, in the memory of the paused one.

        Args:
            world: of this learner, before.
            offer: the job with the joining super learner.
            new_group: its learners, connected anew.
            memory: of the engine that this one replaces.
        """
        names, comms = names_of(offer.groups, offer.placements), new_group.comms
        outer = comms.outer if self._has_shard(world) else None
        memory = self._ahead or memory
        return self._make(
            world, names, comms.inner, outer, new_group.members, None, memory, wire="tcp"
        )

    def make_memory_ahead(self, world: World) -> None:
        """On a joining super learner, whose engine has had no thread: make its memory before others wait."""
        config, has_shard = self._spec.config, self._has_shard(world)
        shows = has_shard and config.same_host == "memory"
        self._ahead = ModelMemory(
            config.chunk_kib * 1024, world.inner, has_shard, shows, self._shards
        )
        for specs in self._specs:
            self._ahead.extend(specs)

    def is_replaced(self) -> None:
        """The engine for the new group is in use: the next one takes its memory."""
        self._ahead = None

    def _has_shard(self, world: World) -> bool:
        """Whether this learner averages a shard of the model, or, as the leader, all of it."""
        return world.inner_rank < self._shards

    def _make(
        self,
        world: World,
        names: Sequence[str],
        inner: Any,
        outer: Any,
        members: Sequence[int],
        gather: Callable[[Any], list[Any]] | None,
        memory: ModelMemory | None = None,
        **options: Any,
    ) -> Engine:
        engine = Engine(
            inner=inner,
            outer=outer,
            plan=self._spec.strategy.plan(world.super_rank, len(names)),
            config=self._spec.config.replace(**options),
            names=names,
            members=members,
            has_neighbours=world.local_size > (inner.Get_size() if inner else 1),
            memory=memory,
            shards=self._shards,
            cores=engine_cores(),
        )
        engine.rounds.look = self._look
        with wrapping_failures(world, self._spec.config.deadline_s):
            for specs in self._specs if memory is None else ():
                engine.memory.extend(specs)
        engine.start(gather)
        atexit.unregister(engine.stop)  # shutdown() must come first: it reports failures
        return engine


def _gather_from_counterparts(world: World, has_shard: bool, value: Any) -> list[Any]:
    """The values by rank in `outer`; None for one that has failed. A collective of all learners."""
    mine = (world.inner_rank, world.super_rank, value) if has_shard else None
    told = {
        peer: given
        for place, peer, given in filter(None, world.collectives.gather("averaging", mine))
        if place == world.inner_rank
    }
    return [told.get(peer) for peer in world.members or range(world.super_size)]
