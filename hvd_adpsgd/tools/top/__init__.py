"""A table of a run in the terminal, one row per super learner, or a page for browsers, from the run's record.

python -m hvd_adpsgd top [FOLDER]          until Ctrl-C; FOLDER: the run's HVD_ADPSGD_RECORD
python -m hvd_adpsgd top --once [--json]   one table, or JSON for other programs
python -m hvd_adpsgd top --web [PORT]      a page for browsers of this host, port 8265

A narrow terminal shows fewer columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from hvd_adpsgd.errors import AdpsgdError, ConfigError, MissingRequirementError
from hvd_adpsgd.tools.top.web import serve
from hvd_adpsgd.watching.record import Run, read
from hvd_adpsgd.watching.reports import METRICS
from hvd_adpsgd.watching.table import COLUMNS, STATES, Row, rows

if TYPE_CHECKING:
    from rich.console import Console, Group

__all__ = ["main"]

_TAIL_NBYTES = 200_000  # read from the end of each file of the record: some hundred reports
_SORTS = ("super_learner", "host", "state", "loss", *(metric.name for metric in METRICS))
# Columns to drop, in this order, if the terminal is narrow.
_DROPPED = ("", *(metric.column for metric in reversed(METRICS[3:]) if metric.column), "host")
_HOST_WIDTH = 12  # characters to which the column "host" is shortened before columns are dropped
_WIDTH = 150  # characters, enough for all columns; used when the output is no terminal
_EVERY_S = (0.1, 86400.0)  # bounds of --every


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if the reader of its pipe has exited, or 2 if there is no record."""
    args = _parser().parse_args(arguments)
    try:
        if not _EVERY_S[0] <= args.every <= _EVERY_S[1]:
            raise ConfigError(
                f"--every {args.every:g} s between two tables: allowed are {_EVERY_S[0]:g} to "
                f"{_EVERY_S[1]:g}. Pass seconds in that range."
            )
        folder = _folder(args.folder)
        if args.json:
            print(json.dumps(_as_json(_run(folder), time.time())), flush=True)
        elif args.web is not None:
            serve(folder, args.web)
        else:
            _show(folder, args)
    except AdpsgdError as error:
        print(f"top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:
        # Python flushes stdout at exit, which would fail again without a reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd top",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", help="folder of the record (default: $HVD_ADPSGD_RECORD)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print JSON once and exit")
    parser.add_argument(
        "--web",
        type=int,
        nargs="?",
        const=8265,
        metavar="PORT",
        help="serve a page (default: 8265)",
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds per table (default: 1)"
    )
    parser.add_argument("--sort", choices=_SORTS, default="super_learner", help="column to sort by")
    return parser


def _folder(given: str | None) -> str:
    folder = given or os.environ.get("HVD_ADPSGD_RECORD", "")
    if not folder:
        raise ConfigError(
            "no folder: neither an argument nor HVD_ADPSGD_RECORD names one. Start the run with "
            "HVD_ADPSGD_RECORD=FOLDER, and pass that folder."
        )
    return folder


def _run(folder: str) -> Run:
    return read(folder, _TAIL_NBYTES)


def _as_json(run: Run, now_s: float) -> dict[str, object]:
    return {
        "time_s": now_s,
        "super_learners": [row.to_dict() for row in rows(run, now_s)],
        "events": [
            {"time_s": e.time_s, "event": e.what, "about": e.about, "text": e.text}
            for e in run.events[-20:]
        ],
    }


def _show(folder: str, args: argparse.Namespace) -> None:
    """Print the table, with --once once, else every args.every seconds; a terminal redraws it in place."""
    if importlib.util.find_spec("rich") is None:
        raise MissingRequirementError(
            "no table: the package rich is not installed. Run: python -m pip install 'hvd_adpsgd[view]', "
            "or use --json."
        )
    from rich.live import Live

    console = _console()
    in_place = sys.stdout.isatty() and not args.once
    with (
        Live(console=console, auto_refresh=False, screen=True)
        if in_place
        else nullcontext() as live
    ):
        while True:
            table = _drawn(_run(folder), args.sort, console.width)
            if live is not None:
                live.update(table, refresh=True)
            else:
                console.print(table)
                sys.stdout.flush()
            if args.once:
                return
            time.sleep(args.every)


def _console() -> Console:
    """Return a console as wide as the terminal or COLUMNS; without either, wide enough for all columns."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console() if known else Console(width=_WIDTH)


def _drawn(run: Run, by: str, width: int) -> Group:
    """Return the table of the run and its last six events, at most `width` characters wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now_s = time.time()
    ordered = sorted(rows(run, now_s), key=lambda row: _key(row, by))
    cells = [{column.title: printable(column.cell(row)) for column in COLUMNS} for row in ordered]
    states = [row.state for row in ordered]
    title = f"{len(ordered)} super learners, {states.count('ok')} ok · {_clock(now_s)}"
    table = Table(title=title, title_justify="left", expand=False)
    widths = _widths(cells, width)
    lefts = {column.title for column in COLUMNS if column.is_left}
    for name, wide in widths.items():
        justify: Literal["left", "right"] = "left" if name in lefts else "right"
        table.add_column(name, justify=justify, width=wide, no_wrap=True, overflow="ellipsis")
    for row, shown in zip(ordered, cells, strict=True):
        table.add_row(*(Text(shown[name]) for name in widths), style=STATES[row.state])
    events = [Text(printable(f"{_clock(e.time_s)} {e.what}: {e.text}")) for e in run.events[-6:]]
    return Group(table, *events)


def printable(text: str) -> str:
    """Return `text` with a question mark for each control character, which a name from a file may contain."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _widths(cells: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """Return the columns of the table that fit into `width`, with their widths.

    Names of hosts are shortened first, then whole columns are dropped.
    """
    from rich.cells import cell_len

    titles = [column.title for column in COLUMNS]
    needed = {t: max(map(cell_len, [t, *(row[t] for row in cells)])) for t in titles}
    hosts = needed["host"]
    needed["host"] = min(hosts, _HOST_WIDTH)

    def spare() -> int:
        # The table's frame takes 3 characters per column, and 1 more.
        return width - sum(needed.values()) - 3 * len(needed) - 1

    for name in _DROPPED:
        if spare() >= 0:
            break
        del needed[name]
    if "host" in needed:
        needed["host"] = min(hosts, needed["host"] + max(spare(), 0))
    return needed


def _key(row: Row, by: str) -> tuple[int, object]:
    """Return the sort key of a row; values that are NaN or infinite sort last."""
    value = getattr(row if hasattr(row, by) else row.report, by)
    if isinstance(value, float) and not math.isfinite(value):
        return 1, 0.0
    return 0, value
