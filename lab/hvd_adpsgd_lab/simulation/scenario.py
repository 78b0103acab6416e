"""Scenarios: a simulated job, its network and its faults as data, and a function that runs them.

`Scenario.random(seed)` draws a scenario from a seed; `run` lets real engines go through it in virtual time
and checks the library's promises. A scenario that breaks a promise does so in every run, on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine_options import EngineOptions
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.formats import AUTO, CHOSEN, FORMATS, OWN
from hvd_adpsgd.strategies import Rounds, parse
from hvd_adpsgd.strategies.validation import MOST_PREFERRED
from hvd_adpsgd_lab.simulation.bounds import SEED, Bound, check_fields, in_bound, in_bounds
from hvd_adpsgd_lab.simulation.chance import Chance
from hvd_adpsgd_lab.simulation.faults import FAULTS
from hvd_adpsgd_lab.simulation.job import Job
from hvd_adpsgd_lab.simulation.network import Network

GOSSIP = ("random_pairs", "fixed_ring", "random_ring")
STRATEGIES = (
    *GOSSIP,
    "random_pairs",  # listed twice: random scenarios have the default strategy twice as often
    "a2cid2",
    "noloco:period=2",
    "delay_by_one",
    "delayed_gradients",
    "periodic_averaging:period=3",
    "periodic_averaging:period=2,block_momentum=0.5,warm_up=2",
    "synchronous",
    *(f"gossip_pga:period=4+{base}" for base in GOSSIP),
    *(f"synchronous_gossip:order={order}+{base}" for order in ("awc", "atc") for base in GOSSIP),
)
# faults that `_random_faults` does not draw, but other functions do
_RARE = ("suspect", "join", "break", "link", "share", "bits")
_WITH_PEER = ("cut", "sever", "suspect", "break")
# seconds until a connection that ended is open again: least and largest power of ten; a time that is too long
_DIALED_S, _NEVER_DIALED_S = (-3.0, 0.3), 3.0
_DRAWN = tuple(kind for kind in FAULTS if kind not in _RARE)
DTYPES = ("float32", "float64", "float16")
DEFAULTS = Config(report_s=0.0)  # simulated engines report nothing, unless a scenario asks for it
CODES = {float(each.bits): each.code for each in CHOSEN}  # by the value of a fault "bits"
_WIRES = (None, None, *((None if each is OWN else each.name) for each in FORMATS), AUTO, AUTO)
Table = list[tuple[int, int]]
Engaged = tuple[list[int], float, Table | None]
LONGEST_S = 200.0  # longest run, in virtual time
TIME: Bound = (0.0, LONGEST_S)
BOUNDS: dict[str, Bound] = {
    "seed": SEED,
    "steps": (0, 10**6),
    "chunks": (1, 10**5),
    "later": (0, 10**5),
    "elements": (1, 10**4),
    "latency_s": TIME,
    "jitter": (0.0, 1e6),
    "late": (0.0, 1.0),
    "late_control": (0.0, 1.0),
    "rare_period": (1, 64),
    "prefer": (0.0, MOST_PREFERRED),
    "copy_every": (1, 64),
    "bytes_per_s": (1e-3, 1e15),
    "slack": (0.0, 1e6),
    "detect_s": TIME,
    "leave_deadline_s": TIME,
    "reports_s": TIME,
}
LEARNER_BOUNDS: dict[str, Bound] = {
    "rate": (0.0, 1e6),
    "step_s": TIME,
    "spread": (0.0, 1.0),
    "node_s": TIME,
    "deadline_s": TIME,
}
VALUES: dict[str, Bound] = {
    "slow": (1e-3, 1e6),
    "link": BOUNDS["bytes_per_s"],
    "share": (1e-6, 1.0),
    "bits": (0.0, 8.0),
    "extend": (0.0, float(BOUNDS["later"][1])),
}
LEARNERS: Bound = (1, 4096)
REPLAYED = "Pass what `simulate` has printed, or correct it."


@dataclass(frozen=True)
class Fault:
    """A fault that strikes one super learner; `peers` and `value` are arguments of Job.strike.

    Attributes:
        at_s: seconds after the start of the run.
        kind: one of FAULTS.
        who: number of the super learner. For join: the number that the joining super learner gets, that of a
            failed super learner or the next free one. Its process has the next free number.
        peers: for cut, sever, suspect and break: the other super learner; for partition: the super learners
            on the same side as `who`.
        value: for stop, cut, sever, partition and break: seconds; for slow: how many times slower; for link:
            bytes per second from then on; for share: the share of the model that its exchanges move from then
            on; for bits: their bits per element, if wire is "auto": 0 (all), 8 or 4; for extend: 0 for all of
            the later chunks, as one parameter group; else so many of them, each as a parameter group.
    """

    at_s: float
    kind: str
    who: int
    peers: tuple[int, ...] = ()
    value: float = 0.0

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments that Job.strike takes for this kind of fault."""
        if self.kind in ("cut", "sever", "break"):
            return (self.peers[0], self.value)
        if self.kind == "partition":
            return (self.peers, self.value)
        if self.kind == "suspect":
            return self.peers
        if self.kind == "bits":
            return (CODES[self.value],)
        if self.kind == "extend":
            return (int(self.value),)
        return (self.value,) if self.kind in ("stop", "slow", "link", "share") else ()


@dataclass(frozen=True)
class Learner:
    """Settings of one simulated super learner.

    Attributes:
        rate: exchanges per step.
        step_s: mean seconds of a step.
        spread: largest relative difference of a step from `step_s`.
        node_s: seconds of the super learner's all-reduce, 0 for a super learner of one learner.
        deadline_s: silence of a peer, in seconds, after which exchanges with it stop until it answers.
    """

    rate: float
    step_s: float
    spread: float
    node_s: float
    deadline_s: float


@dataclass(frozen=True)
class Scenario:
    """A simulated job, its network, and the faults that strike it.

    Attributes:
        seed: seed of all random choices during the run, such as delays of messages and lengths of steps.
        config: the options; but exchanges per step and times, shorter than options allow, are those below.
        steps: number of steps of each super learner.
        chunks, elements: number of chunks of the model, and of elements per chunk.
        later: number of chunks that are added later, with a parameter group.
        dtype: element type of the parameters.
        latency_s: smallest latency of a message, in seconds.
        jitter: a latency is `latency_s` times a number from 1 to 1 + jitter.
        late: probability that a message takes up to 200 latencies.
        late_control: probability that a control message takes up to 200 latencies, and chunks overtake it.
        bytes_per_s: bandwidth of each super learner's link.
        slack: largest delay of an engine's next poll, as a multiple of the pause that the engine asks for.
        detect_s: time in seconds within which each peer detects the end of a process.
        leave_deadline_s: the option of this name.
        learners: the super learners.
        hosts: the host of each super learner; super learners of one host read each other's models in
            shared memory. (): no shared memory.
        faults: the faults, in any order.
        reports_s: seconds between two messages with which a super learner sends reports to a peer; 0: none.
        rare_period: chunks with odd numbers move in every so-manyth exchange only.
        prefer: prefer_fast, also of strategies that have no such argument.
        copy_every: steps between two copies of a chunk without a correction to the engine.
        aims: whether a random half of the windows are where models differ most.
    """

    seed: int
    config: Config
    steps: int
    chunks: int
    later: int
    elements: int
    dtype: str
    latency_s: float
    jitter: float
    late: float
    bytes_per_s: float
    slack: float
    detect_s: float
    leave_deadline_s: float
    learners: tuple[Learner, ...]
    hosts: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()
    reports_s: float = 0.0
    late_control: float = 0.0
    rare_period: int = 1
    prefer: float = 0.0
    copy_every: int = 1
    aims: bool = False

    def __post_init__(self) -> None:
        in_bounds("scenario", self, BOUNDS, REPLAYED)
        _one_of("scenario: dtype", self.dtype, DTYPES)
        in_bound("scenario: the number of learners", self.size, LEARNERS, REPLAYED)
        for i, learner in enumerate(self.learners):
            in_bounds(f"scenario: learner {i}", learner, LEARNER_BOUNDS, REPLAYED)
        for i, fault in enumerate(self.faults):
            _check_fault(f"scenario: fault {i}", fault, self.processes)
            if fault.kind == "bits":
                _check_bits(f"scenario: fault {i}", fault, self.config)
        for host in self.hosts:
            in_bound("scenario: a host", host, (0, 10**6), REPLAYED)
        if self.hosts:
            in_bound(
                "scenario: the number of hosts", len(self.hosts), (self.size, self.size), REPLAYED
            )
        parse(self.config.averaging)

    @property
    def size(self) -> int:
        """Number of super learners, without a joining super learner."""
        return len(self.learners)

    @property
    def processes(self) -> int:
        """Number of simulated processes: one per super learner, joining ones included."""
        return self.size + self._joins

    @property
    def _joins(self) -> int:
        return sum(fault.kind == "join" for fault in self.faults)

    @property
    def streams(self) -> bool:
        """Whether messages travel over (TCP) connections, which faults may end."""
        return any(fault.kind == "break" for fault in self.faults)

    def with_options(self, **options: Any) -> Scenario:
        """Return the scenario with other options of training."""
        return dataclasses.replace(self, config=self.config.replace(**options))

    @classmethod
    def random(cls, seed: int) -> Scenario:
        """Return a random scenario for a seed: a seed gives the same scenario on every machine."""
        c = Chance(seed)
        strategy = c.choose(STRATEGIES)
        n = c.integer(4 if strategy == "a2cid2" else 2, 8)
        steps, step_s = c.integer(3, 24), c.magnitude(-3.5, -1.7)
        chunks, later, elements = c.integer(1, 21), c.integer(0, 3), c.integer(1, 3)
        latency_s, bytes_per_s = c.magnitude(-5, -3), c.magnitude(3, 9)
        leave_deadline_s = c.magnitude(-2, 0.5)
        # exchanges take several steps, and the deadline cuts the last exchanges short
        if c.happens(0.3):
            exchange_s = step_s * c.between(0.5, 10)
            bytes_per_s = float(f"{8 * elements * chunks / exchange_s:.3g}")
            leave_deadline_s = float(f"{exchange_s * c.between(0.3, 2):.3g}")
        drawn = cls(
            seed=seed,
            steps=steps,
            chunks=chunks,
            later=later,
            elements=elements,
            dtype=c.choose(("float64", "float64", "float32")),
            config=DEFAULTS.replace(averaging=strategy, wire_dtype=c.choose(_WIRES)),
            latency_s=latency_s,
            jitter=c.between(0, 5),
            late=c.choose((0.0, 0.0, 0.01, 0.1)),
            bytes_per_s=bytes_per_s,
            slack=c.between(1, 10),
            detect_s=min(c.magnitude(-2, 0.3), leave_deadline_s),
            leave_deadline_s=leave_deadline_s,
            learners=tuple(_random_learner(c, step_s) for _ in range(n)),
            hosts=_random_hosts(c, n),
            faults=_random_faults(c, n, 1.3 * steps * step_s),
        )
        for change in (_with_rare_things, _with_connections, _with_options, _with_changes):
            drawn = change(drawn, c)
        return drawn

    def to_json(self) -> str:
        """Return the simulated job and its faults as one line of JSON, which `from_json` reads."""
        fields = {**dataclasses.asdict(self), "config": self.config.changes(DEFAULTS)}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Return the scenario in a line that `to_json` wrote.

        Raises:
            ConfigError: if the text is no scenario.
        """
        what = f"not a scenario: {text[:80]!r}"
        try:
            found = json.loads(text)
            check_fields(what, found, cls, REPLAYED)
            for each in found["learners"]:
                check_fields("not a scenario: a learner", each, Learner, REPLAYED)
            for each in found.get("faults", ()):
                check_fields("not a scenario: a fault", each, Fault, REPLAYED)
            found["learners"] = tuple(Learner(**each) for each in found["learners"])
            found["faults"] = tuple(
                Fault(**{**each, "peers": tuple(each.get("peers", ()))})
                for each in found.get("faults", ())
            )
            config = DEFAULTS.replace(**found["config"])
            return cls(**{**found, "config": config, "hosts": tuple(found.get("hosts", ()))})
        except ConfigError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{what} ({error}). {REPLAYED}") from error

    def __str__(self) -> str:
        """Describe the scenario in a few lines of text."""
        shared = f", hosts {list(self.hosts)}" if self.hosts else ", no shared memory"
        lines = [
            f"seed {self.seed}: {self.size} super learners, {self.steps} steps, "
            f"{', '.join(f'{name}={value}' for name, value in self.config.changes(DEFAULTS).items())}",
            f"  {self.chunks} chunks (+ {self.later} later) of {self.elements} {self.dtype}"
            f"{shared}",
            f"  latency {self.latency_s} s (+ up to {self.jitter:g} times, {self.late:.0%} late), "
            f"{self.bytes_per_s:g} bytes/s, "
            f"slack {self.slack:g}, failures found within {self.detect_s} s"
            f"{f', control messages {self.late_control:.0%} late' if self.late_control else ''}"
            f"{f', reports every {self.reports_s:g} s' if self.reports_s else ''}"
            f"{f', odd chunks in every {self.rare_period}th exchange' if self.rare_period > 1 else ''}"
            f"{f', fast peers preferred by {self.prefer:g}' if self.prefer else ''}"
            f"{f', chunks copied every {self.copy_every}th step' if self.copy_every > 1 else ''}"
            f"{', aimed windows' if self.aims else ''}",
        ]
        lines += [
            f"  {i}: {x.rate:g} exchanges per step of {x.step_s:g} s (+- {x.spread:.0%}), "
            f"node {x.node_s:g} s, deadline {x.deadline_s:g} s"
            for i, x in enumerate(self.learners)
        ]
        lines += [
            f"  at {f.at_s:.6f} s: {f.kind} {f.who}"
            f"{' with ' + ', '.join(map(str, f.peers)) if f.peers else ''}"
            f"{f' ({f.value:g})' if f.value else ''}"
            for f in sorted(self.faults, key=lambda f: f.at_s)
        ]
        return "\n".join(lines)


# ---- what is allowed ----------------------------------------------------------------------------


def _one_of(what: str, name: str, names: Iterable[str]) -> None:
    if name not in tuple(names):
        raise ConfigError(
            f"{what} is {name!r}, allowed is one of {', '.join(map(repr, names))}. {REPLAYED}"
        )


def _check_fault(where: str, fault: Fault, n: int) -> None:
    """Raise ConfigError unless the fault strikes one of n processes during the run, with valid arguments."""
    _one_of(f"{where}: kind", fault.kind, FAULTS)
    value = VALUES.get(fault.kind, TIME)
    in_bounds(where, fault, {"at_s": TIME, "who": (0, n - 1), "value": value}, REPLAYED)
    for peer in fault.peers:
        in_bound(f"{where}: a peer", peer, (0, n - 1), REPLAYED)
    if fault.kind in _WITH_PEER:
        in_bound(f"{where}: the number of its peers", len(fault.peers), (1, 1), REPLAYED)


def _check_bits(where: str, fault: Fault, config: Config) -> None:
    if fault.value not in CODES or not config.chooses_bits:
        raise ConfigError(
            f"{where}: bits {fault.value:g} with wire_dtype {config.wire_dtype!r}, allowed are "
            f"{', '.join(f'{bits:g}' for bits in CODES)} with wire_dtype 'auto'. Correct one of them."
        )


# ---- drawing ------------------------------------------------------------------------------------


def _random_learner(c: Chance, step_s: float) -> Learner:
    return Learner(
        rate=c.choose((0.3, 1.0, 2.0)),
        step_s=step_s * c.choose((1, 1, 1, 5)),
        spread=c.between(0, 0.5),
        node_s=c.choose((0.0, step_s / 5)),
        deadline_s=c.magnitude(-2, 0),
    )


def _random_hosts(c: Chance, n: int) -> tuple[int, ...]:
    if not c.happens(0.6):
        return ()
    if c.happens(0.3):
        return tuple(i // 2 for i in range(n))
    return tuple(c.integer(0, c.integer(0, n - 1)) for _ in range(n))


def _random_faults(c: Chance, n: int, until_s: float) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    for _ in range(c.integer(0, 4)):
        at_s, who = c.between(0, until_s), c.integer(0, n - 1)
        kind = c.choose((*_DRAWN, "crash", "crash"))
        other = (who + c.integer(1, n - 1)) % n
        if kind == "extend":
            groups = [0.0] * n
            if c.happens(0.5):  # one adds other groups than the rest
                groups[who] = c.choose((1.0, 2.0, 2.0))
            faults += [
                Fault(at_s + c.between(0, until_s / 10), kind, i, (), groups[i]) for i in range(n)
            ]
        elif kind in ("cut", "sever"):
            faults.append(Fault(at_s, kind, who, (other,), c.magnitude(-3, 0.3)))
        elif kind == "partition":
            side = tuple(i for i in range(n) if i not in (who, other) and c.happens(0.5))
            faults.append(Fault(at_s, kind, who, side, c.magnitude(-3, 0.3)))
        elif kind == "stop":
            faults.append(Fault(at_s, kind, who, (), c.magnitude(-3, 0.5)))
        else:
            faults.append(
                Fault(at_s, kind, who, (), c.choose((5.0, 20.0)) if kind == "slow" else 0.0)
            )
    return tuple(faults)


def _with_rare_things(s: Scenario, c: Chance) -> Scenario:
    """Change some scenarios so that situations occur which independent random choices seldom produce.

    These situations are: a bounded staleness; a second crash during the agreement on the first; answers later
    than a whole exchange; a running super learner that is taken for failed; several super learners that leave
    together; a joining super learner; exchanges that are cut short.
    """
    bounds = (0, 0, 1, 2, 4) if rounds_of(s.config.averaging, s.size)[0] is None else (0,)
    faults = list(s.faults)
    for fault in s.faults:
        if fault.kind == "crash" and c.happens(0.3):
            other = (fault.who + c.integer(1, s.size - 1)) % s.size
            faults.append(Fault(fault.at_s + c.between(0, 20) * s.latency_s, "crash", other))
    s = dataclasses.replace(
        s.with_options(max_staleness=c.choose(bounds) or None), faults=tuple(faults)
    )
    if c.happens(0.05):
        s = dataclasses.replace(s, chunks=1, later=0, bytes_per_s=1e9, late=0.3)
    if c.happens(0.1):
        who = c.integer(0, s.size - 1)
        other = (who + c.integer(1, s.size - 1)) % s.size
        at_s = c.between(0, 1.3 * s.steps * min(learner.step_s for learner in s.learners))
        s = dataclasses.replace(s, faults=(*s.faults, Fault(at_s, "suspect", who, (other,))))
    if c.happens(0.3):
        s = s.with_options(exchange_share=c.choose((0.5, 0.25, 0.0625)))
    if s.hosts and not c.happens(0.6):
        s = dataclasses.replace(s, hosts=())
    if c.happens(0.08):
        s = _several_leave(s, c)
    elif c.happens(0.12):
        s = _one_joins(s, c)
    elif c.happens(0.1):
        s = _cut_short(s, c)
    elif c.happens(0.1):
        s = _answers_late(s, c)
    return s


def _with_connections(s: Scenario, c: Chance) -> Scenario:
    """Add faults to some scenarios: connections of one pair, or all, end, often again after they reopen."""
    if not c.happens(0.15):
        return s
    until_s = 1.3 * s.steps * min(learner.step_s for learner in s.learners)
    faults = list(s.faults)
    for _ in range(c.integer(1, 5)):
        at_s, who = c.between(0, until_s), c.integer(0, s.size - 1)
        other = (who + c.integer(1, s.size - 1)) % s.size
        pairs = [(who, other)]
        if c.happens(0.2):
            pairs = [(i, j) for j in range(s.size) for i in range(j)]
        dialed_s = _NEVER_DIALED_S if c.happens(0.03) else c.magnitude(*_DIALED_S)
        if c.happens(0.5):
            dialed_s = min(dialed_s, 10 * s.latency_s)
        faults += [Fault(at_s, "break", i, (j,), dialed_s) for i, j in pairs]
        if c.happens(0.5):
            at_s += dialed_s + 4 * s.latency_s * c.between(0, 1)
            faults += [Fault(at_s, "break", i, (j,), dialed_s) for i, j in pairs]
    return dataclasses.replace(s, faults=tuple(faults))


def _with_options(s: Scenario, c: Chance) -> Scenario:
    """Set options of windows, peers and copies in some scenarios."""
    if c.happens(0.2):
        s = dataclasses.replace(s, rare_period=c.choose((2, 4, 8)))
    if c.happens(0.2):
        s = dataclasses.replace(s, prefer=c.choose((0.5, 0.95)))
    gossips = rounds_of(s.config.averaging, s.size)[0] is None and not s.config.bounds_staleness
    if s.config.first_share < 1 and gossips and c.happens(0.5):
        s = dataclasses.replace(s, copy_every=c.choose((2, 4, 8)))
    if s.config.first_share < 1 and c.happens(0.5):
        s = dataclasses.replace(s, aims=True)
    return s


def _with_changes(s: Scenario, c: Chance) -> Scenario:
    """Let super learners choose bits of their exchanges; in some scenarios also shares, and links change.

    Each does at its own times, so that peers meet that want different ones.
    """
    until_s = 1.3 * s.steps * min(learner.step_s for learner in s.learners)
    values: dict[str, tuple[float, ...]] = {}
    if s.config.chooses_bits:
        values["bits"] = (0.0, 4.0, 8.0)
    if c.happens(0.1):
        values["share"] = (1.0, 0.5, 0.25, 0.05)
    if c.happens(0.1):
        values["link"] = tuple(s.bytes_per_s * factor for factor in (0.1, 1.0, 10.0))
    faults = [
        Fault(c.between(0, until_s), kind, c.integer(0, s.size - 1), (), c.choose(values[kind]))
        for kind in values
        for _ in range(2 * s.size)
    ]
    return dataclasses.replace(s, faults=(*s.faults, *faults))


def _cut_short(s: Scenario, c: Chance) -> Scenario:
    """Change the scenario so that the leave deadline ends the last exchanges before all chunks have begun."""
    chunks = c.integer(12, 24)
    exchange_s = min(learner.step_s for learner in s.learners) * c.between(2, 8)
    return dataclasses.replace(
        s,
        config=s.config.replace(exchange_share=1.0),
        chunks=chunks,
        bytes_per_s=float(f"{8 * s.elements * chunks / exchange_s:.3g}"),
        leave_deadline_s=float(f"{exchange_s * c.between(0.3, 1.5):.3g}"),
    )


def _answers_late(s: Scenario, c: Chance) -> Scenario:
    """Change the scenario so that chunks overtake control messages: these arrive during later exchanges.

    Both sides of a pair ask each other at about the same times, without rounds, in short exchanges; some
    super learners leave early, or are silent early.
    """
    kept = min(s.size, c.integer(3, 4))  # few super learners, so that each is often asked again
    latency_s = s.latency_s
    faults = [f for f in s.faults if f.kind in ("leave", "fail", "stop", "crash") and f.who < kept]
    step_s = latency_s * c.between(5, 40)
    learners = tuple(
        dataclasses.replace(x, rate=c.choose((1.0, 2.0)), step_s=step_s, spread=0.02, node_s=0.0)
        for x in s.learners[:kept]
    )
    if c.happens(0.5):
        patience = latency_s * c.between(50, 150)
        learners = tuple(dataclasses.replace(x, deadline_s=patience) for x in learners)
    steps = c.integer(20, 60)
    if c.happens(0.5):
        faults.append(Fault(0.0, "leave", c.integer(0, kept - 1)))
    return dataclasses.replace(
        s,
        config=s.config.replace(averaging="random_pairs", max_staleness=None),
        steps=steps,
        chunks=c.choose((1, 1, 12)),
        later=0,
        late=0.0,
        late_control=c.choose((0.02, 0.1)),
        bytes_per_s=1e9,
        learners=learners,
        hosts=s.hosts[:kept],
        faults=tuple(dataclasses.replace(f, at_s=steps * step_s * c.between(0, 1)) for f in faults),
    )


def _one_joins(s: Scenario, c: Chance) -> Scenario:
    """Let a super learner join, in place of a failed one or in addition, often with a fault at that time."""
    step_s = max(learner.step_s for learner in s.learners)
    steps = max(s.steps, 10)
    at_s = c.between(0, 0.5) * steps * step_s
    number = c.integer(0, s.size)
    faults = [f for f in s.faults if f.kind not in ("extend", "leave", "fail")]
    if number < s.size:
        faults = [f for f in faults if f.kind != "crash"]
        faults.append(Fault(at_s * c.between(0, 1), "crash", number))
    faults.append(Fault(at_s, "join", number))
    for _ in range(c.integer(0, 2)):
        soon_s = at_s + 3 * step_s * c.between(0, 1) + 10 * s.latency_s * c.between(0, 1)
        kind, who = c.choose(("crash", "crash", "stop")), c.integer(0, s.size)
        faults.append(Fault(soon_s, kind, who, (), 5 * step_s if kind == "stop" else 0.0))
    return dataclasses.replace(s, steps=steps, later=0, faults=tuple(faults))


def _several_leave(s: Scenario, c: Chance) -> Scenario:
    """Let most super learners leave together; the others stay long enough to learn of all departures."""
    step_s = min(learner.step_s for learner in s.learners)
    at_s = step_s * c.between(2, 6)
    kinds = (*("leave",) * 8, "fail", "crash")
    faults = [Fault(at_s, c.choose(kinds), i) for i in range(s.size) if c.happens(0.7)]
    return dataclasses.replace(
        s,
        steps=30,
        latency_s=step_s * c.between(0.1, 0.4),
        jitter=c.between(0, 1),
        late=0.0,
        leave_deadline_s=max(s.leave_deadline_s, 20 * step_s),
        learners=tuple(dataclasses.replace(x, step_s=step_s, spread=0.05) for x in s.learners),
        faults=tuple(faults),
    )


# ---- a run --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def rounds_of(strategy: str, n: int) -> tuple[Rounds | None, list[Table] | None]:
    """Return a strategy's Rounds, and per super learner by round: (peer to ask, peer that asks)."""
    steps = [parse(strategy).plan(i, n).in_step for i in range(n)]
    if steps[0] is None or steps[0].peers is None:
        return steps[0], None
    return steps[0], [
        [(int(a), int(b)) for a, b in s.peers]
        for s in steps
        if s is not None and s.peers is not None
    ]


def rounds_in(strategy: str, n: int) -> dict[str, Any]:
    """Return what Job takes for a strategy's rounds: tables, period, means, after and warm_up."""
    rounds, tables = rounds_of(strategy, n)
    means = None
    if rounds is not None and rounds.peers is None:
        means = "replace" if rounds.replaces else "add"
    return {
        "tables": tables,
        "period": rounds.period if rounds else 1,
        "means": means,
        "after": rounds is not None and rounds.waits,
        "warm_up": rounds.warm_up if rounds else 0,
    }


@functools.lru_cache(maxsize=256)
def schedules(strategy: str, n: int) -> list[npt.NDArray[np.intc]]:
    """Return for each super learner the peers that it asks for exchanges, in this order."""
    kind = parse(strategy)
    return [np.ascontiguousarray(kind.plan(i, n).schedule.ravel(), dtype=np.intc) for i in range(n)]


@functools.lru_cache(maxsize=256)
def pair_weight(strategy: str, n: int) -> float:
    """Return the share of the difference by which an exchange moves each side, among n super learners."""
    return parse(strategy).plan(0, n).weight


def options_of(config: Config, n: int, chunk_nbytes: int) -> EngineOptions:
    """Return the options of one of n simulated engines, with chunks of so many bytes."""
    plan = parse(config.averaging).plan(0, n)
    return dataclasses.replace(EngineOptions.of(config, plan), chunk_nbytes=chunk_nbytes)


def job_of(scenario: Scenario, *, trace: bool = False) -> Job:
    """Build the simulated job of a scenario, not started.

    Args:
        scenario: the scenario.
        trace: keep messages and events, for a chart or a timeline.
    """
    s, n = scenario, scenario.size
    network = Network(
        n,
        (7 * s.seed + 1) % 2**64,
        s.latency_s,
        s.jitter,
        s.bytes_per_s,
        late=s.late,
        trace=trace,
        room=sum(n + 1 + i for i in range(s.processes - n)),
        late_control=s.late_control,
        streams=s.streams,
    )
    job = Job(
        network,
        (13 * s.seed + 5) % 2**64,
        slack=s.slack,
        detect_s=s.detect_s,
        trace=trace,
        config=s.config,
        rare=range(1, s.chunks + s.later, 2) if s.rare_period > 1 else (),
        rare_period=s.rare_period,
        every=s.copy_every,
        **rounds_in(s.config.averaging, n),
    )
    _add_learners(job, s)
    if s.hosts:
        job.share(s.hosts, 8 * s.elements)
    if s.processes > n:
        job.expect(functools.partial(member_plans, s.config.averaging), most=s.processes - n)
    for fault in s.faults:
        job.strike(fault.at_s, fault.kind, fault.who, *fault.arguments())
    return job


def member_plans(strategy: str, numbers: Sequence[int], n: int) -> list[Engaged]:
    """Return, for each of the super learners `numbers` among n: peers to ask, weight, table of rounds.

    A peer is given by its index in `numbers`; -1 for a round's peer that is not in `numbers`.
    """
    place = {number: i for i, number in enumerate(numbers)}
    tables = rounds_of(strategy, n)[1]
    return [
        (
            [place[peer] for peer in schedules(strategy, n)[number] if peer in place],
            pair_weight(strategy, n),
            [(place.get(a, -1), place.get(b, -1)) for a, b in tables[number]] if tables else None,
        )
        for number in numbers
    ]


def _add_learners(job: Job, s: Scenario) -> None:
    c = Chance(s.seed + 1)
    options = options_of(s.config, s.size, 8 * s.elements)
    for i, learner in enumerate(s.learners):
        model = np.array(
            [c.integer(-1000, 1000) / 8 for _ in range((s.chunks + s.later) * s.elements)], s.dtype
        ).reshape(-1, s.elements)
        job.add(
            schedules(s.config.averaging, s.size)[i],
            dataclasses.replace(
                options,
                rate=learner.rate,
                deadline_s=learner.deadline_s,
                leave_deadline_s=s.leave_deadline_s,
                report_s=s.reports_s,
                prefer_fast=s.prefer,
                aims=s.aims,
            ),
            model,
            s.steps,
            learner.step_s,
            learner.spread,
            learner.node_s,
            s.later,
        )


def run(scenario: Scenario, *, trace: bool = False) -> Job:
    """Run the simulated job of a scenario to its end.

    Returns:
        The job, with its counters.

    Raises:
        BrokenPromise: if the job breaks a promise of the library.
    """
    job = job_of(scenario, trace=trace)
    job.run(LONGEST_S)
    return job


def digest(jobs: Sequence[Job]) -> str:
    """Return a hash of the counters of runs, with times in whole microseconds: equal on all machines."""
    numbers = [
        {**job.summary(), "seconds": math.floor(job.summary()["seconds"] * 1e6)} for job in jobs
    ]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]
