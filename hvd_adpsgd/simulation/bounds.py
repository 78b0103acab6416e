"""Numbers of simulated jobs against their bounds: beyond them the simulator would break, not a promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvd_adpsgd.errors import ConfigError

__all__ = ["SEED", "Bound", "check_fields", "in_bound", "in_bounds"]

Bound = tuple[float, float]  # least and most; two integers allow whole numbers only
SEED: Bound = (0, 2**62 - 1)


def in_bound(what: str, value: object, bound: Bound, cure: str = "Pass such a number.") -> None:
    """Check a number.

    Args:
        what: of the number, for the error.
        value: the number.
        bound: least and most.
        cure: the last sentence of the error.

    Raises:
        ConfigError: if it is out of its bound, not finite, or no number.
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
    """Check attributes of an object, each by in_bound.

    Args:
        where: the object, for the error.
        values: the object.
        bounds: by attribute.
        cure: the last sentence of the error.

    Raises:
        ConfigError: for the first that is out of its bound.
    """
    for name, bound in bounds.items():
        in_bound(f"{where}: {name}", getattr(values, name), bound, cure)


def check_fields(what: str, values: object, kind: type[Any], cure: str) -> None:
    """Check that an object of JSON has the fields of a dataclass, and no others.

    Args:
        what: of the object, for the error.
        values: the object.
        kind: the dataclass.
        cure: the last sentence of the error.

    Raises:
        ConfigError: if it is no object, a field that has no default is missing, or there is another one.
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
