"""Scalars that the script logs (hvd.log), by name, on this learner."""

import logging
import math
import numbers
from typing import Any

import numpy as np
import torch

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.watching.reports import readable

logger = logging.getLogger("hvd_adpsgd")

_MOST, _LONGEST = 64, 128  # most names of scalars, and most characters of a name
_SHOWN = 80  # most characters of a value in a message

_SIZED = (torch.Tensor, np.ndarray, np.generic)
_scalars: dict[str, Any] = {}  # scalars by name: a float, or a tensor on a GPU that is not read yet
# by name, the tensor that was read last, and its value: the next call need not wait for the device
_read: dict[str, tuple[torch.Tensor, float]] = {}
_full = False  # whether the warning about too many names was logged


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


def _require_name(name: str) -> None:
    if len(name) <= _LONGEST and readable(name) == name:
        return
    raise ConfigError(
        f"hvd.log: the name {name[:20]!r}... has {len(name)} characters, allowed are {_LONGEST} that UTF-8 "
        "can hold (no lone surrogates). Use a shorter, plain name."
    )


def _number(name: str, value: Any) -> Any:
    """Return a scalar as a float; a tensor on a GPU as a copy on that GPU, which `logged` reads."""
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


def logged() -> dict[str, float]:
    """Return the logged scalars by name, as floats; waits for the device of tensors."""
    values = dict(_scalars)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if name not in _read or _read[name][0] is not value:
                _read[name] = value, float(value)
            values[name] = _read[name][1]
    return values
