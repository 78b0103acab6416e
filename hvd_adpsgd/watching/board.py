"""The reports and events of a run that one leader has received, in memory, for the dashboard."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_adpsgd.watching.record import Event, Run, Track
from hvd_adpsgd.watching.reports import Report

__all__ = ["Board"]

# number of reports that are kept: of all super learners together; most and least of one super learner
_REPORTS, _MOST, _LEAST = 20_000, 300, 100
_EVENTS = 500


class Board:
    """Reports and events of a run, written by the watching thread and read by the dashboard's thread.

    When a super learner has too many reports, every second one is dropped; later ones are kept half as often.

    Args:
        names: host and learner of each super learner, by super_rank.
        about: facts about the run from its start: strategy, script.
        every_s: seconds between two reports of a super learner.
    """

    def __init__(self, names: Sequence[str], about: Mapping[str, Any], every_s: float = 1.0):
        self._about = dict(about)
        self._most = min(_MOST, max(_LEAST, _REPORTS // max(1, len(names))))
        self._lock = threading.Lock()  # held while lists are copied, never while a page is drawn
        self._tracks = {i: Track(name, every_s=every_s) for i, name in enumerate(names)}
        self._events: deque[Event] = deque(maxlen=_EVENTS)

    def take(self, known: Mapping[int, Report]) -> None:
        """Add the reports in `known`, by super_rank, that are newer than the reports added before."""
        with self._lock:
            for i, report in known.items():
                track = self._tracks.setdefault(i, Track())
                if not track.reports:
                    self._events.append(
                        Event(report.time_s, "start", i, f"super learner {i} starts")
                    )
                elif report.time_s <= track.reports[-1].time_s:
                    continue
                self._add(track, report)

    def _add(self, track: Track, report: Report) -> None:
        """Add a report; replace the newest report if that was too close in time to the report before it."""
        last = track.reports[-2:]
        if len(last) == 2 and last[1].time_s - last[0].time_s < 0.99 * track.every_s:
            track.reports.pop()
        track.reports.append(report)
        if len(track.reports) > self._most:
            track.reports = track.reports[::-2][::-1]
            track.every_s *= 2

    def tables(
        self, super_rank: int, peers: Mapping[int, int], staleness: Mapping[int, int]
    ) -> None:
        """Store one super learner's numbers of exchanges, by peer, and of chunks, by staleness in steps."""
        with self._lock:
            track = self._tracks.setdefault(super_rank, Track())
            track.peers, track.staleness = dict(peers), dict(staleness)

    def event(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._events.append(event)

    def run(self) -> Run:
        """Return the reports and events added so far, as a copy."""
        with self._lock:
            tracks = {
                i: Track(t.name, list(t.reports), t.peers, t.staleness, t.every_s)
                for i, t in sorted(self._tracks.items())
                if t.reports
            }
            events = sorted(self._events, key=lambda event: event.time_s)
        return Run(tracks, events, dict(self._about))
