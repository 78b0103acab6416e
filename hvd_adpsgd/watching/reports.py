"""Reports: numbers about its training that a super learner sends to its peers once per second."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "LATEST_S",
    "NAME_NBYTES",
    "PARTS",
    "REPORT_NBYTES",
    "Report",
    "can_draw",
    "decode",
    "encode",
    "main_scalar",
    "number",
    "readable",
    "whole",
]

# parts of a super learner's time, whose shares a report contains
PARTS = ("inner_allreduce", "optimizer", "collect", "offer", "global_operations")
REPORT_NBYTES = 200  # most bytes of an encoded report
NAME_NBYTES = 32  # most bytes of a scalar's name in an encoded report; longer names are truncated
_FORM = 4  # first byte of an encoded report; `decode` returns None for other values
_NUMBERS = struct.Struct("<BdqfBBfqfffIfBBBBBIIfBff")
_SCALAR = struct.Struct("<f")
_LARGEST = 2**32 - 1
_LARGEST_COUNT = 2**63 - 1
_DRAWN = 1e100  # largest absolute value that is drawn, or compared for an alert
LATEST_S = 4e9  # largest unix time that is accepted: in the year 2096


@dataclass(frozen=True)
class Report:
    """State of one super learner at one moment. "Lately" means over the last 10 s.

    Attributes:
        time_s: time of the report, on the host's clock (time.time).
        step: number of optimizer steps so far.
        steps_per_s: steps per second lately.
        staleness_p50, staleness_p95: percentiles of the staleness of corrections lately, in steps; 63 means
            63 or more.
        distance: consensus distance, estimated from the exchanges lately; NaN before the first exchange.
        exchanges: number of finished exchanges so far, means of all included.
        exchanges_per_s, sent_per_s: exchanges, and bytes sent over links, per second lately.
        apart_s, apart_steps: seconds and steps since the last finished exchange.
        due_steps: steps between two exchanges according to the strategy.
        inner_allreduce, optimizer, collect, offer, global_operations: share of time in parts of the step and
            in operations over all learners lately, in [0, 1].
        left_out: number of chunks of the model that the last 8 exchanges could not average.
        nonfinite_steps: number of steps after which the model was not finite.
        share: share of the model that the next exchanges move; NaN if unknown.
        bits: their bits per element between hosts: 4, 8 or 16; 0: as many as the model has.
        idle_s: seconds since the trainer made a step, waited for other super learners, or was in a pause
            that it has asked for (averaging_paused, averaged).
        longest_idle_s: the longest such time between two steps, in the last hour.
        scalars: the numbers that the script logs (hvd.log), by name.
    """

    time_s: float = 0.0
    step: int = 0
    steps_per_s: float = math.nan
    staleness_p50: int = 0
    staleness_p95: int = 0
    distance: float = math.nan
    exchanges: int = 0
    exchanges_per_s: float = math.nan
    sent_per_s: float = math.nan
    apart_s: float = 0.0
    apart_steps: int = 0
    due_steps: float = 1.0
    inner_allreduce: float = 0.0
    optimizer: float = 0.0
    collect: float = 0.0
    offer: float = 0.0
    global_operations: float = 0.0
    left_out: int = 0
    nonfinite_steps: int = 0
    share: float = math.nan
    bits: int = 0
    idle_s: float = 0.0
    longest_idle_s: float = 0.0
    scalars: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of its fields."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Report:
        """Make a report from the dict of `to_dict`; unknown names are ignored, None becomes NaN.

        Raises:
            TypeError, ValueError, OverflowError, AttributeError: if `found` is no report.
        """
        values: dict[str, Any] = {"time_s": number(found.get("time_s"), 0, LATEST_S)}
        for f in dataclasses.fields(cls):
            if f.name in found and f.name not in ("time_s", "scalars"):
                value = found[f.name]
                values[f.name] = whole(value) if isinstance(f.default, int) else number(value)
        scalars = (found.get("scalars") or {}).items()
        values["scalars"] = {readable(name): number(value) for name, value in scalars}
        return cls(**values)


def number(value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Convert a value parsed from JSON to float; None becomes NaN, which is allowed only without bounds.

    Raises:
        TypeError, ValueError, OverflowError: if the value is no number, or not within the bounds.
    """
    found = math.nan if value is None else float(value)
    is_bounded = math.isfinite(least) or math.isfinite(most)
    if is_bounded and not least <= found <= most:
        raise ValueError(f"{found} is not within {least} and {most}")
    return found


def whole(value: Any, most: int = _LARGEST_COUNT) -> int:
    """Convert a value or a key parsed from JSON to an integer in [0, most].

    Raises:
        TypeError, ValueError, OverflowError: if the value is no such integer.
    """
    found = int(value)
    if not 0 <= found <= most:
        raise ValueError(f"not within 0 and {most}")
    return found


def readable(value: Any) -> str:
    """Convert a value parsed from JSON to text that can be written as UTF-8: lone surrogates are replaced."""
    return str(value).encode("utf-8", "replace").decode()


def can_draw(value: float) -> bool:
    """Whether a value is finite, and so small that sums and differences of such values are finite."""
    return abs(value) <= _DRAWN


def encode(report: Report) -> bytes:
    """Encode a report for a message, in at most REPORT_NBYTES bytes: scalars may be left out."""
    out = _NUMBERS.pack(
        _FORM,
        report.time_s,
        report.step,
        _float32(report.steps_per_s),
        min(report.staleness_p50, 255),
        min(report.staleness_p95, 255),
        _float32(report.distance),
        report.exchanges,
        _float32(report.exchanges_per_s),
        _float32(report.sent_per_s),
        _float32(report.apart_s),
        min(report.apart_steps, _LARGEST),
        _float32(report.due_steps),
        *(
            _percent(share)
            for share in (
                report.inner_allreduce,
                report.optimizer,
                report.collect,
                report.offer,
                report.global_operations,
            )
        ),
        min(report.left_out, _LARGEST),
        min(report.nonfinite_steps, _LARGEST),
        _float32(report.share),
        min(report.bits, 255),
        _float32(report.idle_s),
        _float32(report.longest_idle_s),
    )
    for name, value in report.scalars.items():
        short = name.encode("utf-8", "replace")[:NAME_NBYTES]
        if len(out) + 1 + len(short) + _SCALAR.size <= REPORT_NBYTES:
            out += bytes([len(short)]) + short + _SCALAR.pack(_float32(value))
    return out


def decode(data: bytes) -> Report | None:
    """Decode a report from a message; return None if the bytes have another form or are truncated."""
    if len(data) < _NUMBERS.size or data[0] != _FORM:
        return None
    values = list(_NUMBERS.unpack_from(data))[1:]
    values[12:17] = [percent / 100 for percent in values[12:17]]
    scalars, at = {}, _NUMBERS.size
    while at < len(data):
        end = at + 1 + data[at]
        if end + _SCALAR.size > len(data):
            return None
        (value,) = _SCALAR.unpack_from(data, end)
        scalars[data[at + 1 : end].decode("utf-8", "replace")] = value
        at = end + _SCALAR.size
    names = [f.name for f in dataclasses.fields(Report)][: len(values)]
    return Report(**dict(zip(names, values, strict=True)), scalars=scalars)


def _float32(value: float) -> float:
    """Return the value, or an infinity if the value is too large for a float32."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    return value


def _percent(share: float) -> int:
    return round(100 * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0


def main_scalar(report: Report) -> tuple[str, float] | None:
    """Return name and value of the scalar "loss", else of the first with "loss" in its name, else None."""
    names = [name for name in report.scalars if "loss" in name.lower()]
    if not names:
        return None
    name = "loss" if "loss" in names else names[0]
    return name, report.scalars[name]
