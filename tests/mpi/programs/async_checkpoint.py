"""The recipe of docs/evaluate.md that saves means while all train. Arguments: folder, what, the recipe.

What the last learner does: "late", each step ends once all others have made 5; "stopped SECONDS", in its step
5, until all others have made 20 more while the first mean is under way, and for so long. Until "enough".
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner import generator, say, wrap

import hvd_adpsgd.torch as hvd
from tests.launcher import wait_for

SLOWER, MORE, MEANS, LAST = 5, 20, 3, 3


def main() -> None:
    folder, what, recipe = sys.argv[1:]
    os.chdir(folder)
    hvd.init()
    torch.manual_seed(0)
    steps = np.memmap("steps", np.int64, "r+", shape=4)
    rank, is_last, rng = hvd.rank(), hvd.rank() == LAST, generator(hvd.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(model, torch.optim.AdamW)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    handles: list[Any] = []
    since: list[Any] = []

    def ask(model: torch.nn.Module) -> Any:
        if what.startswith("stopped") and not since:
            wait_for(lambda: Path("pid").exists() and _is_stopped(), "the last one stops")
            since.append((steps[:LAST].copy(), time.monotonic()))
        handles.append(original(model))
        return handles[-1]

    original, hvd.average_model_async = hvd.average_model_async, ask

    def loader() -> Iterator[tuple[torch.Tensor, None]]:
        while not Path("enough").exists():
            yield torch.randn(8, 3, generator=rng), None

    def train(model: torch.nn.Module, x: torch.Tensor, _: None) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if is_last and what == "late":
            then = min(steps[:LAST]) + SLOWER
            ahead = lambda: min(steps[:LAST]) >= then or Path("enough").exists()  # noqa: E731
            wait_for(ahead, "further steps of the others")
        elif is_last and steps[LAST] == 5:
            Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        steps[rank] += 1
        if since and not Path("continued").exists():
            before, began = since[0]
            is_over = time.monotonic() >= began + float(what.removeprefix("stopped"))
            if is_over and min(steps[:LAST] - before) >= MORE:
                say(is_under_way=not handles[0].done())
                Path("continued").touch()
                os.kill(int(Path("pid").read_text()), signal.SIGCONT)

    names = {"hvd": hvd, "model": model, "optimizer": optimizer, "loader": loader(), "train": train}
    names["more"] = lambda: len(handles) < MEANS
    exec(recipe.replace("1000 == 999", "20 == 19 and more()"), names)
    complete = [handle for handle in handles if handle.done()]
    say(means=[(len(h.steps), float(h.result()["weight"].sum())) for h in complete])


def _is_stopped() -> bool:
    pid = Path("pid").read_text()
    return bool(pid) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    main()
