"""Jobs in one process: engines on threads, each with the threads of its learners, for ThreadSanitizer.

    python jobs.py [NAME ...]

The engines, their memory, their rounds and their connections (TCP) are those that train. Every job without a
failure ends with a test of the mean of all models, so that it is known to have averaged.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.engine.store import Store
from hvd_adpsgd.formats import CHOSEN
from hvd_adpsgd.strategies import parse
from hvd_adpsgd.strategies.plan import AFTER, Rounds
from tests.gathers import Gathers, Mates, Rank, at_once

STEPS = 150
LONGEST_S = 120.0
CHUNK_KIB = 64
SIZES = (1, 70_000, 257)  # elements of the tensors, float64: nine chunks and two small ones
ADDED = 9000  # ... of a parameter group that is added
SLOTS = 3  # of corrections, of a super learner of several learners


class SuperLearner:
    """One engine, its leader's thread, and a second learner's thread that reads the same corrections.

    Args:
        grows: the step at which it adds a parameter group.
        follows: whether it has the second learner.
    """

    def __init__(self, rank: int, engine: Engine, steps: int, grows: int, follows: bool):
        self.engine, self.steps, self.grows, self.follows = engine, steps, grows, follows
        self.rng = np.random.default_rng(rank)
        self.meet = threading.Barrier(2 if follows else 1)
        self.sums: list[float] = []  # of all local updates, by tensor
        self.leader: list[np.ndarray] = []
        self.follower: list[np.ndarray] = []
        self.store = Store(SLOTS)  # the follower's
        self.slot = 0
        self.failures: list[BaseException] = []
        for size in SIZES:
            self.add(size)

    def add(self, size: int) -> None:
        memory = self.engine.memory
        memory.extend([TensorSpec(f"x{len(self.leader)}", (size,), "float64")])
        model = self.rng.standard_normal(size)
        self.sums.append(float(model.sum()))
        self.leader.append(model)
        self.follower.append(model.copy())
        shared = memory.own.areas[-1].shared
        for i, chunk in enumerate(memory.own.layout.parts[-1].chunks):
            slots = [slot.ctypes.data + chunk.offset for slot in shared.slots]
            flags = [row.ctypes.data + i for row in shared.flags]
            if self.follows:
                self.store.add_chunk(0, slots, flags, chunk.count, 1)

    def lead(self) -> None:
        self.guarded(self.train)

    def train(self) -> None:
        engine, plan = self.engine, self.engine._plan
        for step in range(self.steps):
            if step == self.grows:
                self.add(ADDED)
            engine.publish(step)
            self.meet.wait(LONGEST_S)
            engine.memory.all_met()
            self.update()
            engine.memory.absorb(addresses(self.leader), step, 1, False, engine.mark_next)
            engine.offer(step)
            if plan.in_step is not None and plan.in_step.is_due(step):
                self.round(step, plan.in_step)
            elif plan.in_step is None and step % 7 == 3:
                engine.pause(0.002)
                engine.resume()
            engine.report()
            if engine.config.chooses_bits:
                engine.move_share(0.5, CHOSEN[int(self.rng.integers(3))])
            engine.take_events()
            # so that steps and exchanges meet in many orders
            time.sleep(1e-4 * self.rng.integers(4))
        engine.rounds.finish()

    def round(self, step: int, rounds: Rounds) -> None:
        """As an optimizer does it (training/averaging.py)."""
        self.engine.rounds.begin(step // rounds.period)
        if rounds.order == AFTER:
            self.engine.publish(step)
            self.engine.memory.all_met()
            self.engine.memory.absorb(addresses(self.leader), step)
            self.engine.resume()

    def update(self) -> None:
        """The same for all elements of a tensor, and for both learners: gradients are averaged."""
        for i, model in enumerate(self.leader):
            more = self.rng.standard_normal()
            model += more
            self.follower[i] += more
            self.sums[i] += more * model.size

    def follow(self) -> None:
        self.guarded(self.absorb_all)

    def absorb_all(self) -> None:
        spans = self.engine.memory.own.layout.spans
        for step in range(self.steps):
            self.meet.wait(LONGEST_S)
            self.store.absorb(spans, addresses(self.follower), step % SLOTS, step)

    def guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self.failures.append(error)
            self.meet.abort()

    def settle(self) -> None:
        """At rest: apply what is pending."""
        for _ in range(2):
            self.engine.publish(self.steps)
            self.engine.memory.all_met()
            self.engine.memory.absorb(addresses(self.leader), self.steps)


def addresses(model: list[np.ndarray]) -> np.ndarray:
    return np.array([x.ctypes.data for x in model], dtype=np.uintp)


class Job:
    """Super learners that train together, while another thread looks at their engines."""

    def __init__(
        self,
        strategy: str,
        n: int = 3,
        follows: bool = False,
        grows: bool = False,
        steps: int = STEPS,
        **options: Any,
    ):
        often = {"exchanges_per_step": 4.0}
        config = Config(
            chunk_kib=CHUNK_KIB,
            wire="tcp",
            same_host="mpi",
            deadline_s=30.0,
            leave_deadline_s=30.0,
            timeline="unused",
            **(often | options),
        )
        self.members = []
        for i in range(n):
            engine = Engine(
                inner=Mates(0, 2 if follows and i == 0 else 1),
                outer=Rank(i, n),
                plan=parse(strategy).plan(i, n),
                config=config,
            )
            grown = 10 + 5 * i if grows else -1
            self.members.append(SuperLearner(i, engine, steps, grown, follows and i == 0))
        gathers = Gathers(n)
        at_once(*(lambda i=i: self.members[i].engine.start(gathers.of(i)) for i in range(n)))
        self.over = False

    def run(self) -> None:
        """Train; the mean of the models has moved by the local updates only."""
        acts = [m.lead for m in self.members] + [m.follow for m in self.members if m.follows]
        watcher = threading.Thread(target=self.watch)
        watcher.start()
        at_once(*acts)
        self.require_no_failure()
        for member in self.members:
            assert member.engine.pause(LONGEST_S), "an engine did not come to rest"
        for member in self.members:  # all are at rest: nothing more is merged
            assert member.engine.pause(LONGEST_S), "an engine did not come to rest"
            member.settle()
        self.require_mean()
        for member in self.members:
            member.engine.resume()
        at_once(*(m.engine.stop for m in self.members))
        self.over = True
        watcher.join()
        for member in self.members:
            member.engine.release()

    def run_with_a_failure(self) -> None:
        """One engine's thread ends in the middle; the others train and leave."""
        victim = self.members[-1]
        others = self.members[:-1]
        victim.steps //= 3

        def fail() -> None:
            victim.lead()
            victim.engine.stop(broken=True, within_s=0.0)  # without a departure

        watcher = threading.Thread(target=self.watch)
        watcher.start()
        at_once(fail, *(m.lead for m in others))
        self.require_no_failure()
        for member in others:
            until(lambda peers=member.engine.loop.peers: peers()[-1] == PeerState.FAILED)
        at_once(*(m.engine.stop for m in others))
        self.over = True
        watcher.join()

    def require_no_failure(self) -> None:
        for member in self.members:
            for error in member.failures:
                raise error

    def require_mean(self) -> None:
        for i in range(len(self.members[0].leader)):
            total = sum(float(m.leader[i].sum()) for m in self.members)
            expected = sum(m.sums[i] for m in self.members)
            assert abs(total - expected) < 1e-6 * (1 + abs(expected)), (i, total, expected)
        exchanges = sum(m.engine.metrics()["exchanges"] for m in self.members)
        means = sum(m.engine.metrics()["means"] for m in self.members)
        assert exchanges + means > 0, "nothing was averaged"
        print(f"  {exchanges} exchanges, {means} means", flush=True)

    def watch(self) -> None:
        """What a signal, a report or a test asks of a running engine."""
        while not self.over:
            for member in self.members:
                loop, store = member.engine.loop, member.engine.memory.own.store
                if loop is None:
                    continue
                loop.view(), loop.counters(), loop.peers(), loop.peer_events()
                loop.fault(), loop.finished(), loop.cpu_s(), loop.void_chunks(), loop.met(0)
                store.left_out(1), len(store)
            time.sleep(1e-3)


def until(fact: Callable[[], bool]) -> None:
    ends = time.monotonic() + LONGEST_S
    while not fact():
        assert time.monotonic() < ends, "not in time"
        time.sleep(1e-3)


JOBS: dict[str, Callable[[], None]] = {
    "pairs": lambda: Job("random_pairs").run(),
    "ring": lambda: Job("random_ring").run(),
    "few bits": lambda: Job("random_pairs", wire_dtype="int8").run(),
    "chosen bits": lambda: Job("random_pairs", wire_dtype="auto", exchange_share="auto").run(),
    "node": lambda: Job("random_pairs", follows=True).run(),
    "grows": lambda: Job("random_pairs", grows=True).run(),
    # steps leave out chunks, and copy those that the next exchange moves
    "small shares": lambda: Job(
        "random_pairs", follows=True, exchange_share=0.1, exchanges_per_step=1.0
    ).run(),
    "rounds": lambda: Job("synchronous_gossip:order=awc+random_pairs", n=4).run(),
    "means": lambda: Job("delay_by_one").run(),
    "both": lambda: Job("gossip_pga:period=4+random_ring").run(),
    "failure": lambda: Job("random_pairs", n=4).run_with_a_failure(),
    "failure in a mean": lambda: Job("periodic_averaging:period=3").run_with_a_failure(),
}


def main() -> None:
    for name in sys.argv[1:] or JOBS:
        began = time.monotonic()
        print(f"{name}:", flush=True)
        try:
            JOBS[name]()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # other threads still run
        print(f"  {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
