"""Reports: numbers about its training that a super learner sends to its peers once per second."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_adpsgd.engine.metrics import PARTS as ENGINE_PARTS

# parts of a super learner's time, whose shares a report contains
PARTS = (*ENGINE_PARTS, "global_operations")
REPORT_NBYTES = 200  # most bytes of an encoded report
NAME_NBYTES = 32  # most bytes of a scalar's name in an encoded report; longer names are truncated
_FORM = 4  # first byte of an encoded report; `decode` returns None for other values
_SCALAR = struct.Struct("<f")
_LARGEST_COUNT = 2**63 - 1
_DRAWN = 1e100  # largest absolute value that is drawn, or compared for an alert
LATEST_S = 4e9  # largest unix time that is accepted: in the year 2096


@dataclass(frozen=True)
class Metric:
    """How a number of a report is sent, described and shown.

    Attributes:
        name: the field of Report.
        code: format in a message, a letter of struct; "%": a share, in whole percent.
        meaning: what it is; "lately" means over the last 10 s.
        prometheus: name for Prometheus after hvd_adpsgd_, under which (and `name` for hvd.log_to) it is
            exported; None: it is not.
        label: label and its value, where metrics share a name.
        counts: whether it never decreases.
        column: title of its column in the table; None: none.
        cell: text of a report in that column; default: the number.
        charts: what its charts on the page are drawn over: "step", "time".
        axis: their scale, "linear" or "log".
    """

    name: str
    code: str
    meaning: str
    prometheus: str | None = None
    label: tuple[str, str] | None = None
    counts: bool = False
    column: str | None = None
    cell: Callable[[Report], str] | None = None
    charts: tuple[str, ...] = ()
    axis: str = "linear"


def _metric(
    default: float, code: str, meaning: str, prometheus: str | None = None, **shown: Any
) -> Any:
    """Make a field of Report that carries its Metric."""
    metric = {"code": code, "meaning": meaning, "prometheus": prometheus, **shown}
    return field(default=default, metadata=metric)


def _part(name: str) -> Any:
    meaning = "share of time in a part of the step, lately"
    return _metric(0.0, "%", meaning, "step_share", label=("part", name))


def _staleness(percentile: str, **shown: Any) -> Any:
    meaning = "age of corrections in steps, lately; 63: or more"
    return _metric(0, "B", meaning, "staleness_steps", label=("quantile", percentile), **shown)


def short(value: float) -> str:
    """Format a number in few characters."""
    return "–" if math.isnan(value) else f"{value:.3g}"


@dataclass(frozen=True)
class Report:
    """State of one super learner at one moment: the numbers of METRICS, and scalars.

    Attributes:
        scalars: the numbers that the script logs (hvd.log), by name.
    """

    time_s: float = _metric(0.0, "d", "time of the report, on the host's clock")
    step: int = _metric(0, "q", "optimizer steps", "steps", counts=True, column="step")
    steps_per_s: float = _metric(
        math.nan, "f", "steps per second, lately", "steps_per_second", column="steps/s", charts=("time",)
    )  # fmt: skip
    staleness_p50: int = _staleness(
        "0.5", column="stale", cell=lambda r: f"{r.staleness_p50}/{r.staleness_p95}"
    )
    staleness_p95: int = _staleness("0.95")
    distance: float = _metric(
        math.nan, "f", "consensus distance, estimated from the exchanges lately", "consensus_distance",
        column="distance", charts=("step", "time"), axis="log",
    )  # fmt: skip
    exchanges: int = _metric(0, "q", "exchanges, means of all included", "exchanges", counts=True)
    exchanges_per_s: float = _metric(
        math.nan, "f", "exchanges per second, lately", "exchanges_per_second",
        column="exch/s", charts=("time",),
    )  # fmt: skip
    share: float = _metric(
        math.nan, "f", "share of the model that an exchange moves", "exchange_share", charts=("time",),
        column="share", cell=lambda r: short(r.share) + (f"/{r.bits}b" if r.bits else ""),
    )  # fmt: skip
    sent_per_s: float = _metric(
        math.nan, "f", "bytes sent over links per second, lately", "sent_bytes_per_second",
        column="MB/s", cell=lambda r: short(r.sent_per_s / 1e6),
    )  # fmt: skip
    apart_s: float = _metric(0.0, "f", "seconds since the last exchange", "since_exchange_seconds")
    apart_steps: int = _metric(0, "I", "steps since the last exchange", "since_exchange_steps")
    due_steps: float = _metric(1.0, "f", "steps between two exchanges according to the strategy")
    inner_allreduce: float = _part("inner_allreduce")
    optimizer: float = _part("optimizer")
    collect: float = _part("collect")
    offer: float = _part("offer")
    global_operations: float = _part("global_operations")
    left_out: int = _metric(0, "I", "chunks that the last 8 exchanges left out", "left_out_chunks")
    nonfinite_steps: int = _metric(
        0, "I", "steps with NaN or infinity", "nonfinite_steps", counts=True
    )
    bits: int = _metric(
        0, "B", "bits per element of exchanges between hosts; 0: all", "exchange_bits"
    )
    # a wait for other super learners, and a pause that the script asks for, count as steps
    idle_s: float = _metric(0.0, "f", "seconds since the last step", "since_step_seconds")
    longest_idle_s: float = _metric(0.0, "f", "longest such time in the last hour")
    scalars: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of its fields."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Report:
        """Make a report from the dict of `to_dict`; unknown names are ignored, None becomes NaN.

        Raises:
            TypeError, ValueError, OverflowError, AttributeError: if `fields` is no report.
        """
        values: dict[str, Any] = {"time_s": number(fields.get("time_s"), 0, LATEST_S)}
        for metric in METRICS[1:]:
            if metric.name in fields:
                value = fields[metric.name]
                values[metric.name] = number(value) if metric.code in "df%" else whole(value)
        scalars = (fields.get("scalars") or {}).items()
        values["scalars"] = {readable(name): number(value) for name, value in scalars}
        return cls(**values)


METRICS = tuple(Metric(f.name, **f.metadata) for f in dataclasses.fields(Report) if f.metadata)
_NUMBERS = struct.Struct("<B" + "".join(m.code for m in METRICS).replace("%", "B"))


def number(value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Convert a value parsed from JSON to float; None becomes NaN, which is allowed only without bounds.

    Raises:
        TypeError, ValueError, OverflowError: if the value is no number, or not within the bounds.
    """
    result = math.nan if value is None else float(value)
    is_bounded = math.isfinite(least) or math.isfinite(most)
    if is_bounded and not least <= result <= most:
        raise ValueError(f"{result} is not within {least} and {most}")
    return result


def whole(value: Any, most: int = _LARGEST_COUNT) -> int:
    """Convert a value or a key parsed from JSON to an integer in [0, most].

    Raises:
        TypeError, ValueError, OverflowError: if the value is no such integer.
    """
    result = int(value)
    if not 0 <= result <= most:
        raise ValueError(f"not within 0 and {most}")
    return result


def readable(value: Any) -> str:
    """Convert a value parsed from JSON to text that can be written as UTF-8: lone surrogates are replaced."""
    return str(value).encode("utf-8", "replace").decode()


def can_draw(value: float) -> bool:
    """Whether a value is finite, and so small that sums and differences of such values are finite."""
    return abs(value) <= _DRAWN


def encode(report: Report) -> bytes:
    """Encode a report for a message, in at most REPORT_NBYTES bytes: scalars may be left out."""
    out = _NUMBERS.pack(_FORM, *(_packed(m.code, getattr(report, m.name)) for m in METRICS))
    for name, value in report.scalars.items():
        key = name.encode("utf-8", "replace")[:NAME_NBYTES]
        if len(out) + 1 + len(key) + _SCALAR.size <= REPORT_NBYTES:
            out += bytes([len(key)]) + key + _SCALAR.pack(_float32(value))
    return out


def decode(data: bytes) -> Report | None:
    """Decode a report from a message; return None if the bytes have another form or are truncated."""
    if len(data) < _NUMBERS.size or data[0] != _FORM:
        return None
    values = {
        m.name: value / 100 if m.code == "%" else value
        for m, value in zip(METRICS, _NUMBERS.unpack_from(data)[1:], strict=True)
    }
    scalars, at = {}, _NUMBERS.size
    while at < len(data):
        end = at + 1 + data[at]
        if end + _SCALAR.size > len(data):
            return None
        (value,) = _SCALAR.unpack_from(data, end)
        scalars[data[at + 1 : end].decode("utf-8", "replace")] = value
        at = end + _SCALAR.size
    return Report(**values, scalars=scalars)


def _packed(code: str, value: float) -> float:
    """Return a number as `code` can hold it: the nearest one, for a float32 that is too large an infinity."""
    if code == "%":
        return round(100 * min(max(value, 0.0), 1.0)) if math.isfinite(value) else 0
    return (
        _float32(value) if code in "df" else min(value, 2 ** (8 * struct.calcsize(f"<{code}")) - 1)
    )


def _float32(value: float) -> float:
    """Return the value, or an infinity if the value is too large for a float32."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    return value


def main_scalar(report: Report) -> tuple[str, float] | None:
    """Return name and value of the scalar "loss", else of the first with "loss" in its name, else None."""
    names = [name for name in report.scalars if "loss" in name.lower()]
    if not names:
        return None
    name = "loss" if "loss" in names else names[0]
    return name, report.scalars[name]
