"""Runs of a study, several at a time, kept in a file: a second call trains only what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Cell = tuple[Any, ...]
Run = dict[str, Any]


def perform(
    file: Path,
    cells: Sequence[Cell],
    names: Sequence[str],
    train: Callable[[Cell], Run],
    jobs: int,
) -> list[Run]:
    """Train the cells that a file lacks, and keep each there when it is done; return all runs of the file.

    Args:
        file: JSON, made if it does not exist.
        cells: settings of the runs that are wanted.
        names: what the settings of a cell are called in a run.
        train: trains a cell; its result has these names, "loss" and "seconds". A function of a module.
        jobs: processes that train at the same time.
    """
    runs: list[Run] = json.loads(file.read_text()) if file.exists() else []
    made = {tuple(one[name] for name in names) for one in runs}
    missing = [cell for cell in cells if cell not in made]
    for number, (cell, run) in enumerate(_trained(missing, train, jobs)):
        runs.append(run)
        new = file.with_suffix(".new")  # an interruption loses no run
        new.write_text(json.dumps(runs, indent=1))
        new.replace(file)
        print(
            f"{number + 1}/{len(missing)}  {cell}  {run['loss']:.3f}  {run['seconds']:.0f} s",
            flush=True,
        )
    return runs


def _trained(
    cells: Sequence[Cell], train: Callable[[Cell], Run], jobs: int
) -> Iterator[tuple[Cell, Run]]:
    """Yield each cell and its run, as soon as it is done."""
    if jobs == 1 or len(cells) < 2:
        yield from ((cell, train(cell)) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        started = {pool.submit(train, cell): cell for cell in cells}
        try:
            yield from ((started[one], one.result()) for one in as_completed(started))
        except BaseException:  # Ctrl-C too: what has not begun does not
            pool.shutdown(cancel_futures=True)
            raise
