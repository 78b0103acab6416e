"""All learners of a run in one trace, for Perfetto: their timelines, and traces of torch's profiler.

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
    """The command line. Returns 0, or 2 if there is no trace or the file cannot be written."""
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
    merging.add_argument("-o", "--output", metavar="FILE", required=True, help="a Chrome trace")
    return parser
