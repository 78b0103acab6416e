"""Runs simulated jobs, one per seed, on all cores; reports broken promises and which cases have occurred."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.bounds import SEED, in_bound
from hvd_adpsgd_lab.simulation.coverage import MESSAGES, STATES
from hvd_adpsgd_lab.simulation.faults import FAULTS
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
from hvd_adpsgd_lab.simulation.scenario import Scenario, run

BLOCK = 250  # seeds that a worker process runs as one task

# Pairs of (state of an exchange, message that arrives in it) that cannot occur, with the reason.
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("none", "silence"): "there is no peer that could be silent",
    **{
        (state, "silence"): "the peer is silent already, or has failed"
        for state in ("parked", "closing, parked", "broken")
    },
    ("broken", "failure"): "a failure is reported once, before transfers are handled",
    **{(state, "report"): "engines exchange no reports in these runs" for state in STATES},
    **{
        (state, "yes"): "an ASK has one answer, with which the exchange begins"
        for state in ("running", "held", "parked", "closing", "closing, parked")
    },
}


@dataclass(frozen=True)
class Failure:
    """A seed whose simulated job breaks a promise (invariant) of the library, and the broken promise."""

    seed: int
    what: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.what}\n  replay: python -m hvd_adpsgd simulate --seed {self.seed}"


@dataclass
class Report:
    """Counts over the simulated jobs of seeds from `first` on: events, faults, coverage, broken promises."""

    first: int = 0
    runs: int = 0
    events: int = 0
    exchanges: int = 0
    means: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Counter[tuple[str, str]] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add the counts of the report `other` to this report."""
        self.runs += other.runs
        self.events += other.events
        self.exchanges += other.exchanges
        self.means += other.means
        self.seconds += other.seconds
        self.faults += other.faults
        self.coverage += other.coverage
        self.strategies += other.strategies
        self.failures += other.failures

    def to_json(self) -> str:
        """Return the report of the simulated jobs as JSON, which `from_json` reads."""
        pairs = [[*pair, count] for pair, count in self.coverage.items()]
        failures = [vars(failure) for failure in self.failures]
        return json.dumps({**vars(self), "coverage": pairs, "failures": failures})

    @staticmethod
    def from_json(text: str) -> Report:
        """Return the report that `to_json` wrote.

        Raises:
            ConfigError: if the text was not written by `to_json`.
        """
        try:
            values = json.loads(text)
            values["coverage"] = Counter({(s, m): count for s, m, count in values["coverage"]})
            for name in ("faults", "strategies"):
                values[name] = Counter(values[name])
            values["failures"] = [Failure(**failure) for failure in values["failures"]]
            found = Report(**values)
            counts = [
                getattr(found, name) for name in ("first", "runs", "events", "exchanges", "means")
            ]
            for counter in (found.faults, found.coverage, found.strategies):
                counts += counter.values()
            whole = (
                all(type(count) is int and count >= 0 for count in counts) and found.seconds >= 0
            )
            kinds = {name.partition(" | ")[0] for name in found.faults}
            if not whole or len(values) < len(dataclasses.fields(Report)) or not kinds <= {*FAULTS}:
                raise ValueError("a part is missing or is no count")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = error if isinstance(error, ValueError) else "a part is missing or of another kind"
            raise ConfigError(
                f"not a report of simulated seeds: {text[:40]!r} ({why}). Name a file that `--keep` has "
                "written, or a new one."
            ) from error
        return found

    def never_met(self) -> list[tuple[str, str]]:
        """Return the pairs (state of an exchange, message) that may occur, but that no run has reached."""
        pairs = [(state, message) for state in STATES for message in MESSAGES]
        return [pair for pair in pairs if pair not in self.coverage and pair not in IMPOSSIBLE]

    def __str__(self) -> str:
        lines = [
            f"{self.runs} runs, {self.seconds:.0f} s of virtual time, {self.events} events, "
            f"{self.exchanges} exchanges, {self.means} means of all by one engine, "
            f"{len(self.failures)} broken promises",
            "",
            *_fault_table(self.faults),
            "",
            *_coverage_table(self.coverage),
        ]
        never = ", ".join(f"{message} in {state}" for state, message in self.never_met())
        lines += ["", f"never reached, and not known to be impossible: {never or 'none'}"]
        return "\n".join([*lines, *map(str, self.failures)])


def _fault_table(faults: Counter[str]) -> list[str]:
    """Return the lines of a table: number of faults by kind of fault and by the engine's phase then."""
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in FAULTS}
    for name, count in faults.items():
        kind, _, phase = name.partition(" | ")
        for part in phase.split(" + "):
            by_kind[kind][part] += count
    phases = sorted({phase for counts in by_kind.values() for phase in counts})
    width = max(map(len, (*phases, "fault | phase")), default=0) + 1
    rows = ["".join(["phase \\ fault".ljust(width), *(f"{kind:>10}" for kind in FAULTS)])]
    for phase in phases:
        rows.append(phase.ljust(width) + "".join(f"{by_kind[kind][phase]:>10}" for kind in FAULTS))
    return rows


def _coverage_table(coverage: Counter[tuple[str, str]]) -> list[str]:
    rows = ["state \\ comes".ljust(17) + "".join(f"{message:>12}" for message in MESSAGES)]
    for state in STATES:
        cells = [coverage[state, message] for message in MESSAGES]
        shown = [
            "-" if (state, m) in IMPOSSIBLE and not c else str(c)
            for m, c in zip(MESSAGES, cells, strict=True)
        ]
        rows.append(state.ljust(17) + "".join(f"{cell:>12}" for cell in shown))
    return rows


def run_block(seeds: Iterable[int]) -> Report:
    """Run the simulated jobs of `seeds`, one after the other, and return their report."""
    report = Report()
    for seed in seeds:
        scenario = Scenario.random(seed)
        report.strategies[scenario.config.averaging] += 1
        report.runs += 1
        try:
            job = run(scenario)
        except BrokenPromise as broken:
            report.failures.append(Failure(seed, str(broken)))
            continue
        numbers = job.summary()
        report.events += numbers["events"]
        report.exchanges += numbers["exchanges"]
        report.means += numbers["means"]
        report.seconds += numbers["seconds"]
        report.faults.update(job.met)
        report.coverage.update(job.covering())
    return report


def explore(
    first: int,
    last: int,
    *,
    workers: int | None = None,
    progress: Callable[[Report], None] | None = None,
    kept: Path | None = None,
) -> Report:
    """Run the simulated jobs of the seeds from `first` up to but not including `last`, on all cores.

    With `kept`, the report is written to that file after every block, and a later call with the same `first`
    continues after the last block in it.

    Args:
        first: first seed.
        last: the seed after the last one.
        workers: number of worker processes; None: one per core.
        progress: called with the report so far after every block.
        kept: file for the report; None: no file.

    Returns:
        The report of all these seeds.

    Raises:
        ConfigError: if a seed is out of range, or the file cannot be written or is of other seeds.
    """
    in_bound("--seeds: the first one", first, SEED)
    in_bound("--seeds: the one behind the last", last, (first + 1, SEED[1] + 1))
    if workers is not None:
        in_bound("--workers", workers, (1, 4096))
    total = Report(first)
    if kept is not None:
        total = _begun(kept, first, last)
        _keep(kept, total)  # so that a file that cannot be written raises before the first run
    starts = range(first + total.runs, last, BLOCK)
    blocks = (range(at, min(at + BLOCK, last)) for at in starts)
    for report in _reports(blocks, min(workers or os.cpu_count() or 1, len(starts))):
        total.add(report)
        if kept is not None:
            _keep(kept, total)
        if progress is not None:
            progress(total)
    return total


def _begun(kept: Path, first: int, last: int) -> Report:
    """Return the report in the file `kept`, or a report without runs if the file does not exist."""
    try:
        text = kept.read_text()
    except FileNotFoundError:
        return Report(first)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--keep {kept}: the report cannot be read ({error}). Name a file that `--keep` has written, "
            "or a new one."
        ) from error
    report = Report.from_json(text)
    if report.first != first or report.runs > last - first:
        raise ConfigError(
            f"--keep {kept}: the report is of {report.runs} seeds from {report.first} on, asked are "
            f"{last - first} from {first} on. Ask for its first seed and no fewer, or name a new file."
        )
    return report


def _keep(kept: Path, report: Report) -> None:
    """Write the report by a rename, so that an interruption at any moment leaves a complete file."""
    new = kept.with_name(f"{kept.name}.new")
    try:
        new.write_text(report.to_json())
        new.replace(kept)
    except OSError as error:
        raise ConfigError(
            f"--keep {kept}: the report cannot be written ({error}). Name a file in a folder that exists and "
            "may be written to."
        ) from error


def _reports(blocks: Iterator[range], workers: int) -> Iterator[Report]:
    """Yield the reports in the order of the blocks; at most four blocks per worker are submitted at once."""
    if workers <= 1:
        yield from map(run_block, blocks)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        begun = deque(
            pool.submit(run_block, block) for block in itertools.islice(blocks, 4 * workers)
        )
        while begun:
            report = begun.popleft().result()
            begun.extend(pool.submit(run_block, block) for block in itertools.islice(blocks, 1))
            yield report
    finally:
        pool.shutdown(cancel_futures=True)
