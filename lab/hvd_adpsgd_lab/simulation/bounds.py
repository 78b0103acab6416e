"""Checks the numbers of simulated jobs against bounds beyond which the simulator itself would fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvd_adpsgd.errors import ConfigError

Bound = tuple[float, float]  # least and largest value; two integers allow whole numbers only
SEED: Bound = (0, 2**62 - 1)


def in_bound(what: str, value: object, bound: Bound, cure: str = "Pass such a number.") -> None:
    """Raise ConfigError unless a number is within its bound.

    Args:
        what: name of the number, with which the error message begins.
        value: the number.
        bound: least and largest allowed value.
        cure: last sentence of the error message.

    Raises:
        ConfigError: if the value is out of its bound, not finite, or no number.
    """
    whole = isinstance(bound[0], int)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not bound[0] <= value <= bound[1]:  # type: ignore[operator]
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
        raise ConfigError(
            f"{what} is {shown}, allowed is a {'whole ' if whole else ''}number from {bound[0]} to "
            f"{bound[1]}. {cure}"
        )


def in_bounds(where: str, values: object, bounds: Mapping[str, Bound], cure: str) -> None:
    """Raise ConfigError unless the named attributes of an object are within their bounds.

    Args:
        where: name of the object, with which the error message begins.
        values: the object.
        bounds: bound of each checked attribute, by its name.
        cure: last sentence of the error message.

    Raises:
        ConfigError: for the first attribute that is out of its bound.
    """
    for name, bound in bounds.items():
        in_bound(f"{where}: {name}", getattr(values, name), bound, cure)


def check_fields(what: str, values: object, kind: type[Any], cure: str) -> None:
    """Raise ConfigError unless a value parsed from JSON is an object with the fields of a dataclass only.

    Args:
        what: name of the object, with which the error message begins.
        values: the parsed value.
        kind: the dataclass.
        cure: last sentence of the error message.

    Raises:
        ConfigError: if the value is no object, lacks a field that has no default, or has an unknown field.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: {str(values)[:40]!r} is no JSON object. {cure}")
    fields = dataclasses.fields(kind)
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    missing, unknown = needed - values.keys(), values.keys() - {f.name for f in fields}
    if missing or unknown:
        parts = [
            f"{said} fields: {', '.join(sorted(names)[:6])}"
            for said, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ConfigError(f"{what}: {'; '.join(parts)}. {cure}")
