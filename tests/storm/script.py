"""A simulator's scenario, as a script for real processes: who commits which fault, at which event.

Times of the scenario become steps, and places within them: a fault is committed at an event, so a slow
machine plays the same script. What real processes cannot do is left out by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hvd_adpsgd_lab.simulation.chance import Chance
from hvd_adpsgd_lab.simulation.scenario import Fault as Drawn
from hvd_adpsgd_lab.simulation.scenario import Scenario

from hvd_adpsgd.config import environment_name

EPOCH = 5  # steps between two checkpoints
KINDS = {  # of the simulator, and ours
    "crash": "kill",
    "stop": "stop",
    "slow": "slow",
    "leave": "leave",
    "fail": "raise",
    "cut": "cut",
    "sever": "cut",
    "partition": "partition",
}
LINKS = ("cut", "partition")
LEFT_OUT = {
    "suspect": "only an engine takes another one for failed",
    "pause": "every checkpoint is one",
    "unfit": "a model with NaN has no exact mean",
    "extend": "tests/mpi/test_optimizer.py adds parameter groups",
    "bits": "tests/mpi/test_share.py lets a job choose them",
    "share": "tests/mpi/test_share.py lets a job choose it",
    "link": "tests/lab/test_auto_share_simulated.py has links that change",
    "break": "tests/launchers/test_launchers.py ends every connection of a job",
}
PLACES = (  # of equal chance
    *("moment", "moment", "exchange", "exchange", "rest", "rest"),
    *("step", "gradient", "before", "collective", "wrap"),
)
OF_TRAINER = ("step", "gradient", "before", "rest")  # where an exception can be raised
LONGEST_S, SHORTEST_S = 3.0, 0.05  # of a stop and of a cut


@dataclass(frozen=True)
class Fault:
    """What one learner does to itself.

    Attributes:
        kind: kill, segfault, stop (SIGSTOP, SIGCONT), slow, leave (SIGTERM), raise, exit, os_exit; cut: its
            host is off the switch; partition: some hosts are on another switch.
        who: its super learner; the number of super learners: whoever joins.
        inner: its rank in the super learner.
        step: the fault is committed at this step, or when the place is reached after it.
        place: step: behind it; gradient: in its all-reduce; exchange: some chunks are merged, others not;
            before: the others are at the checkpoint; rest: at the checkpoint, all exchanges are over;
            moment: at any moment of a step; collective: of operations over all learners; wrap: of
            DistributedOptimizer; admit: of hvd.admit; shutdown: in it, before the engine's departure.
        value: seconds of a stop, a cut and a partition; factor of slow.
        hosts: of a cut, a partition: those that are apart from the others.
    """

    kind: str
    who: int
    inner: int
    step: int
    place: str
    value: float = 0.0
    hosts: tuple[int, ...] = ()

    def __str__(self) -> str:
        value = f" ({self.value:g})" if self.value else ""
        hosts = f", hosts {list(self.hosts)}" if self.hosts else ""
        return (
            f"{self.kind} {self.who}.{self.inner} at step {self.step}, {self.place}{value}{hosts}"
        )


@dataclass(frozen=True)
class Script:
    """A job and its faults.

    Attributes:
        seed: of the script.
        scenario: seed of the simulator's scenario.
        launcher: "mpirun" or "srun".
        n, k: super learners, and learners of each.
        epochs: of EPOCH steps, at least.
        strategy, dtype, share, rate: arguments of DistributedOptimizer.
        chunks: of the model, each of 64 KiB.
        variables: of the environment.
        joins: None, "replacement" (of whoever is lost) or "candidate" (one that was not there at the start).
        faults: in the order of the scenario.
        left_out: what of the scenario is not played.
    """

    seed: int
    scenario: int
    launcher: str
    n: int
    k: int
    epochs: int
    strategy: str
    dtype: str
    share: float
    rate: float
    chunks: int
    variables: dict[str, str]
    joins: str | None
    faults: tuple[Fault, ...]
    left_out: tuple[str, ...]

    @property
    def conserves(self) -> bool:
        """Whether averaging leaves the sum of all models as it is, by the strategy's law."""
        moves = ("noloco", "delayed_gradients")
        return not self.strategy.startswith(moves) and "block_momentum" not in self.strategy

    @property
    def needs_hosts(self) -> bool:
        """Whether each super learner has a host of its own, whose link can be cut."""
        return any(fault.kind in LINKS for fault in self.faults)

    def without_hosts(self, why: str) -> Script:
        """The same without faults of links."""
        faults = tuple(fault for fault in self.faults if fault.kind not in LINKS)
        left = (*self.left_out, f"{', '.join(LINKS)}: {why}")
        return dataclasses.replace(self, faults=faults, left_out=left)

    @property
    def is_in_step(self) -> bool:
        """Whether super learners average when all or pairs have come to the same step, and only then."""
        return self.strategy.startswith(("delay", "periodic", "synchronous"))

    @property
    def rounds_on_wire(self) -> bool:
        """Whether models travel in fewer bits than they have."""
        return "HVD_ADPSGD_WIRE_DTYPE" in self.variables

    def to_json(self) -> str:
        """For a learner."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Script:
        """The inverse of to_json."""
        found = json.loads(text)
        faults = tuple(
            Fault(**{**fault, "hosts": tuple(fault["hosts"])}) for fault in found["faults"]
        )
        return cls(**{**found, "faults": faults, "left_out": tuple(found["left_out"])})

    def __str__(self) -> str:
        variables = " ".join(
            f"{k.removeprefix('HVD_ADPSGD_')}={v}" for k, v in self.variables.items()
        )
        lines = [
            f"seed {self.seed} (scenario {self.scenario}): {self.n} super learners of {self.k}, "
            f"{self.strategy}, {self.launcher}",
            f"  {self.epochs} epochs of {EPOCH} steps, {self.chunks} chunks of {self.dtype}, {self.rate:g} "
            f"exchanges per step of {self.share:g} of the model; joins: {self.joins or 'nobody'}",
            f"  {variables}",
        ]
        lines += [f"  {fault}" for fault in self.faults]
        lines += [f"  left out: {what}" for what in self.left_out]
        return "\n".join(lines)


def script_of(seed: int) -> Script:
    """The script of a seed, the same on every machine: the first scenario from 1000 seed on with a fault."""
    drawn = map(Scenario.random, itertools.count(1000 * seed))
    s = next(s for s in drawn if any(fault.kind in KINDS for fault in s.faults))
    c = Chance(2**41 + seed)
    strategy = "random_pairs" if s.config.averaging == "synchronous" else s.config.averaging
    k = 2 if strategy != "a2cid2" and any(x.node_s for x in s.learners) and c.happens(0.5) else 1
    n = min(s.size, 4 if k == 1 else 3)
    epochs = max(4, min(6, round(s.steps / EPOCH)))
    has_links = any(KINDS.get(fault.kind) in LINKS for fault in s.faults)
    joins = None if has_links else _joins(s, c)
    faults, left_out = [], []
    if s.config.averaging == "synchronous":
        left_out.append(
            "synchronous: in plain Horovod a failure ends the job; random_pairs in its place"
        )
    for drawn in s.faults:
        if drawn.kind in KINDS:
            faults.append(_played(drawn, s, c, n, k, epochs, joins))
        elif drawn.kind != "join":
            left_out.append(f"{drawn.kind}: {LEFT_OUT[drawn.kind]}")
    launcher, wire = c.choose((("mpirun", "mpi"), ("mpirun", "tcp"), ("srun", "tcp")))
    if has_links:
        launcher, wire = "srun", "tcp"  # mpirun reaches hosts by ssh
    return Script(
        seed=seed,
        scenario=s.seed,
        launcher=launcher,
        n=n,
        k=k,
        epochs=epochs,
        strategy=strategy,
        dtype=s.dtype,
        share=s.config.first_share if _has_pairs(strategy) else 1.0,
        rate=s.learners[0].rate,
        chunks=s.chunks,
        variables=_variables(s, k, wire, _has_pairs(strategy)),
        joins=joins,
        faults=tuple(faults),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def drift(super_rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """What a super learner adds to its model in each step: whole numbers from -8 to 8, other ones in each."""
    return (np.arange(math.prod(shape)) * (super_rank + 3) % 17 - 8.0).reshape(shape)


def _joins(s: Scenario, c: Chance) -> str | None:
    """Who joins: as the scenario says, and in every fifth script more."""
    numbers = [fault.who for fault in s.faults if fault.kind == "join"]
    if not numbers and not c.happens(0.2):
        return None
    return "candidate" if s.size in numbers or c.happens(0.4) else "replacement"


def _has_pairs(strategy: str) -> bool:
    """Whether parts of the model, and 16-bit numbers, may travel."""
    return any(word in strategy for word in ("random", "ring", "a2cid2"))


def _played(
    drawn: Drawn, s: Scenario, c: Chance, n: int, k: int, epochs: int, joins: str | None
) -> Fault:
    kind = KINDS[drawn.kind]
    if kind == "kill" and c.happens(0.25):
        kind = "segfault"
    who = n if drawn.who == s.size else drawn.who % n
    steps, longest_s = epochs * EPOCH, s.steps * min(x.step_s for x in s.learners)
    step = int(steps * drawn.at_s / longest_s)
    place = c.choose(OF_TRAINER if kind == "raise" else (*PLACES, "admit") if joins else PLACES)
    if kind == "slow":
        place = "step"
    if place == "wrap":
        step = 0
    elif joins:
        step %= steps  # who fails in shutdown() is not replaced
    elif step >= steps:
        step, place = steps - 1, "shutdown" if kind not in ("raise", "slow") else "step"
    value = drawn.value
    if kind == "stop" or kind in LINKS:
        value = max(SHORTEST_S, min(value, LONGEST_S))
    apart = {who, *(peer % n for peer in drawn.peers)} if kind == "partition" else {who}
    hosts = tuple(sorted(apart if len(apart) < n else {who})) if kind in LINKS else ()
    return Fault(kind, who, c.integer(0, k - 1), step, place, value, hosts)


def _variables(s: Scenario, k: int, wire: str, has_pairs: bool) -> dict[str, str]:
    kind: Any = s.config.wire_dtype
    found: dict[str, Any] = {
        "SUPER_LEARNER_SIZE": k,
        "WIRE": wire,
        "SAME_HOST": "memory" if s.hosts else "mpi",
        "DEADLINE_S": max(0.05, s.learners[0].deadline_s),
        "LEAVE_DEADLINE_S": 2,
        "CHUNK_KIB": 64,
        # "auto" chooses the share, too, and not each strategy lets it
        "WIRE_DTYPE": {"auto": "int8"}.get(kind, kind) if has_pairs else None,
        "MAX_STALENESS": s.config.max_staleness or None,
    }
    given = {name.lower(): str(value) for name, value in found.items() if value is not None}
    return {environment_name(name): value for name, value in given.items()}
