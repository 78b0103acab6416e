"""Promise 1 under loss: what a death in the middle of an exchange can move, and what it cannot.

Take the sum of the survivors' models, and of the victim's with all that it had merged. Nobody trains,
so this sum was constant. A chunk in flight at the death is one that one of the two had merged and the
other had not: there the sum is off by what was merged, w |difference of the two models|, at most. A lane
begins chunk c + LANES only when both have merged chunk c (or will, from what has arrived), so one exchange
has at most LANES chunks in flight; two peers have at most one exchange, and nobody has more than one
on each side: the victim had two at most. Everywhere else, and among the survivors afterwards, the sum
is what it was, to rounding.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hvd_adpsgd.engine.layout import Layout, TensorSpec
from hvd_adpsgd.engine.store import Store
from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "in_flight.py"
CHUNK = 2**18
LANES, SIDES, WEIGHT = 8, 2, 0.5
ROUNDING = 1e-5  # of sums of a few float32 numbers of size 1 to 5
N, CHUNKS = 3, 96
ELEMENTS = CHUNKS * CHUNK // 4


def initial(seed: int, rank: int) -> NDArray[np.float64]:
    drawn = np.random.default_rng([seed, rank]).standard_normal(ELEMENTS)
    return drawn.astype(np.float32).astype(np.float64)


def left_by_victim(folder: Path) -> NDArray[np.float64]:
    """Its model and what its engine had merged: mirror + correction, by chunk where there is one."""
    if shown := list(folder.glob("*.shown")):  # as its peers saw it
        memory = np.fromfile(shown[0], np.uint8)
        lives = -(-Store.live_nbytes(CHUNKS) // 64) * 64
        mirror = memory[lives:][: ELEMENTS * 4].view(np.float32).astype(np.float64)
        memory = memory[-(-(lives + ELEMENTS * 4) // 4096) * 4096 :]
    else:
        mirror = np.fromfile(folder / "memory.1", np.float32).astype(np.float64)
        memory = np.fromfile(folder / "memory.0", np.uint8)
    slots = memory[: 2 * ELEMENTS * 4].view(np.float32).reshape(2, -1)
    flags = memory[2 * ELEMENTS * 4 :].reshape(2, -1)[:, :CHUNKS]
    for slot, full in zip(slots, flags, strict=True):
        mirror += slot * np.repeat(full != 0, CHUNK // 4)
    return mirror


def survivors_sum(folder: Path, victim: int, name: str) -> NDArray[np.float64]:
    models = [np.load(folder / f"{r}.{name}.npy") for r in range(N) if r != victim]
    return np.sum(models, axis=0, dtype=np.float64)


def killed(
    folder: Path, victim: int, seed: int, asking: bool, way: tuple[str, ...]
) -> tuple[Result, list[dict[str, Any]]]:
    """One run, and what the survivors say of it."""
    folder.mkdir()
    arguments = ["--folder", folder, "--victim", victim, "--elements", ELEMENTS, "--seed", seed]
    side = ("--asking",) if asking else ()
    result = run_learners(N, PROGRAM, args=[str(a) for a in (*arguments, *side, *way)])
    files = [folder / f"{r}.json" for r in range(N) if r != victim]
    assert all(file.exists() for file in files), result.report()
    return result, [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("way", "asking"),
    [
        pytest.param(("--no-share",), True, id="sent-asking"),
        pytest.param((), False, id="shared-answering"),
        pytest.param(("--no-share",), False, id="sent-answering", marks=pytest.mark.extended),
        pytest.param((), True, id="shared-asking", marks=pytest.mark.extended),
    ],
)
def test_a_death_moves_no_more_than_the_chunks_in_flight(
    tmp_path: Path, asking: bool, way: tuple[str, ...]
) -> None:
    seed, victim = 7, 1
    layout = Layout(CHUNK)
    layout.extend([TensorSpec("x", (ELEMENTS,), "float32")])
    assert len(layout.parts[0].chunks) == CHUNKS
    folder = tmp_path / "run"
    result, told = killed(folder, victim, seed, asking, way)
    fault = json.loads((folder / "fault").read_text())
    assert fault["asked"] == asking, result.report()
    assert LANES < fault["done"] < CHUNKS
    assert any(facts["broken"] for facts in told), f"no exchange was cut: {result.report()}"
    assert not any(facts["held"] for facts in told), "buffers of a broken exchange were kept"

    models = [initial(seed, rank) for rank in range(N)]
    after = survivors_sum(folder, victim, "after")
    moved = after + left_by_victim(folder) - np.sum(models, axis=0)
    by_chunk = np.abs(moved).reshape(CHUNKS, -1).max(axis=1)
    in_flight = by_chunk > ROUNDING
    assert in_flight.sum() <= LANES * SIDES, by_chunk
    widest = np.ptp(models, axis=0)  # averaging keeps every element among those it began with
    assert np.all(np.abs(moved) <= SIDES * WEIGHT * widest + ROUNDING)
    later = survivors_sum(folder, victim, "end")
    assert np.abs(later - after).max() <= ROUNDING, "the survivors lost something afterwards"
