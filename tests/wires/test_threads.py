"""Engines over TCP connections, each with its thread, all in this process and without MPI."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.connections import Connections
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.neighbours import Neighbours
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.engine.shard_memory import ModelMemory
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.strategies import Plan, parse
from hvd_adpsgd.training.engines import Engines
from tests.gathers import Gathers, Rank, at_once
from tests.holdings import holdings
from tests.launcher import wait_for

LONGEST_S = 60.0
ELEMENTS = 200_000  # float64: seven chunks


class SuperLearner:
    """An engine and its model."""

    def __init__(self, rank: int, size: int, strategy: str, **options: Any):
        plan = parse(strategy).plan(rank, size) if strategy else Plan.nobody(weight=1 / 2)
        config = Config(wire="tcp", same_host="mpi", leave_deadline_s=LONGEST_S, **options)
        self.engine = Engine(inner=None, outer=Rank(rank, size), plan=plan, config=config)
        self.model = np.random.default_rng(rank).standard_normal(ELEMENTS)
        self.engine.memory.extend([TensorSpec("model", self.model.shape, "float64")])
        self.rank, self.steps = rank, 0

    def start(self, gathers: Gathers) -> None:
        self.engine.start(gathers.of(self.rank))

    def step(self) -> None:
        """Add the corrections, and offer the model; its sum changes by nothing else."""
        address = np.array([self.model.ctypes.data], dtype=np.uintp)
        self.engine.publish(self.steps)
        self.engine.memory.absorb(address, self.steps)
        self.engine.offer(self.steps)
        self.steps += 1

    @property
    def connections(self) -> tuple[int, int, int, int]:
        assert self.engine._connections is not None
        return self.engine._connections.wire.connections


@pytest.fixture
def started() -> Iterator[Callable[..., list[SuperLearner]]]:
    """Starts n super learners; ends those that the test has not ended."""
    made: list[SuperLearner] = []

    def start(n: int, strategy: str = "", **options: Any) -> list[SuperLearner]:
        members = [SuperLearner(i, n, strategy, **options) for i in range(n)]
        gathers = Gathers(n)
        at_once(*(lambda m=m: m.start(gathers) for m in members))
        made.extend(members)
        return members

    yield start
    at_once(*(m.engine.stop for m in made))
    for member in made:
        member.engine.release()


def exchange(a: SuperLearner, b: SuperLearner) -> None:
    """One exchange between two idle engines, to its end on both sides."""
    for member in (a, b):
        member.step()
    loops = a.engine.loop, b.engine.loop
    assert loops[0] is not None and loops[1] is not None
    wanted = [loop.finished() + 1 for loop in loops]
    loops[0].ask(b.rank)
    for loop, count in zip(loops, wanted, strict=True):
        assert loop.wait_finished(count, LONGEST_S)
    for member in (a, b):
        member.step()


def states(member: SuperLearner) -> list[PeerState]:
    assert member.engine.loop is not None
    return [PeerState(state) for state in member.engine.loop.peers()]


@pytest.mark.parametrize(
    "strategy", ["random_pairs", "random_ring", "synchronous_gossip", "periodic_averaging:period=3"]
)
def test_the_mean_is_kept(started: Callable[..., list[SuperLearner]], strategy: str) -> None:
    """Promise 1, with chunks that travel over TCP while the models change."""
    members = started(3, strategy, chunk_kib=64, exchanges_per_step=4.0)
    before = sum(m.model for m in members)

    def train(member: SuperLearner) -> None:
        freely, ends = strategy.startswith("random"), time.monotonic() + LONGEST_S
        loop = member.engine.loop
        assert loop is not None
        while member.steps < 60 or (freely and loop.finished() == 0):
            assert time.monotonic() < ends
            member.step()
            member.engine.rounds.begin(member.steps)
            member.engine.rounds.finish()

    at_once(*(lambda m=m: train(m) for m in members))
    at_once(*(lambda m=m: m.engine.pause(LONGEST_S) for m in members))
    at_once(*(lambda m=m: m.engine.pause(LONGEST_S) for m in members))  # all are at rest
    for _ in range(2):
        for member in members:
            member.step()
    after = sum(m.model for m in members)
    assert np.abs(after - before).max() < 1e-9
    metrics = [m.engine.metrics() for m in members]
    assert sum(m["exchanges"] + m["means"] for m in metrics) > 0, "nothing was averaged"
    for member in members:
        member.engine.resume()


def test_an_exchange_averages_exactly(started: Callable[..., list[SuperLearner]]) -> None:
    a, b = started(2)
    expected = (a.model + b.model) / 2
    exchange(a, b)
    np.testing.assert_allclose(a.model, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(b.model, expected, rtol=0, atol=1e-12)


def test_nobody_dials_before_there_is_something_to_say(
    started: Callable[..., list[SuperLearner]],
) -> None:
    a, b, c = started(3, report_s=0)
    exchange(a, b)
    assert [m.connections for m in (a, b, c)] == [(1, 1, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0)]


def of_optimizer(engine: Engine, **world: Any) -> Engines:
    """What an optimizer has around its engine, without the rest of a job."""
    engines = Engines.__new__(Engines)
    engines.current, engines._ahead, engines.tells = engine, None, True
    engines._record, engines._tensors = mock.Mock(), mock.Mock(are_sharded=False)
    engines._super_learner = mock.Mock(world=mock.Mock(**world))
    return engines


def test_a_replaced_engine_does_not_wait_for_answers() -> None:
    """Where all leave at once, nobody answers the last departure: waiting takes half of leave_deadline_s."""
    last, gone = (SuperLearner(i, 2, "") for i in range(2))
    gathers, loop = Gathers(2), gone.engine.loop
    assert loop is not None
    at_once(
        lambda: last.start(gathers),  # the other one only connects: its engine takes no turns
        lambda: gone.engine._meet_leaders(loop, gathers.of(1)),
    )
    began = time.monotonic()
    of_optimizer(last.engine).replace(mock.Mock(memory=last.engine.memory), 0.5)
    assert time.monotonic() - began < LONGEST_S / 4
    gone.engine.stop()
    gone.engine.release()


@pytest.mark.parametrize(
    ("left", "state"), [([], PeerState.FAILED), ([7], PeerState.LEFT)], ids=["lost", "left"]
)
def test_who_has_lost_a_mate_has_failed(
    started: Callable[..., list[SuperLearner]], left: list[int], state: PeerState
) -> None:
    """Though its script caught what it got for the mate, learner 7; one that said that it leaves is none."""
    a, b = started(2)
    exchange(a, b)
    engines = of_optimizer(
        b.engine,
        failed_inside=lambda seconds: {7},
        collectives=mock.Mock(left=lambda: left),
        teardown=mock.Mock(fails=False),
    )
    engines.end()
    wait_for(lambda: states(a)[1] != PeerState.ALIVE, "the end of b")
    assert states(a)[1] is state


def engines_of(rank: int, size: int) -> Engines:
    """What makes the engine of an optimizer, without the rest of a job."""
    engines = Engines.__new__(Engines)
    engines._config = Config(wire="tcp", chunk_kib=64)
    engines._strategy = parse("random_pairs")
    engines._tensors = mock.Mock(specs=[[TensorSpec("model", (ELEMENTS,), "float64")]], shards=1)
    world = mock.Mock(super_rank=rank, local_size=size, inner_size=1)
    engines._super_learner, engines._look = mock.Mock(world=world), None
    return engines


@pytest.mark.parametrize("shared", [False, True], ids=["memory made", "memory of another engine"])
@pytest.mark.parametrize("failing", range(Connections.GATHERS + Neighbours.GATHERS))
def test_a_start_that_fails_leaves_nothing(failing: int, shared: bool) -> None:
    """Each learner loses a peer in another gather; an engine for a job with a joining one uses old memory."""
    n = 2

    def attempt(rank: int, gathers: Gathers, barred: int, memory: ModelMemory | None) -> None:
        calls = itertools.count()

        def gather(value: Any) -> list[Any]:
            if next(calls) == barred:
                raise PeerFailedError("a peer has ended")
            return gathers.of(rank)(value)

        outer, names = Rank(rank, n), [str(i) for i in range(n)]
        made = engines_of(rank, n)._make(names, None, outer, (), gather, memory)
        made.stop()
        made.release(keeps_memory=memory is not None)

    def attempts(barred: int) -> None:
        gathers = Gathers(n)
        at_once(*(lambda i=i: attempt(i, gathers, barred, memories[i]) for i in range(n)))

    memories: list[ModelMemory | None] = [None] * n
    if shared:
        memories = [ModelMemory(65536, None, True, True) for _ in range(n)]
        for memory in memories:
            assert memory is not None
            memory.extend([TensorSpec("model", (ELEMENTS,), "float64")])
    attempts(-1)  # what stays for good, such as threads of libraries, is there now
    before = holdings()
    with pytest.raises(PeerFailedError):
        attempts(failing)
    assert not holdings() - before
    for memory in filter(None, memories):
        memory.own.hide()
