"""What exchanges cost a super learner, and how much they move: exchange_share="auto", wire_dtype="auto"."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.turns import LONGEST
from hvd_adpsgd.strategies.share_control import ShareControl, Spent
from hvd_adpsgd.training.timeline import Counters

_STEPS = 8  # between two looks at the counters
_LONG = 8.0  # times the usual time: such a step has an evaluation or a checkpoint in it


class Used(NamedTuple):
    """What a learner with an engine has used since some moment.

    Attributes:
        steps, seconds: steps, and their time.
        pass_s: the trainer's time to apply corrections, copy the model to the engine, and offer it.
        models: how many models' worth of chunks exchanges have changed.
        engine_s, training_s: CPU time of the engine's thread, and of the process's other threads.
    """

    steps: int
    seconds: float
    pass_s: float
    models: float
    engine_s: float
    training_s: float


def cost_s(used: Used, cores: float, every: int = 1, longest: int = 1) -> float:
    """Return by how many seconds exchanges have lengthened the steps.

    Of the trainer's pass over the model a chunk with a correction takes twice the memory traffic of one
    without, and of those without a part 1 / every is copied: with corrections in the part c of the chunks the
    pass moves t = 2 c + (1 - c) / every models. At the smallest share it moves 1 / longest, which does not
    count: exchanges cost (t - 1 / longest) / t of it, c / (1 + c) if both are 1. A CPU second of the engine
    takes 1 / cores of the learner's computing power, as far as training uses that.

    Args:
        used: by some steps.
        cores: cores of the host per learner.
        every: steps between two copies of a chunk without a correction.
        longest: the same, at the smallest share.
    """
    if used.steps <= 0 or used.seconds <= 0:
        return 0.0
    changed = min(1.0, used.models / used.steps)
    busy = min(1.0, used.training_s / (cores * used.seconds))
    moved = 2 * changed + (1 - changed) / every
    return used.pass_s * (1 - 1 / longest / moved) + busy * used.engine_s / cores


class AutoShare:
    """Chooses the share of the model that a learner's engine exchanges, and the bits, every few steps.

    With shards each engine has a share of its own.

    Args:
        config: the options.
        learners: learners on this host.
        cpu_s: returns the CPU seconds of this process.

    Attributes:
        control: has the share of the next exchanges, and their format between hosts.
    """

    def __init__(
        self, config: Config, learners: int, cpu_s: Callable[[], float] = time.process_time
    ):
        self.control = ShareControl(
            config.max_overhead, config.exchanges_per_step, chooses_bits=config.chooses_bits
        )
        self._cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) / learners)
        self._cpu_s = cpu_s
        self._engine: Engine | None = None
        self._used: Used | None = None
        self._cost_s = 0.0
        self._seconds, self._usual_s = 0.0, 0.0  # of all steps; moving average of a step

    def after_step(self, engine: Engine, counters: Counters) -> None:
        """Look at the counters, if it is time to, and let the next exchanges move another share."""
        if engine is not self._engine:  # the first one, or that of an admission
            self._engine, self._used = engine, None
            self.control.element_nbytes = engine.memory.own.layout.element_nbytes
            engine.move_share(self.control.share, self.control.wire_format)
        if self._was_long(counters.seconds):
            self._used = None
            self.control.restart()
        if counters.steps % _STEPS == 0 and (found := engine.counters()) is not None:
            self._look(engine, counters, found)

    def _was_long(self, seconds: float) -> bool:
        """Whether the last step, after which steps have taken `seconds`, had something else in it."""
        step_s, self._seconds = seconds - self._seconds, seconds
        if 0 < _LONG * self._usual_s < step_s:
            self._usual_s *= 1.25  # in case that steps stay so long
            return True
        self._usual_s += (step_s - self._usual_s) / (8 if self._usual_s else 1)
        return False

    def _look(self, engine: Engine, counters: Counters, found: dict[str, float]) -> None:
        engine_s = engine.cpu_s
        used = Used(
            counters.steps,
            counters.seconds,
            counters.sums["collect"] + counters.sums["offer"],
            found["chunks"] / max(1, engine.memory.own.layout.nchunks),
            engine_s,
            self._cpu_s() - engine_s,
        )
        if self._used is not None:
            spent = Used(
                used.steps - self._used.steps,
                *(now - then for now, then in zip(used[1:], self._used[1:], strict=True)),
            )
            every, _ = engine.memory.own.turns()
            longest = 1 if engine.memory.own.moves is None else LONGEST
            self._cost_s += cost_s(spent, self._cores, every, longest)
        self._used = used
        exchanges = int(found["exchanges_active"] + found["exchanges_passive"])
        totals = Spent(
            counters.steps,
            counters.seconds,
            self._cost_s,
            found["busy_s"],
            found["link_s"],
            exchanges,
            used.models,
            int(found["compared"]),
            found["square"],
            found["bytes_shared"]
            / max(1, sum(part.nbytes for part in engine.memory.own.layout.parts)),
        )
        self.control.decide(totals)
        engine.move_share(self.control.share, self.control.wire_format)
