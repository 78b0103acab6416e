"""Optimizers that are dropped, and one that is closed while its peers train on."""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from learner import DEADLINE_S, outcome, say, step, wrap

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.training import watching

WRAPS = 12


def held() -> dict[str, Any]:
    """What this process holds, once the garbage is collected."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": sorted(filter(None, map(name, Path("/proc/self/task").iterdir()))),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mib": int(status["VmRSS"].split()[0]) // 1024,
    }


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """What it holds when no more than before: a thread that was joined is listed for a moment."""
    ends = time.monotonic() + DEADLINE_S
    while True:
        after = held()
        fewer = len(after["threads"]) <= len(before["threads"])
        if (fewer and after["descriptors"] <= before["descriptors"]) or time.monotonic() > ends:
            return after
        time.sleep(0.01)


def name(thread: Path) -> str:
    """Of a thread; none if it has ended since it was listed."""
    try:
        return thread.joinpath("comm").read_text().strip()
    except OSError:
        return ""


def advance(model: torch.nn.Module, optimizer: Any) -> None:
    step(model, optimizer, torch.ones(1, 1024))


def wrap_and_drop() -> None:
    model = torch.nn.Linear(1024, 2048)  # 8 MiB
    optimizer = wrap(model)
    for _ in range(2):
        advance(model, optimizer)


def collected() -> None:
    """Collected in the midst of a look of the watcher: nothing of ours waits there for anything."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = wrap(model)
    advance(model, optimizer)
    lock = threading.Lock()
    for watcher in watching.running():
        watcher.look()  # which then wants a last look at the end of this optimizer
        lock = watcher._lock

    def collect() -> None:
        nonlocal optimizer
        with lock:
            optimizer = None
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(30)
    hangs = thread.is_alive()
    if not hangs:  # the next operation stops the engine
        hvd.barrier()
    say(case="collected", hangs=hangs, after=held(), leads=hvd.is_leader())


def dropped() -> None:
    for _ in range(3):
        wrap_and_drop()
    before = held()
    for _ in range(WRAPS):
        wrap_and_drop()
    say(case="dropped", before=before, after=settled(before))


def closed() -> None:
    """Super learner 0 closes its optimizer, and 1 makes more steps with its own."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = wrap(model)
    advance(model, optimizer)
    hvd.barrier()
    before = held()
    if hvd.super_rank():
        for _ in range(50):
            advance(model, optimizer)
    optimizer.close()
    optimizer.close()
    after = settled(before)
    told = outcome(optimizer.step)
    say(case="closed", before=before, after=after, leads=hvd.is_leader(), **told)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)  # nothing is broadcast
    hvd.init()
    dropped()
    hvd.barrier()
    closed()
    hvd.barrier()
    collected()
    hvd.shutdown()
