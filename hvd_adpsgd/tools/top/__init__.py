"""A table of a run in the terminal, one row per super learner, from the run's record or its live page.

python -m hvd_adpsgd top [FOLDER]          until q or Ctrl-C; FOLDER: the run's HVD_ADPSGD_RECORD
python -m hvd_adpsgd top URL               URL of the live page (HVD_ADPSGD_DASHBOARD), with its token
python -m hvd_adpsgd top --once [--json]   one table, or JSON for other programs

Keys: q quits, s sorts by the next column, r reverses the order. A narrow terminal shows fewer columns.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvd_adpsgd.errors import AdpsgdError, ConfigError, MissingRequirementError
from hvd_adpsgd.tools.terminal import keys, printable
from hvd_adpsgd.tools.top.remote import fetched
from hvd_adpsgd.watching.record import Run, of_lines, read
from hvd_adpsgd.watching.table import Row, rows, sparkline

if TYPE_CHECKING:
    from rich.console import Console, Group

__all__ = ["main"]

_TAIL_NBYTES = 200_000  # read from the end of each file of the record: some hundred reports
_SORTS = ("super_learner", "host", "state", "step", "steps_per_s", "distance", "apart_s", "loss")
_COLUMNS = (
    "#", "host", "state", "step", "steps/s", "stale", "distance", "exch/s", "share", "MB/s", "loss", ""
)  # fmt: skip
_LEFT = ("host", "state", "")  # columns of text, which are left-aligned
# Columns to drop, in this order, if the terminal is narrow.
_DROPPED = ("", "MB/s", "share", "exch/s", "stale", "distance", "host")
_HOST_WIDTH = 12  # characters to which the column "host" is shortened before columns are dropped
_WIDTH = 150  # characters, enough for all columns; used when the output is no terminal
_EVERY_S = (0.1, 86400.0)  # bounds of --every
_STYLES = {
    "ok": "green",
    "SLOW": "yellow",
    "HUNG": "bold red",
    "SUSPECT": "yellow",
    "SILENT": "red",
    "JOINING": "cyan",
    "FAILED": "bold red",
}


@dataclass
class _Order:
    """The column by which rows are sorted, and the direction; the keys s and r change them."""

    by: str
    descending: bool = False

    def press(self, key: str) -> None:
        if key == "s":
            self.by = _SORTS[(_SORTS.index(self.by) + 1) % len(_SORTS)]
        elif key == "r":
            self.descending = not self.descending

    def sort(self, found: Sequence[Row]) -> list[Row]:
        """Return the rows sorted by the chosen column; rows whose value is NaN or infinite come last."""
        ordered = sorted(found, key=lambda row: _key(row, self.by), reverse=self.descending)
        return sorted(ordered, key=lambda row: _key(row, self.by)[0])

    def __str__(self) -> str:
        return f"sorted by {self.by}, {'descending' if self.descending else 'ascending'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if the reader of its pipe has exited, or 2 if there is no record."""
    args = _parser().parse_args(arguments)
    try:
        if not _EVERY_S[0] <= args.every <= _EVERY_S[1]:
            raise ConfigError(
                f"--every {args.every:g} s between two tables: allowed are {_EVERY_S[0]:g} to "
                f"{_EVERY_S[1]:g}. Pass seconds in that range."
            )
        where = _where(args.where)
        if args.json:
            print(json.dumps(_as_json(_run(where), time.time())), flush=True)
        else:
            _show(where, args)
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
        "where",
        nargs="?",
        metavar="FOLDER or URL",
        help="folder of the record (default: $HVD_ADPSGD_RECORD), or URL of the live page",
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print JSON once and exit")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds per table (default: 1)"
    )
    parser.add_argument("--sort", choices=_SORTS, default="super_learner", help="column to sort by")
    return parser


def _where(given: str | None) -> str:
    where = given or os.environ.get("HVD_ADPSGD_RECORD", "")
    if not where:
        raise ConfigError(
            "no folder: neither an argument nor HVD_ADPSGD_RECORD names one. Start the run with "
            "HVD_ADPSGD_RECORD=FOLDER, and pass that folder, or the URL of its live page."
        )
    return where


def _run(where: str) -> Run:
    if where.startswith(("http://", "https://")):
        return of_lines(fetched(where))
    return read(where, _TAIL_NBYTES)


def _as_json(run: Run, now_s: float) -> dict[str, object]:
    return {
        "time_s": now_s,
        "super_learners": [row.to_dict() for row in rows(run, now_s)],
        "events": [
            {"time_s": e.time_s, "event": e.what, "about": e.about, "text": e.text}
            for e in run.events[-20:]
        ],
    }


def _show(where: str, args: argparse.Namespace) -> None:
    """Print the table, with --once once, else every args.every seconds; a terminal redraws it in place."""
    if importlib.util.find_spec("rich") is None:
        raise MissingRequirementError(
            "no table: the package rich is not installed. Run: python -m pip install 'hvd_adpsgd[view]', "
            "or use --json."
        )
    console = _console()
    order = _Order(args.sort)
    if sys.stdout.isatty() and not args.once:
        _show_in_place(where, console, order, args.every)
        return
    while True:
        console.print(_drawn(_run(where), order, console.width))
        sys.stdout.flush()
        if args.once:
            return
        time.sleep(args.every)


def _console() -> Console:
    """Return a console as wide as the terminal or COLUMNS; without either, wide enough for all columns."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console() if known else Console(width=_WIDTH)


def _show_in_place(where: str, console: Console, order: _Order, every_s: float) -> None:
    """Redraw the table in one place of the terminal every `every_s` seconds, until q or Ctrl-C is pressed."""
    from rich.layout import Layout
    from rich.live import Live
    from rich.text import Text

    body, footer, page = Layout(), Layout(size=1), Layout()
    page.split_column(body, footer)
    with keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            body.update(_drawn(_run(where), order, console.width))
            footer.update(Text(f"q quit · s sort · r reverse · {order}", no_wrap=True, style="dim"))
            live.update(page, refresh=True)
            now = pressed.wait(every_s)
            if now is None or "q" in now:
                return
            for key in now:
                order.press(key)


def _drawn(run: Run, order: _Order, width: int) -> Group:
    """Return the table of the run and its last six events, at most `width` characters wide."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now_s = time.time()
    found = order.sort(rows(run, now_s))
    cells = [dict(zip(_COLUMNS, _cells(row), strict=True)) for row in found]
    states = [row.state for row in found]
    title = f"{len(found)} super learners, {states.count('ok')} ok · {_clock(now_s)}"
    table = Table(title=title, title_justify="left", expand=False)
    widths = _widths(cells, width)
    for name, wide in widths.items():
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, width=wide, no_wrap=True, overflow="ellipsis")
    for row, shown in zip(found, cells, strict=True):
        style = _STYLES.get(row.state, "")
        table.add_row(
            *(Text(shown[name]) for name in widths), style=style if row.state != "ok" else ""
        )
    events = [Text(printable(f"{_clock(e.time_s)} {e.what}: {e.text}")) for e in run.events[-6:]]
    return Group(table, *events)


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _widths(cells: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """Return the columns of the table that fit into `width`, with their widths.

    Names of hosts are shortened first, then whole columns are dropped.
    """
    from rich.cells import cell_len

    needed = {name: max(map(cell_len, [name, *(c[name] for c in cells)])) for name in _COLUMNS}
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
    value = getattr(row, by)
    if isinstance(value, float) and not math.isfinite(value):
        return 1, 0.0
    return 0, value


def _cells(row: Row) -> list[str]:
    since = f" {_duration(row.since_s)}" if row.since_s else ""
    return [
        str(row.super_learner),
        printable(row.host),
        row.state + since,
        str(row.step),
        _short(row.steps_per_s),
        f"{row.staleness_p50}/{row.staleness_p95}",
        _short(row.distance),
        _short(row.exchanges_per_s),
        row.moved(_short),
        _short(row.sent_per_s / 1e6),
        _short(row.loss),
        sparkline(row.losses),
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _short(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
