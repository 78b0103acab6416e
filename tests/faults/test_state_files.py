"""SIGUSR1: every learner writes what it knows, also when it hangs."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners, wait_for

pytestmark = pytest.mark.mpi

# Trains until told to go on; learner 0 is in the operation over all learners long before the others.
PROGRAM = """
    import pathlib, tempfile, torch
    import hvd_adpsgd.torch as hvd
    tempfile.tempdir = sys.argv[1]  # as TMPDIR, which the launcher would use too
    hvd.init()
    torch.set_num_threads(1)
    rank, folder = hvd.rank(), pathlib.Path(sys.argv[1])
    model = torch.nn.Linear(1000, 500)  # 2 MB: 8 chunks
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters(),
        exchanges_per_step=8)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    while not (folder / ("alone" if rank == 0 else "together")).exists():
        optimizer.zero_grad()
        model(torch.ones(2, 1000)).square().mean().backward()
        optimizer.step()
    total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()
    say(rank=rank, total=total)
"""


class Job:
    """The learners of PROGRAM, asked for their state."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pids: dict[int, int] = {}

    def started(self) -> None:
        files = wait_for(
            lambda: [*self.folder.glob("*.pid")][2:] and [*self.folder.glob("*.pid")], "start"
        )
        self.pids = {int(f.stem): int(wait_for(f.read_text, "a process id")) for f in files}

    def states(self, rank: int) -> list[dict[str, Any]]:
        name = f"hvd_adpsgd.state.{rank}.{self.pids[rank]}.*.json"
        files = sorted(self.folder.glob(name), key=lambda file: int(file.suffixes[-2][1:]))
        return [json.loads(file.read_text()) for file in files]

    def ask(self, rank: int) -> dict[str, Any]:
        """A new state of one learner."""
        before = len(self.states(rank))
        os.kill(self.pids[rank], signal.SIGUSR1)
        return wait_for(lambda: self.states(rank)[before:], f"a state of learner {rank}")[-1]


def peers(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {p["peer"]: p for p in state["averaging"][0]["engine"]["peers"]}


def test_every_learner_writes_its_state_also_when_it_hangs(tmp_path: Path) -> None:
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    job = Job(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_learners, 3, PROGRAM, args=[str(tmp_path)], env=env)
        try:
            job.started()
            require_sane(job)
            require_silent_partner_seen(job)
            (tmp_path / "alone").touch()
            hanging = wait_for(lambda: in_allreduce(job.ask(0)), "learner 0 waits for the others")
        finally:
            (tmp_path / "alone").touch()
            (tmp_path / "together").touch()
        result = run.result().checked()
    assert [facts["total"] for facts in result.by_rank()] == [3.0] * 3
    assert hanging["averaging"][0]["step"] > 0


def require_sane(job: Job) -> None:
    """Every learner says who it is, what it averages and with whom; again, it has moved on."""
    for rank in range(3):
        first = wait_for(lambda: moving(job.ask(rank)), "an exchange")  # noqa: B023
        assert (first["rank"], first["pid"]) == (rank, job.pids[rank])
        assert first["world"]["super_learners"] == [[0], [1], [2]]
        assert first["averaging"][0]["strategy"].startswith("random_pairs")
        assert sum(p["exchanges"] for p in peers(first).values()) > 0
        later = wait_for(lambda: newer(first, job.ask(rank)), "another step")  # noqa: B023
        assert later["monotonic_s"] > first["monotonic_s"]


def moving(state: dict[str, Any]) -> dict[str, Any] | None:
    busy = state["averaging"] and any(p["exchanges"] for p in peers(state).values())
    return state if busy else None


def newer(first: dict[str, Any], state: dict[str, Any]) -> dict[str, Any] | None:
    return state if state["averaging"][0]["step"] > first["averaging"][0]["step"] else None


def require_silent_partner_seen(job: Job) -> None:
    """Learner 2 is stopped in the middle of an exchange: the others show it, with the exchange's age."""
    found = wait_for(lambda: parked(job), "learner 2 is stopped in an exchange", 120)
    assert found[0]["state"] == "suspect"
    assert found[0]["silent_s"] > 1.0, "deadline_s"
    assert found[0]["age_s"] >= found[0]["silent_s"]


def parked(job: Job) -> list[dict[str, Any]]:
    """What learners 0 and 1 show of learner 2, stopped for some seconds; maybe it was in no exchange."""
    os.kill(job.pids[2], signal.SIGSTOP)
    try:
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            if found := [p for rank in (0, 1) if (p := peers(job.ask(rank))[2])["parked"]]:
                require_more_exchanges(job, 0, 1)
                return found
        return []
    finally:
        os.kill(job.pids[2], signal.SIGCONT)


def require_more_exchanges(job: Job, rank: int, peer: int) -> None:
    met = peers(job.ask(rank))[peer]["exchanges"]
    wait_for(
        lambda: peers(job.ask(rank))[peer]["exchanges"] > met, f"{rank} and {peer} exchange on"
    )


def in_allreduce(state: dict[str, Any]) -> dict[str, Any] | None:
    main = next(stack for name, stack in state["threads"].items() if name.startswith("MainThread"))
    return state if any("in allreduce" in line for line in main) else None
