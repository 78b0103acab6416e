"""Checks before a simulation that its output files can be written after it."""

from __future__ import annotations

from pathlib import Path

from hvd_adpsgd.errors import ConfigError, MissingRequirementError


def check_writable(option: str, path: str | None) -> None:
    """Check that the file of an option can be written, without changing its content.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if path is None:
        return
    file = Path(path)
    try:
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: the file cannot be written ({error.strerror}). Name a file in a folder that "
            "exists and may be written to."
        ) from error


def check_different(one: tuple[str, str | None], other: tuple[str, str | None]) -> None:
    """Check that two options, with their paths, do not name one file.

    Raises:
        ConfigError: if the second file would overwrite the first one.
    """
    if one[1] and other[1] and Path(one[1]).resolve() == Path(other[1]).resolve():
        raise ConfigError(
            f"{one[0]} and {other[0]} are both {one[1]}: one would overwrite the other. Name two files."
        )


def check_image(option: str, path: str | None) -> None:
    """Check that matplotlib can draw into the file of an option.

    Raises:
        MissingRequirementError: if matplotlib is not installed.
        ConfigError: if matplotlib writes no images with this suffix, or the file cannot be written.
    """
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise MissingRequirementError(
            f"{option}: no figure can be drawn, matplotlib is not installed. Run pip install matplotlib."
        ) from error
    suffixes = [f".{name}" for name in FigureCanvasAgg.get_supported_filetypes()]
    if Path(path).suffix.lower() not in suffixes:
        raise ConfigError(
            f"{option} {path}: the name ends in no known suffix of an image, allowed are "
            f"{', '.join(suffixes)}. Name a file with one of these."
        )
    check_writable(option, path)
