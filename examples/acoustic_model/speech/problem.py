"""Errors that the examples report to the user in one line, without a traceback."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType


class Problem(Exception):
    """An error that the user can cure; its message says what, where, value against bound, and the cure."""


def require(module: str, package: str) -> ModuleType:
    """Import and return `module`, which belongs to `package`.

    Raises:
        Problem: if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Problem(
            f"package {package} is needed here and did not import ({error}). "
            "Install it: pip install -r requirements-examples.txt"
        ) from error


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser whose help shows a script's docstring with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def within(name: str, value: float, low: float, high: float) -> None:
    """Check that the value of option `name` is in [low, high].

    Raises:
        Problem: if the value is outside.
    """
    if not low <= value <= high:
        raise Problem(f"{name} is {value:g}, allowed are {low:g} to {high:g}")


def drop_repeats(options: argparse.Namespace, *names: str) -> None:
    """Remove repeated values from each of the options `names`, keeping their order."""
    for name in names:
        setattr(options, name, list(dict.fromkeys(getattr(options, name))))


def run(main: Callable[[], None]) -> None:
    """Call a script's main; report a Problem, a full disk or Ctrl-C in one line and exit 2 or 130."""
    try:
        main()
    except Problem as problem:
        _leave(f"error: {problem}", 2)
    except OSError as error:
        if error.errno not in _ADVICE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _leave(f"error: {where}{_ADVICE[error.errno]}", 2)
    except KeyboardInterrupt:
        _leave("stopped by Ctrl-C", 130)


_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder with --out",
    errno.EDQUOT: "the quota is used up; free some space or choose another folder with --out",
    errno.EACCES: "no permission to write; choose another folder with --out",
    errno.EROFS: "the file system is read-only; choose another folder with --out",
}


def _leave(message: str, status: int) -> None:
    """Exit with `status`; only rank 0 prints the message, because all learners have the same problem."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    sys.exit(status)
