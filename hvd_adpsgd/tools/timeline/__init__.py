"""Merges the timelines and torch profiler traces of all learners of a run into one trace for Perfetto.

python -m hvd_adpsgd timeline merge FOLDER_OR_FILES... -o merged.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd.tools.terminal import printable
from hvd_adpsgd.watching.trace import merge

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if there is no trace or the merged file cannot be written."""
    args = _parser().parse_args(arguments)
    try:
        merged = merge(args.paths, args.output)
    except AdpsgdError as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 2
    for path in merged.left_out:
        name = printable(str(path))
        print(f"timeline: left out: {name}, of an earlier launch or no trace", file=sys.stderr)
    print(
        f"{args.output}: {len(merged.learners)} learners, {len(merged.profiles)} profiles, "
        f"{merged.events} events"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="write all traces into one")
    merging.add_argument(
        "paths",
        nargs="+",
        help="files of HVD_ADPSGD_TIMELINE or torch's profiler (also *.json.gz), or folders",
    )
    merging.add_argument("-o", "--output", metavar="FILE", required=True, help="trace to write")
    return parser
