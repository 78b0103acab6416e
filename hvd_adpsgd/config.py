"""Config: every option of the library, with its unit, range and environment name.

An option is declared once, as a field below; parsing, checking, error messages and the table of the
documentation all come from that declaration.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.formats import AUTO, BY_NAME, FORMATS, OWN

PREFIX = "HVD_ADPSGD_"
_PRIVATE = "ADPSGD_"
# Not an option: this variable holds the super_rank of the failed super learner that a replacement replaces.
REPLACES = "HVD_ADPSGD_JOIN_AS"
FIRST_SHARE = 1 / 16  # with exchange_share=auto, before anything was measured


@dataclass(frozen=True)
class Option:
    """The values that one field of Config may have, and its description.

    Attributes:
        kind: type of the value: int, float or str.
        unit: unit of the value, empty for pure numbers and words.
        meaning: description of the option in the documentation's table.
        low: smallest allowed value; with `low_open` the bound that the value must exceed.
        high: largest allowed value; None: no bound.
        low_open: whether `low` itself is not allowed.
        off: whether 0 is allowed too, although it is below `low`.
        choices: the allowed words (compared without case) of a str; () for any text.
        word: a word (compared without case) that is allowed in place of a number.
        optional: whether None is allowed; in the environment an empty string or "none".
        same: whether all learners of a job need the same value; init() compares it.
        is_private: whether it is for tests and studies alone: in no page, and read from ADPSGD_* variables.
    """

    kind: type
    unit: str
    meaning: str
    low: float = -math.inf
    high: float | None = None
    low_open: bool = False
    off: bool = False
    choices: tuple[str, ...] = ()
    word: str | None = None
    optional: bool = False
    same: bool = True
    is_private: bool = False

    @property
    def range(self) -> str:
        """The allowed values as text, for the documentation's table and for error messages."""
        words = self._interval_text()
        if self.kind is str:
            words = " | ".join(self.choices) or "any text"
        words = f"{words}, or 0" if self.off else words
        words = f"{self.word}, or {words}" if self.word else words
        return f"{words}, or None" if self.optional else words

    def _interval_text(self) -> str:
        if self.high is None:
            return f"{'>' if self.low_open else '>='} {self.low:g}"
        if self.low_open:
            return f"> {self.low:g} and <= {self.high:g}"
        return f"{self.low:g} to {self.high:g}"

    def allows(self, value: Any) -> bool:
        """Whether the option allows a value, which has the option's type; NaN is never allowed."""
        if self.kind is str:
            return value in self.choices if self.choices else bool(value)
        if isinstance(value, str):
            return value == self.word
        if self.off and value == 0:
            return True
        above = value > self.low if self.low_open else value >= self.low
        return bool(above and (self.high is None or value <= self.high))

    def coerce(self, value: Any) -> Any:
        """Convert a value to the plain int, float or str that Config stores.

        Raises:
            TypeError: if the value is of another kind (such as True or 1.5 for an int option).
        """
        if isinstance(value, bool):
            raise TypeError("a truth value")
        if isinstance(value, str) and value.lower() == self.word:
            return self.word
        if self.kind is int:
            return operator.index(value)
        if self.kind is float:
            if isinstance(value, (str, bytes)):
                raise TypeError("text")
            return float(value)
        text = os.fspath(value)
        if not isinstance(text, str):
            raise TypeError("not text")
        return text.lower() if self.choices else text

    def parse(self, text: str) -> Any:
        """Convert the text of an environment variable to a value.

        Raises:
            ValueError: if the option is a number and the text is not.
        """
        text = text.strip()
        if self.optional and text.lower() in ("", "none"):
            return None
        if text.lower() == self.word:
            return self.word
        return self.kind(text)


class OptionRow(NamedTuple):
    """One row of the documentation's table of options, all text."""

    name: str
    env: str
    default: str
    unit: str
    range: str
    meaning: str


def _option(default: Any, kind: type, unit: str, meaning: str, **bounds: Any) -> Any:
    """Make a dataclass field that carries its Option."""
    option = Option(kind, unit, meaning, **bounds)
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class Config:
    """All options of the library, checked; immutable, comparable, printable.

    The arguments are the fields below. The environment variable of each is `HVD_ADPSGD_` and the field's name
    in capitals. `Config.table()` lists unit, range and meaning of each.

    Raises:
        ConfigError: if a value is of the wrong kind or out of its range.
    """

    # default, kind, unit, meaning, and what values are allowed
    # fmt: off
    super_learner_size: int | None = _option(None, int, "learners",
        "learners per super learner; None: all learners of a host", low=1, optional=True)
    averaging: str = _option("random_pairs", str, "", "strategy, as name or name:key=value")
    exchanges_per_step: float = _option(1.0, float, "exchanges/step",
        "exchanges per step on average, whichever side starts them", low=0, low_open=True, high=64)
    exchange_share: float | str = _option(1.0, float, "of the model",
        "share of the model that an exchange moves: that many of its chunks; auto: chosen by max_overhead",
        low=0, low_open=True, high=1, word="auto")
    max_overhead: float = _option(0.03, float, "of a step",
        "with exchange_share=auto: most that exchanges may cost", low=0, low_open=True, high=1)
    inner: str | None = _option(None, str, "",
        "what averages gradients in a super learner; None: Horovod, or torch.distributed where Horovod is "
        "missing", choices=("horovod", "torch"), optional=True)
    shard: str | None = _option(None, str, "",
        "auto: each learner averages a shard of the model, where possible; None: the leader averages all of "
        "it", choices=("auto",), optional=True)
    max_staleness: int | None = _option(None, int, "steps",
        "wait when a correction would be older than this; None: never wait", low=1, high=10**9, optional=True)
    wire_dtype: str | None = _option(None, str, "",
        "format of models in messages; "
        + "; ".join(f"{each.name}: {each.meaning}" for each in FORMATS)
        + "; auto, with exchange_share=auto: as few bits as the link demands", choices=(*BY_NAME, AUTO),
        optional=True)
    moments: str | None = _option(None, str, "",
        "moments of Adam, Muon and their kin: shared by super learners, or own; None: shared where possible",
        choices=("shared", "own"), optional=True)
    moments_period: int = _option(4, int, "exchanges",
        "shared moments are in one of so many exchanges; in more if exchange_share or exchanges_per_step is "
        "below 1", low=1, high=64, is_private=True)
    wire: str = _option("auto", str, "",
        "what carries messages between engines; auto: MPI, in a job without it TCP",
        choices=("auto", "mpi", "tcp"))
    nics: str | None = _option(None, str, "",
        "with wire=tcp: interfaces, separated by commas; each host uses the first that it has; None: "
        "loopback on a single host, else the one that reaches the other hosts", optional=True)
    failure_timeout_s: float = _option(60.0, float, "s",
        "with wire=tcp: a super learner whose host has not answered for so long has failed", low=1,
        high=86400)
    same_host: str = _option("memory", str, "",
        "how models and large tensors travel on one host: shared memory, or messages",
        choices=("memory", "mpi"), is_private=True)
    nonfinite: str = _option("raise", str, "",
        "a model with NaN or infinity: raise NonFiniteModelError, or train on without averaging; on a GPU a "
        "step later, on a CPU with a small share up to 8", choices=("raise", "skip"))
    chunk_kib: int = _option(256, int, "KiB",
        "largest piece in which a model travels; above the default at most an eighth of the model", low=64,
        high=65536, is_private=True)
    deadline_s: float = _option(1.0, float, "s",
        "silence after which exchanges with a peer stop until it answers; at least the time of a chunk at "
        "10 Mb/s", low=0.05, high=3600)
    leave_deadline_s: float = _option(5.0, float, "s",
        "longest wait for other learners when one ends; half of it for exchanges with silent peers", low=0.05,
        high=3600)
    start_timeout_s: float = _option(300.0, float, "s",
        "longest time for hvd.init() to connect all learners; then LaunchError", low=1, high=86400)
    spare_slots: int = _option(0, int, "learners",
        "learners that a host may run beyond its launcher's, to replace those of lost hosts (hvd.admit)",
        low=0, high=10**6)
    on_failure: str = _option("continue", str, "",
        "operations over all learners when some have failed: continue with the survivors, or raise",
        choices=("continue", "raise"))
    quorum: str | None = _option(None, str, "",
        "majority: with half or more of the super learners failed, the rest stops with QuorumLostError",
        choices=("majority",), optional=True)
    join: str | None = _option(None, str, "host:port,...",
        "address that a job prints: these learners join that job as a super learner, with its "
        "join_secret_file", optional=True, same=False)
    join_secret_file: str | None = _option(None, str, "path",
        "file of the secret for joining (64 hexadecimal digits, only its owner may read it), made if "
        "missing; None: nothing can join", optional=True, same=False)
    report_s: float = _option(1.0, float, "s",
        "interval of the reports that super learners send to each other; 0: never", low=0.01, off=True,
        high=3600)
    record: str | None = _option(None, str, "path", "folder for the record of the run", optional=True)
    metrics_address: str | None = _option(None, str, "",
        "[host]:port of metrics for Prometheus, loopback without a host", optional=True)
    timeline: str | None = _option(None, str, "path",
        "file for Chrome traces, one per learner: trace.json becomes trace.0.json, ...", optional=True)
    log_level: str = _option("warning", str, "", "least severe message that is logged",
        choices=("debug", "info", "warning", "error"), same=False)
    # fmt: on

    def __post_init__(self) -> None:
        for name, option in _options().items():
            # object.__setattr__ because the dataclass is frozen: each field gets its converted, checked value
            object.__setattr__(self, name, _checked(name, option, getattr(self, name)))
        if self.wire_dtype == OWN.name:  # the name that people know for the default
            object.__setattr__(self, "wire_dtype", None)

    @property
    def first_share(self) -> float:
        """The share of the model that the first exchanges move; with a number, also all others."""
        return FIRST_SHARE if isinstance(self.exchange_share, str) else self.exchange_share

    @property
    def period_of_moments(self) -> int:
        """In how many exchanges shared moments move once: in fewer where exchanges are few or small."""
        share = self.first_share * min(1.0, self.exchanges_per_step)
        return max(1, round(self.moments_period * share))

    @property
    def bounds_staleness(self) -> bool:
        """Whether steps wait for exchanges that would bring too old corrections."""
        return self.max_staleness is not None

    @property
    def chooses_share(self) -> bool:
        """Whether each super learner chooses the share of its exchanges (exchange_share="auto")."""
        return isinstance(self.exchange_share, str)

    @property
    def chooses_bits(self) -> bool:
        """Whether each super learner chooses the format of its exchanges, too (wire_dtype="auto")."""
        return self.wire_dtype == AUTO

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read the options from HVD_ADPSGD_* variables; options without a variable have their default.

        Private options are read from ADPSGD_* variables.
        An empty variable stands for the default. A variable HVD_ADPSGD_* that is no option is an error,
        because a misspelt option would otherwise be ignored silently.

        Raises:
            ConfigError: for an unknown name, or a value that is unreadable or out of range.
        """
        known = {environment_name(name): name for name in _options()}
        given = {
            key: text
            for key, text in environ.items()
            if (key.startswith(PREFIX) and key != REPLACES) or key in known
        }
        public = [row.env for row in cls.table()]
        for key in sorted(given.keys() - known.keys()):
            _require_known(key, public, "environment variable", "environment")
        return cls(
            **{known[k]: _parsed(known[k], text) for k, text in given.items() if text.strip()}
        )

    @staticmethod
    def parsed(texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of options, by name, that texts mean.

        Raises:
            ConfigError: for an unknown option or an unreadable text.
        """
        for name in texts:
            _require_known(name, _options(), "option", "Config.parsed")
        return {name: _parsed(name, text) for name, text in texts.items()}

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some options changed and checked.

        Raises:
            ConfigError: for an unknown option or a value out of range.
        """
        for name in changes:
            _require_known(name, _options(), "option", "Config.replace")
        return dataclasses.replace(self, **changes)

    def changes(self, default: Config) -> dict[str, Any]:
        """Return the options, by name, that differ from those of `default`."""
        values = {name: getattr(self, name) for name in _options()}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    def unequal(self, other: Config) -> str | None:
        """Return the first option that must be equal on all learners but differs in `other`; else None."""
        for name, option in _options().items():
            if option.same and getattr(self, name) != getattr(other, name):
                return name
        return None

    @classmethod
    def table(cls) -> tuple[OptionRow, ...]:
        """Return the documentation's table: one row per public option, in the order of the fields."""
        return tuple(
            OptionRow(f.name, environment_name(f.name), str(f.default), o.unit, o.range, o.meaning)
            for f, o in ((f, f.metadata["option"]) for f in dataclasses.fields(cls))
            if not o.is_private
        )


def environment_name(name: str) -> str:
    """Return the environment variable of the option `name`."""
    return (_PRIVATE if _options()[name].is_private else PREFIX) + name.upper()


def _options() -> dict[str, Option]:
    """Return the Option of each field of Config by the field's name, in their order."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(Config)}


def _checked(name: str, option: Option, value: Any) -> Any:
    """Return the value of an option as Config stores it; raise ConfigError if it is not allowed."""
    if value is None and option.optional:
        return None
    try:
        plain = option.coerce(value)
    except (TypeError, ValueError, OverflowError):
        raise _bad_value(name, option, value) from None
    if not option.allows(plain):
        raise _bad_value(name, option, value)
    return plain


def _parsed(name: str, text: str) -> Any:
    """Convert the text of an environment variable to the option's type, or raise ConfigError."""
    option = _options()[name]
    try:
        return option.parse(text)
    except ValueError:
        raise _bad_value(name, option, text) from None


def _bad_value(name: str, option: Option, value: object) -> ConfigError:
    unit = f" {option.unit}" if option.unit else ""
    return ConfigError(
        f"bad value for {name}: {environment_name(name)} or Config.{name} is {value!r}, allowed "
        f"is {option.kind.__name__} {option.range}{unit}. Set it to a value in that range, or leave "
        f"it out for the default ({Config.__dataclass_fields__[name].default!r})."
    )


def _require_known(name: str, known: Iterable[str], kind: str, where: str) -> None:
    names = {one.upper().removeprefix(PREFIX): one for one in known}
    if name in names.values():
        return
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), names, n=1)
    hint = f" (did you mean {names[near[0]]}?)" if near else ""
    raise ConfigError(
        f"unknown {kind} {name} in {where}{hint}. Rename it or remove it: docs/options.md lists all."
    )
