"""Monitoring of a run: scalars that the script logs, and the thread that reports, records and warns."""

from __future__ import annotations

import functools
import logging
import math
import numbers
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_adpsgd.collectives import usage
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.errors import ConfigError, MissingRequirementError, NotInitializedError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.lifecycle.shutdown import script_fails
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import unanimous
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.reports import bits_of, share_of
from hvd_adpsgd.watching.alerts import Alert, Alerts
from hvd_adpsgd.watching.health import aged, late_after_s
from hvd_adpsgd.watching.record import Event, Record, Run, Track
from hvd_adpsgd.watching.reports import Report, decode, encode, readable
from hvd_adpsgd.watching.sampler import Sample, Sampler
from hvd_adpsgd.watching.writers import Outlet

if TYPE_CHECKING:
    from hvd_adpsgd.watching.prometheus import Exporter

__all__ = ["log", "log_to", "running", "start"]

logger = logging.getLogger("hvd_adpsgd")

_MOST, _LONGEST = 64, 128  # most names of scalars, and most characters of a name
_SHOWN = 80  # most characters of a value in a message
_LEFT_OUT = 8  # exchanges in a row that leave out a chunk, before the chunk is reported
_PARTS = ("inner_allreduce", "optimizer", "collect", "offer")
# seconds before a new first leader serves metrics: else each would, as leaders leave at the end of a job
_TAKEOVER_S = 3.0
_EVENTS = 500
_SILENT_S = 10.0  # seconds after which a suspect leader counts as gone, and the next one warns
_GONE = (PeerState.LEFT, PeerState.FAILED)

_SIZED = (torch.Tensor, np.ndarray, np.generic)
_scalars: dict[str, Any] = {}  # scalars by name: a float, or a tensor on a GPU that is not read yet
# by name, the tensor that was read last, and its value: the next call need not wait for the device
_read: dict[str, tuple[torch.Tensor, float]] = {}
_full = False  # whether the warning about too many names was logged
_running: list[Watcher] = []
_outlet: Outlet | None = None  # where log_to sends


# ---- what the script logs ------------------------------------------------------------------------


def log(**scalars: Any) -> None:
    """Show numbers of this learner in top, to Prometheus and in the record: hvd.log(loss=loss, lr=lr).

    Returns at once: a tensor on a GPU is read later, by another thread. Of several values of a name the last
    one is shown. The leader's values stand for its super learner; as many names as fit in about 120 bytes
    (each takes 5 bytes plus its length) reach the other super learners, and all are in the record. NaN and
    infinity are shown.

    Args:
        **scalars: by name: numbers, or tensors of one element; at most 64 names, of at most 128 characters.

    Raises:
        ConfigError: for a value that is no number, for a longer name, for a name that UTF-8 cannot encode.
    """
    global _full
    for name, value in scalars.items():
        _require_name(name)
        number = _number(name, value)
        if name in _scalars or len(_scalars) < _MOST:
            _scalars[name] = number
        elif not _full:
            _full = True
            logger.warning(
                "hvd.log(%s=...): %d other names are shown, this one is not. Log under a few fixed names.",
                name,
                _MOST,
            )


def log_to(writer: Any, every_s: float = 10.0) -> None:
    """Send the numbers of the run to a writer of TensorBoard, Weights & Biases, Trackio or MLflow.

    The first surviving leader sends, on a separate thread: the numbers that each super learner logs and
    reports as hvd_adpsgd/NAME/SUPER_LEARNER, the means over super learners as hvd_adpsgd/NAME, by log_metrics
    as hvd_adpsgd/NAME/mean. Another leader sends nothing until it is the first surviving one; pass a writer
    on every leader if the curves must continue after a failure. A writer that raises is not called again,
    with one warning; training continues.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, a run of wandb.init() or trackio.init(), mlflow with
            an active run, or an object with their add_scalar(tag, value, step), log(numbers, step=...) or
            log_metrics(numbers, step=...). It replaces the writer of an earlier call; None: nothing more is
            sent after the return.
        every_s: least seconds between two sends; the last numbers are sent in shutdown().

    Raises:
        ConfigError: for an object without these methods, or every_s below 0.
    """
    global _outlet
    outlet = None if writer is None else Outlet(writer, every_s)
    before, _outlet = _outlet, outlet
    if before is not None:
        before.close()


def _require_name(name: str) -> None:
    if len(name) <= _LONGEST and readable(name) == name:
        return
    raise ConfigError(
        f"hvd.log: the name {name[:20]!r}... has {len(name)} characters, allowed are {_LONGEST} that UTF-8 "
        "can hold (no lone surrogates). Use a shorter, plain name."
    )


def _number(name: str, value: Any) -> Any:
    """Return a scalar as a float; a tensor on a GPU as a copy on that GPU, which `_logged` reads."""
    is_tensor = isinstance(value, torch.Tensor)
    has_values = not (is_tensor and value.is_meta)
    is_one = isinstance(value, _SIZED) and _size(value) == 1 and has_values
    if is_tensor and is_one and value.device.type != "cpu" and not value.is_complex():
        return value.detach().clone()
    plain: Any = value.item() if is_one else value
    if _is_real(plain):
        try:
            return float(plain)
        except OverflowError:
            return math.inf if plain > 0 else -math.inf
    shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    raise ConfigError(
        f"hvd.log({name}=...): {shown} is no number. Pass a number or a tensor of one element, for "
        "instance loss.mean()."
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _size(value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> int:
    """Return the number of elements of a tensor or array."""
    return value.numel() if isinstance(value, torch.Tensor) else value.size


def _logged() -> dict[str, float]:
    """Return the logged scalars by name, as floats; waits for the device of tensors."""
    found = dict(_scalars)
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            if name not in _read or _read[name][0] is not value:
                _read[name] = value, float(value)
            found[name] = _read[name][1]
    return found


# ---- the thread ----------------------------------------------------------------------------------


class Watcher:
    """A leader's thread that reports on its super learner, writes the record, and logs warnings.

    Args:
        world: the World of this learner, for its options; each report uses the World at its time.
    """

    def __init__(self, world: World):
        config = world.config
        self._membership = world.membership
        self._joining = world.collectives.joining
        # a joining leader serves metrics late, as another leader may serve them already
        self._replaces = self._joining
        self._every_s = config.report_s
        self._record: Record | None = None
        if config.record is not None:
            self._record = Record(config.record, world.super_rank, every_s=config.report_s)
            self._record.write("start", time_s=time.time(), **_about(world))
        self._exporter = _exporter(config.metrics_address)
        # events of the run since this leader began, for metrics
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        # time since which this leader is the first living one
        self._first_since: float | None = None
        self._sampler = Sampler(world.super_size)
        self._alerts = Alerts(world.membership.names)
        self._states = [PeerState.ALIVE] * world.super_size
        # suspect super learners by super_rank: since when, time.monotonic
        self._suspect: dict[int, float] = {}
        # super learners in trouble, by super_rank: "suspect" or "failed", and since when, time.time
        self._ill: dict[int, tuple[str, float]] = {}
        # by super_rank: time of the super learner's last report in the record
        self._recorded: dict[int, float] = {}
        self._ages: dict[
            int, float
        ] = {}  # seconds since the newest report of each peer was received
        # returns the averaging that is reported on, None once it has stopped; None before the first one
        self._watched: Callable[[], Averaging | None] | None = None
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
        _running.remove(self)
        self._over.set()
        self._thread.join(5.0)
        if self._exporter is not None:
            self._exporter.close()
        if self._record is not None:
            self._note_end()
            self._record.close()

    def note_leaving(self) -> None:
        """Write to the record that this super learner leaves; called on SIGTERM, on another thread."""
        with self._lock:
            self._note_end()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()
            self._send()
        self._send(last=True)

    def _send(self, last: bool = False) -> None:
        """Send new numbers to the writer of log_to; not inside `look`, for which the trainer may wait."""
        outlet, shown = _outlet, self._shown
        if outlet is not None and shown is not None:
            outlet.send(time.monotonic(), *shown, last=last)

    def look(self, stopping: Averaging | None = None) -> None:
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

    def _look(self, world: World, stopping: Averaging | None) -> None:
        # also of an optimizer that was dropped, until its averaging stops: peers take silence for a hang
        watched = self._watched() if self._watched is not None else None
        found = live() or [one for one in live(also_stopping=True) if one is watched]
        averaging, last = stopping or next(iter(found), None), stopping is not None
        if averaging is None and self._watched is not None:
            return  # the watched averaging has stopped, and was reported for the last time then
        if averaging is not None and (self._watched is None or self._watched() is not averaging):
            self._watched = weakref.ref(averaging)
            averaging.at_stop.append(functools.partial(self.look, averaging))
        if last:  # its engine ends next: nothing may read it from now on
            self._watched = lambda: None
        counters = averaging.engine.counters() if averaging is not None else None
        own = self._sampler.report(_sample(averaging, counters), time.time())
        known = {world.super_rank: own}
        if averaging is not None:
            averaging.engine.tell(encode(own))
            known |= self._heard(averaging)
        now_s = time.monotonic()
        self._note_joined(world)
        self._note_states(world, now_s)
        speaks = self._speaks(world, now_s)
        self._write(world, known, counters, last, speaks)
        self._show(world, known, counters, speaks and not last)
        if speaks:
            self._shown = known, world.super_rank, _alive(world)
            late_s = late_after_s(self._every_s, world.super_size)
            now = {i: aged(r, self._ages.get(i, 0.0), late_s) for i, r in known.items()}
            for alert in self._alerts.check(now_s, now, _alive(world), self._suspect):
                self._warn(alert)
        else:
            self._shown = None

    def _heard(self, averaging: Averaging) -> dict[int, Report]:
        """Return the newest report received from each peer, by super_rank; note their ages."""
        told = averaging.engine.told()
        told.pop(averaging.world.super_rank, None)
        self._ages = {i: age_s for i, (_, _, age_s) in told.items()}
        heard = {i: decode(text) for i, (_, text, _) in told.items()}
        return {i: report for i, report in heard.items() if report is not None}

    def _write(
        self, world: World, known: dict[int, Report], counters: Any, last: bool, speaks: bool
    ) -> None:
        """Record this super learner's report; the first living leader also records peers without file."""
        record = self._record
        if record is None:
            return
        own, size = known[world.super_rank], world.super_size
        more = {"every_s": record.every_s, "super_size": size, **_tables(counters)}
        if (
            speaks and self._ill
        ):  # repeated in each report, for readers that read only the end of the file
            more["states"] = self._ill
        record.look(time.monotonic())
        record.report(world.super_rank, own, last=last, **more)
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
        tracks[world.super_rank].peers = _tables(counters).get("peers", {})
        self._exporter.show(Run(tracks, list(self._events)))
        now = time.monotonic()
        self._first_since = now if self._first_since is None else self._first_since
        at_once = world.super_rank == 0 and not self._replaces
        if at_once or now - self._first_since >= _TAKEOVER_S:
            self._exporter.open()

    def _note_joined(self, world: World) -> None:
        """Note that this super learner, which replaces a failed one, has joined."""
        if self._joining and not world.collectives.joining:
            self._joining = False
            i = world.super_rank
            self._note("joined", i, f"super learner {i} ({world.membership.names[i]}): joined")

    def _note_grown(self, world: World, size: int) -> None:
        """Note the new super learners of a job that now has `size` super learners."""
        for i in range(len(self._states), size):
            self._note("joined", i, f"super learner {i} ({world.membership.names[i]}): joined")
            self._states.append(PeerState.ALIVE)
        self._sampler.grow(size)

    def _note_states(self, world: World, now_s: float) -> None:
        """Note which super learners became suspect, answered again, left, failed or joined."""
        states = list(world.membership.states)
        if len(states) > len(self._states):
            self._note_grown(world, len(states))
        for i, (before, now) in enumerate(zip(self._states, states, strict=False)):
            if now is not before:
                what = "joined" if before in _GONE and now not in _GONE else now.name.lower()
                self._note(what, i, f"super learner {i} ({world.membership.names[i]}): {what}")
                self._ill.pop(i, None)
                if now in (PeerState.SUSPECT, PeerState.FAILED):
                    self._ill[i] = what, time.time()
        self._states = states
        self._suspect = {
            i: self._suspect.get(i, now_s)
            for i, state in enumerate(states)
            if state is PeerState.SUSPECT
        }

    def _note(self, what: str, about: int | None, text: str) -> None:
        """Write an event to the record, and count it in the metrics.

        Args:
            what: kind of the event, such as "joined".
            about: super_rank of the super learner that it is about.
            text: the line to show.
        """
        event = Event(time.time(), what, about, text)
        if self._record is not None:
            self._record.write("event", time_s=event.time_s, event=what, about=about, text=text)
        self._events.append(event)

    def _note_end(self) -> None:
        """Note that this super learner has ended its training, unless after a failure."""
        own = self._membership.own
        if self._joining:
            text = f"super learner {own} ({self._membership.names[own]}): ended before it joined"
            self._note("failed", own, text)
        elif not self._membership.own_failed and not script_fails():
            self._note("left", own, f"super learner {own} ({self._membership.names[own]}): left")

    def _speaks(self, world: World, now_s: float) -> bool:
        """Whether this is the first living leader, which warns.

        Leaders are skipped that have been suspect for _SILENT_S, or whose reports are missing.
        """
        late_s = late_after_s(self._every_s, world.super_size)
        return not world.collectives.joining and all(
            state in _GONE
            or now_s - self._suspect.get(i, now_s) > _SILENT_S
            or self._ages.get(i, 0.0) > late_s
            for i, state in enumerate(world.membership.states[: world.super_rank])
        )

    def _warn(self, alert: Alert) -> None:
        logger.warning("%s", alert.text)
        self._note("alert", alert.about, alert.text)


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


def _sample(averaging: Averaging | None, counters: Mapping[str, Any] | None) -> Sample:
    """Return the counters of an Averaging, or of a script without wrapped optimizer, and logged scalars."""
    parts = {"global_operations": usage.totals()["global_operations_s"]}
    if averaging is None:  # nothing counts steps, but the script may log a scalar named "step"
        logged = _logged()
        step = logged.get("step", 0.0)
        counted = int(step) if math.isfinite(step) else 0
        return Sample(time.monotonic(), counted, parts, waits=True, scalars=logged)
    sums = averaging.record.counters.sums
    rounds = averaging.plan.in_step
    return Sample(
        monotonic_s=time.monotonic(),
        step=averaging.step,
        parts_s={**{part: sums[part] for part in _PARTS}, **parts},
        engine=counters,
        due_steps=rounds.period if rounds else 1 / averaging.spec.config.exchanges_per_step,
        left_out=len(averaging.engine.memory.store.left_out(_LEFT_OUT)),
        nonfinite_steps=averaging.nonfinite_steps,
        share=share_of(averaging),
        bits=bits_of(averaging),
        steps=sum(one.step for one in live()),
        waits=usage.is_waiting() or any(map(_rests, live() or [averaging])),
        scalars=_logged(),
    )


def _rests(averaging: Averaging) -> bool:
    """Whether a trainer makes no step as it waits for others, asked for a pause, or dropped the optimizer."""
    is_away = averaging.super_learner.mates.is_away  # in join(), while local peers make steps
    asked = averaging.pauses or averaging.holds_mean or averaging.stopped
    return bool(asked or averaging.waits_for_peers or is_away)


def _tables(counters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the engine's tables for the record: exchanges by peer and chunks by staleness."""
    if counters is None:
        return {}
    return {
        "peers": {i: count for i, count in enumerate(counters["met"]) if count},
        "staleness": {i: count for i, count in enumerate(counters["staleness"]) if count},
    }


def _alive(world: World) -> set[int]:
    states = world.membership.states
    return {i for i, state in enumerate(states) if state is PeerState.ALIVE}


def start(world: World) -> None:
    """Monitor the run until shutdown, unless option report_s is 0. All learners call this together.

    Raises:
        ConfigError: if the record cannot be written, or for a bad address of the metrics.
        MissingRequirementError: if prometheus_client is not installed.
    """
    if world.config.report_s <= 0:
        return
    may_raise = world.config.record is not None or world.config.metrics_address is not None
    if not may_raise or world.collectives.joining:
        watcher = _made(world)
    else:  # if one learner raised alone, the others would wait for it
        watcher = unanimous(world, "record", lambda: _made(world))
    if watcher is not None:
        _running.append(watcher)
        watcher.start()
        world.teardown.at_shutdown(watcher.stop)
        world.departure.at_leave(watcher.note_leaving)


def running() -> list[Watcher]:
    """Return the watchers of this process: one on a leader, none on other learners."""
    return list(_running)


def _made(world: World) -> Watcher | None:
    return Watcher(world) if world.is_leader else None
