"""Writes a report of a run from its record: one HTML file that needs no server and loads no other file.

python -m hvd_adpsgd report FOLDER [-o FILE]     FOLDER: the run's HVD_ADPSGD_RECORD
                                                 FILE: to write (default: FOLDER/report.html)
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_adpsgd.errors import AdpsgdError, ConfigError
from hvd_adpsgd.tools.page import page
from hvd_adpsgd.watching.record import read

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if there is no record or the page cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="folder of the record")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="page to write (default: FOLDER/report.html)"
    )
    args = parser.parse_args(arguments)
    try:
        print(_write(args.folder, Path(args.output or Path(args.folder, "report.html"))))
    except AdpsgdError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def _write(folder: str, output: Path) -> Path:
    if output.suffix == ".jsonl":
        raise ConfigError(
            f"no page: {str(output)!r} would be a file of a record. Name another file with -o."
        )
    run = read(folder)
    newest = [track.reports[-1].time_s for track in run.tracks.values() if track.reports]
    text = page(run, max(newest, default=0.0))
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"no page: {str(output)!r} cannot be written ({error.strerror}). Name another file with -o."
        ) from error
    return output
