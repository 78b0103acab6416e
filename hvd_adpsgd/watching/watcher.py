"""The thread of a leader that reports on its super learner, records the run, serves metrics and warns."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hvd_adpsgd.engine.metrics import TABLES
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.errors import MissingRequirementError, NotInitializedError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.watching import writers
from hvd_adpsgd.watching.alerts import Alerts
from hvd_adpsgd.watching.health import aged, late_after_s
from hvd_adpsgd.watching.record import Event, Record, Run, Track
from hvd_adpsgd.watching.reports import Report, decode, encode, readable
from hvd_adpsgd.watching.sampler import Sample, Sampler
from hvd_adpsgd.watching.states import States

if TYPE_CHECKING:
    from hvd_adpsgd.watching.prometheus import Exporter

logger = logging.getLogger("hvd_adpsgd")

_EVENTS = 500
# seconds before a new first leader serves metrics: else each would, as leaders leave at the end of a job
_TAKEOVER_S = 3.0


class Watcher:
    """A leader's thread that reports on its super learner, writes the record, and logs warnings.

    Args:
        world: the World of this learner, for its options; each report uses the World at its time.
        observe: returns the counters of this moment, and the engine that sends reports, if there is one; None
            if there is nothing more to report. Its argument is that of `look`.
    """

    def __init__(self, world: World, observe: Callable[[Any], tuple[Sample, Any] | None]):
        config = world.config
        self._observe = observe
        # a joining leader serves metrics late, as another leader may serve them already
        self._replaces = world.collectives.joining
        self._every_s = config.report_s
        self._record: Record | None = None
        if config.record is not None:
            self._record = Record(config.record, world.super_rank, every_s=config.report_s)
            self._record.write("start", time_s=time.time(), **_about(world))
        self._exporter = _exporter(config.metrics_address)
        # events of the run since this leader began, for metrics
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        # time since which this leader is the first living one
        self._first_since: float | None = None
        self._sampler = Sampler(world.super_size)
        self._alerts = Alerts(world.membership.names)
        self._states = States(world, self._note)
        # by super_rank: time of the super learner's last report in the record
        self._recorded: dict[int, float] = {}
        # seconds since the newest report of each peer was received
        self._ages: dict[int, float] = {}
        # held by `look`, which the trainer's thread calls, too, when an optimizer's averaging stops
        self._lock = threading.Lock()
        # what log_to sends: reports by super_rank, own super_rank, living super learners
        self._shown: tuple[dict[int, Report], int, set[int]] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="hvd_adpsgd.watching")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, in bounded time, stop serving metrics and write the end to the record."""
        self._over.set()
        self._thread.join(5.0)
        if self._exporter is not None:
            self._exporter.close()
        if self._record is not None:
            self._states.end()
            self._record.close()

    def note_leaving(self) -> None:
        """Write to the record that this super learner leaves; called on SIGTERM, on another thread."""
        with self._lock:
            self._states.end()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()
            self._send()
        self._send(last=True)

    def _send(self, last: bool = False) -> None:
        """Send new numbers to the writer of log_to; not inside `look`, for which the trainer may wait."""
        outlet, shown = writers.outlet(), self._shown
        if outlet is not None and shown is not None:
            outlet.send(time.monotonic(), *shown, last=last)

    def look(self, stopping: Any = None) -> None:
        """Report on the super learner, write the record and warn, once; an error ends this thread only.

        Args:
            stopping: an averaging that stops next: its last report is recorded, however recent the one before
                is, and its world is used, as there is no current world in shutdown().
        """
        try:
            with self._lock:
                self._look(stopping.world if stopping else worlds.current(), stopping)
        except NotInitializedError:
            return  # hvd.shutdown() or another hvd.init() is under way
        except Exception as error:
            self._over.set()
            logger.error("monitoring of the run ends, training continues: %s", error, exc_info=True)

    def _look(self, world: World, stopping: Any) -> None:
        observed = self._observe(stopping)
        if observed is None:
            return
        sample, engine = observed
        counters, last = sample.engine, stopping is not None
        self._sampler.grow(world.super_size)
        own = self._sampler.report(sample, time.time())
        known = {world.super_rank: own}
        if engine is not None:
            engine.send_report(encode(own))
            known |= self._received(engine, world.super_rank)
        now_s = time.monotonic()
        self._states.update(world, now_s)
        speaks = self._states.speaks(world, now_s, self._ages)
        self._write(world, known, counters, last, speaks)
        self._show(world, known, counters, speaks and not last)
        if speaks:
            self._shown = known, world.super_rank, _alive(world)
            late_s = late_after_s(self._every_s, world.super_size)
            now = {i: aged(r, self._ages.get(i, 0.0), late_s) for i, r in known.items()}
            for alert in self._alerts.check(now_s, now, _alive(world), self._states.suspect):
                logger.warning("%s", alert.text)
                self._note("alert", alert.about, alert.text)
        else:
            self._shown = None

    def _received(self, engine: Any, own: int) -> dict[int, Report]:
        """Return the newest report received from each peer, by super_rank; note their ages."""
        received = {i: report for i, report in engine.reports().items() if i != own}
        self._ages = {i: age_s for i, (_, _, age_s) in received.items()}
        reports = {i: decode(text) for i, (_, text, _) in received.items()}
        return {i: report for i, report in reports.items() if report is not None}

    def _write(
        self, world: World, known: dict[int, Report], counters: Any, last: bool, speaks: bool
    ) -> None:
        """Record this super learner's report; the first living leader also records peers without file."""
        record = self._record
        if record is None:
            return
        record.thin(time.monotonic())
        more = {"every_s": record.every_s, **_tables(counters)}
        record.report(world.super_rank, known[world.super_rank], last=last, **more)
        if not speaks:
            return
        for i, report in known.items():
            is_new = report.time_s != self._recorded.get(i)
            if i != world.super_rank and is_new and not (record.folder / f"{i}.jsonl").exists():
                self._recorded[i] = report.time_s
                record.report(i, report, every_s=record.every_s)

    def _show(self, world: World, known: dict[int, Report], counters: Any, serves: bool) -> None:
        """Serve these metrics if this is the first living leader, else stop serving."""
        if self._exporter is None:
            return
        if not serves:
            self._first_since = None
            self._exporter.close()
            return
        names = world.membership.names
        tracks = {i: Track(names[i], [r], every_s=self._every_s) for i, r in sorted(known.items())}
        tracks[world.super_rank].tables = _tables(counters)
        self._exporter.show(Run(tracks, list(self.events)))
        now = time.monotonic()
        self._first_since = now if self._first_since is None else self._first_since
        at_once = world.super_rank == 0 and not self._replaces
        if at_once or now - self._first_since >= _TAKEOVER_S:
            self._exporter.open()

    def _note(self, what: str, about: int | None, text: str) -> None:
        """Write an event to the record, and count it in the metrics; the arguments are those of Event."""
        event = Event(time.time(), what, about, text)
        if self._record is not None:
            self._record.write("event", time_s=event.time_s, event=what, about=about, text=text)
        self.events.append(event)


def _exporter(address: str | None) -> Exporter | None:
    """Return what serves metrics at this address; None without one.

    Raises:
        ConfigError, MissingRequirementError: for a bad address; if prometheus_client is not installed.
    """
    if address is None:
        return None
    try:
        from hvd_adpsgd.watching.prometheus import Exporter
    except ImportError as error:
        raise MissingRequirementError(
            f"no metrics: HVD_ADPSGD_METRICS_ADDRESS needs the package {error.name}. Run: python -m pip "
            "install 'hvd_adpsgd[metrics]', on all hosts."
        ) from error
    return Exporter(address)


def _about(world: World) -> dict[str, Any]:
    return {
        "super_learner": world.super_rank,
        "super_size": world.super_size,
        "name": world.membership.names[world.super_rank],
        "learners": world.inner_size,
        "averaging": world.config.averaging,
        "every_s": world.config.report_s,
        "joining": world.collectives.joining,
        "script": readable(sys.argv[0]),
    }


def _tables(counters: Mapping[str, Any] | None) -> dict[str, dict[int, int]]:
    """Return the engine's tables for the record, without counts of 0."""
    if counters is None:
        return {}
    return {t.name: {i: n for i, n in enumerate(counters[t.name]) if n} for t in TABLES}


def _alive(world: World) -> set[int]:
    states = world.membership.states
    return {i for i, state in enumerate(states) if state is PeerState.ALIVE}
