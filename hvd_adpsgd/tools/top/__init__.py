"""A table of a run in the terminal, from its record: a row per super learner.

python -m hvd_adpsgd top [FOLDER]          until Ctrl-C; FOLDER: of HVD_ADPSGD_RECORD
python -m hvd_adpsgd top --once [--json]   one table, or JSON for other programs
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
from typing import TYPE_CHECKING

from hvd_adpsgd.errors import AdpsgdError, ConfigError, MissingRequirementError
from hvd_adpsgd.watching.record import Run, read
from hvd_adpsgd.watching.table import Row, rows, sparkline

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["main"]

_TAIL_NBYTES = 200_000  # of each file: some hundred reports
_SORTS = ("super_learner", "host", "state", "step", "steps_per_s", "distance", "apart_s", "loss")
_STYLES = {
    "ok": "green",
    "SLOW": "yellow",
    "SUSPECT": "yellow",
    "SILENT": "red",
    "FAILED": "bold red",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, or 2 if there is no record."""
    args = _parser().parse_args(arguments)
    try:
        folder = _folder(args.folder)
        if args.json:
            print(json.dumps(_as_json(read(folder, _TAIL_NBYTES), time.time())))
        else:
            _show(folder, args)
    except AdpsgdError as error:
        print(f"top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hvd_adpsgd top",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", help="the record (default: $HVD_ADPSGD_RECORD)")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print JSON once and exit")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="default: 1 s")
    parser.add_argument("--sort", choices=_SORTS, default="super_learner", help="column")
    return parser


def _folder(given: str | None) -> str:
    folder = given or os.environ.get("HVD_ADPSGD_RECORD", "")
    if not folder:
        raise ConfigError(
            "no folder: neither an argument nor HVD_ADPSGD_RECORD names one. Start the run with "
            "HVD_ADPSGD_RECORD=FOLDER, and pass that folder."
        )
    return folder


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
    """Print the table once, or again and again in its place."""
    if importlib.util.find_spec("rich") is None:
        raise MissingRequirementError(
            "no table: the package rich is not installed. Run: python -m pip install 'hvd_adpsgd[view]', "
            "or use --json."
        )
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if args.once:
        console.print(_drawn(read(folder, _TAIL_NBYTES), args.sort))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_drawn(read(folder, _TAIL_NBYTES), args.sort), refresh=True)
            time.sleep(args.every)


def _drawn(run: Run, sort: str) -> Group:
    """The table and the last events."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now_s = time.time()
    found = sorted(rows(run, now_s), key=lambda row: _key(getattr(row, sort)))
    states = [row.state for row in found]
    title = f"{len(found)} super learners, {states.count('ok')} ok · {time.strftime('%H:%M:%S')}"
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("#", justify="right")
    table.add_column("host", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column("state", no_wrap=True)
    for name in ("step", "steps/s", "stale", "distance", "exch/s", "MB/s", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in found:
        style = _STYLES.get(row.state, "")
        table.add_row(
            *(Text(cell) for cell in _cells(row)), style=style if row.state != "ok" else ""
        )
    lines = [
        Text(f"{time.strftime('%H:%M:%S', time.localtime(e.time_s))} {e.what}: {e.text}")
        for e in run.events[-6:]
    ]
    return Group(table, *lines)


def _key(value: object) -> tuple[int, object]:
    """For sorting: numbers that are not finite last."""
    if isinstance(value, float) and not math.isfinite(value):
        return 1, 0.0
    return 0, value


def _cells(row: Row) -> list[str]:
    since = f" {_duration(row.since_s)}" if row.since_s else ""
    return [
        str(row.super_learner),
        row.host,
        row.state + since,
        str(row.step),
        _short(row.steps_per_s),
        f"{row.staleness_p50}/{row.staleness_p95}",
        _short(row.distance),
        _short(row.exchanges_per_s),
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
    return f"{value:.3g}" if math.isfinite(value) else "–"
