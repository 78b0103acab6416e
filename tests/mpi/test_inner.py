"""Super learners over torch.distributed, in place of Horovod: the same tests, and what only they have."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners
from tests.mpi.test_optimizer import PROGRAMS, SIZE, Facts, launch, like_horovod, require_trained

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

INNER = {"HVD_ADPSGD_INNER": "torch"}
# one of each kind of gradients: dense, sparse, in groups, accumulated, of a closure, in changing graphs
CASES = ("AdamW", "closure", "accumulate", "dynamic", "groups", "sparse", "scaled")


@functools.cache
def trained() -> dict[str, list[Facts]]:
    return launch(4, "same_inside.py", *CASES, **INNER, **{SIZE: "2"}).by_case()


@pytest.mark.parametrize("name", CASES)
def test_same_inside(name: str) -> None:
    require_trained(trained()[name], 4)


def with_sgd(np: int) -> tuple[list[Facts], list[Facts]]:
    """What learners said under plain Horovod, and under this library with torch inside."""
    ([plain], _), ([ours], _) = (
        like_horovod(np, "horovod.torch"), like_horovod(np, "hvd_adpsgd.torch", **INNER)
    )  # fmt: skip
    return ([x for x in plain if x["name"] == "SGD"], [x for x in ours if x["name"] == "SGD"])


def test_synchronous_training_is_horovods() -> None:
    """Of two learners to the bit: a sum of two numbers has one value."""
    for theirs, mine in zip(*with_sgd(2), strict=True):
        assert (mine["bits"], mine["losses"]) == (theirs["bits"], theirs["losses"])


def test_synchronous_training_of_four_is_horovods_to_rounding() -> None:
    """The order of a sum of more than two gradients is not Horovod's, and differs from run to run."""
    for facts in zip(*with_sgd(4), strict=True):
        theirs, mine = ([*map(float.fromhex, each["losses"])] for each in facts)
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_what_the_root_broadcasts_is_written_into_what_is_held() -> None:
    """As Horovod's broadcast does. A HOROVOD_TIMELINE, which nothing writes, is told of once.

    Process sets and Adasum are refused: torch.distributed has neither.
    """
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.errors import MissingRequirementError
        hvd.init()
        p = torch.nn.Parameter(torch.ones(3))
        plain = torch.optim.SGD([p], lr=0.25 * (1 + hvd.rank()), momentum=0.5)
        p.grad = torch.full((3,), 1.0 + hvd.rank())
        plain.step()
        group, buffer = plain.param_groups[0], plain.state[p]["momentum_buffer"]
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        kept = plain.param_groups[0] is group and plain.state[p]["momentum_buffer"] is buffer
        try:
            hvd.SyncBatchNorm(4)(torch.randn(8, 4))
            norm = "of this learner alone"
        except ValueError as error:
            norm = str(error)
        own, refused = hvd.ProcessSet([0]), []
        for act in (
            lambda: hvd.allreduce(torch.ones(2), process_set=own),
            lambda: hvd.grouped_allreduce_async([torch.ones(2)], process_set=own),
            lambda: hvd.allgather_async(torch.ones(2), process_set=own),
            lambda: hvd.broadcast_object(1, process_set=own),
            lambda: hvd.alltoall(torch.ones(2), process_set=own),
            lambda: hvd.barrier(process_set=own),
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum),
            lambda: hvd.add_process_set([0]),
            lambda: hvd.DistributedOptimizer(plain, process_set=own),
        ):
            try:
                act()
                refused.append("nothing raised")
            except MissingRequirementError as error:
                asked = "process_set" in str(error) or "Adasum" in str(error)
                refused.append(asked and "HVD_ADPSGD_INNER=horovod" in str(error))
        say(rank=hvd.rank(), kept=kept, rate=group["lr"], buffer=buffer.tolist(), refused=refused, norm=norm)
    """
    result = run_learners(2, program, env={**INNER, "HOROVOD_TIMELINE": "/nowhere"}).checked()
    for facts in result.by_rank():
        assert facts["kept"] and facts["rate"] == 0.25 and facts["buffer"] == [1.0] * 3, facts
        assert facts["refused"] == [True] * 9, facts
        assert "to be on GPU" in facts["norm"], "SyncBatchNorm did not synchronize, or did so here"
    assert result.stderr.count("HOROVOD_TIMELINE is set") == 1, result.report()


@functools.cache
def said() -> list[dict[str, Any]]:
    """What each learner said; the launch ends with an error, as its last learner is killed."""
    result = run_learners(4, PROGRAMS / "inner.py", env={**INNER, SIZE: "2"})
    assert result.returncode != 0, result.report()
    found = result.by_rank()
    assert len(found) == 4 and "still" in found[0], result.report()
    return found


def test_operations_against_numpy() -> None:
    for facts in said():
        assert facts["wrong"] == []
        assert facts["differentiable"]


def test_a_mismatch_is_an_error_on_all_and_harms_nothing() -> None:
    for facts in said():
        assert facts["mismatch"].startswith("HorovodInternalError"), facts
        first = facts["rank"] // 2 * 2
        calls = f"learner {first} calls", f"learner {first + 1} calls"
        for part in ("'allreduce.x' differs", *calls, "[2]", "[3]"):
            assert part in facts["mismatch"], facts
        assert facts["after"] == [2, 2]


@pytest.mark.parametrize("who", ["ours", "ddp"])
def test_gradients_are_averaged_by_the_library_or_by_ddp(who: str) -> None:
    for facts in said():
        assert all(facts[who]["same"]), facts
        assert facts[who]["moved"]
        assert (facts[who]["hooks"] == 0) == (who == "ddp"), "both average gradients"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("nobody", ("GradientOrderError", "step 0", "average_gradients=False", "Nothing was")),
        ("twice", ("ModelMismatchError", "average_gradients=True", "Leave the argument out")),
        ("rounds", ("ConfigError", "averaging=delay_by_one", "use random_pairs")),
        ("adasum", ("MissingRequirementError", "op=hvd.Adasum", "HVD_ADPSGD_INNER=horovod")),
        ("wrong_group", ("ModelMismatchError", "process_group=hvd.super_learner_group()")),
    ],
)
def test_neither_twice_nor_never(case: str, parts: tuple[str, ...]) -> None:
    for facts in said():
        for part in parts:
            assert part in facts[case], facts


def test_a_learner_that_ends_takes_its_super_learner_and_nobody_else() -> None:
    first, second, mate, _ = said()
    assert first["still"] == second["still"] == [2, 2]
    assert "LearnerFailedError" in mate["lost"] or "has ended" in mate["lost"], mate


def test_without_horovod() -> None:
    """Found missing at the import: a host's learners are two super learners, or plain synchronous ones."""
    program = """
        import sys
        sys.modules["horovod"] = None  # as where it is not installed
        import torch
        import hvd_adpsgd.errors
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.launch import world as worlds
        hvd.init()
        model = torch.nn.Linear(4, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        start = [p.detach().clone() for p in model.parameters()]
        for step in range(5):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - hvd.rank()).square().mean().backward()
            optimizer.step()
        models = worlds.current().inner.allgather([p.tolist() for p in model.parameters()])
        moved = any(not torch.equal(a, b) for a, b in zip(start, model.parameters()))
        optimizer.close()
        wrong = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), average_gradients=False
        )
        wrong.zero_grad()
        (model(torch.randn(8, 4)) - hvd.rank()).square().mean().backward()
        try:
            wrong.step()
        except hvd_adpsgd.errors.GradientOrderError as error:
            refused = str(error)
        say(rank=hvd.rank(), supers=hvd.super_size(), same=models[0] == models[1], moved=moved,
            refused=refused)
    """
    for size, supers in (("2", 2), ("4", 1)):
        result = run_learners(4, program, env={SIZE: size}, launcher="torchrun").checked()
        for facts in result.by_rank():
            assert facts["supers"] == supers
            assert facts["same"] and facts["moved"], facts
            assert "step 0: the gradients differ" in facts["refused"], facts
        told = int("TEST_INNER" not in os.environ)  # else torch was asked for
        assert result.stderr.count("Horovod is not installed") == told, result.report()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_no_operation_waits_for_a_learner_that_has_ended(victim: int, tmp_path: Path) -> None:
    """Of four, killed in the middle of operations: Gloo tells its neighbours in the ring only.

    The script's call raises at once; Gloo's by its time-out, 30 s, if a message was cut in two.
    The others stay until each of them has nothing running, since Gloo also tells of one that exits.
    """
    program = f"""
        import pathlib, signal, threading, torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.config import Config
        hvd.init(config=Config(averaging="synchronous", failure_timeout_s=30))
        rank, folder = hvd.rank(), pathlib.Path({str(tmp_path)!r})
        if rank == {victim}:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                hvd.allreduce(torch.ones(3_000_000))
        except hvd.HorovodInternalError:
            pass
        runners = [t for t in threading.enumerate() if t.name == "hvd_adpsgd.inner.run"]
        for runner in runners:
            runner.join(60)  # bounds the wait where the test fails
        if not any(runner.is_alive() for runner in runners):
            (folder / str(rank)).touch()
        ends = time.monotonic() + 60
        while len(list(folder.iterdir())) < 3 and time.monotonic() < ends:
            time.sleep(0.01)
        say(rank=rank, ended=sorted(int(path.name) for path in folder.iterdir()))
        raise SystemExit(3)
    """
    result = run_learners(4, program, env=INNER)
    others = [rank for rank in range(4) if rank != victim]
    assert sorted(facts["rank"] for facts in result.said) == others, result.report()
    assert all(facts["ended"] == others for facts in result.said), result.report()


def test_one_learner_with_another_backend_is_an_error_on_all() -> None:
    program = """
        import os
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.environ["HVD_ADPSGD_INNER"] = "torch" if rank else "horovod"
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.errors import ConfigError
        try:
            hvd.init()
        except ConfigError as error:
            say(rank=rank, error=str(error))
    """
    for facts in run_learners(2, program).by_rank():
        assert "HVD_ADPSGD_INNER differs between learners" in facts["error"]
        assert "horovod on learner 0, torch on learner 1" in facts["error"]


EARLY = ("has ended its training after 3 steps", "super learner leaves", "hvd.join()")


@pytest.mark.parametrize(
    ("inner", "kinds"),
    [
        ("torch", "ddp script ddp"),
        pytest.param("horovod", "script ddp ddp", marks=pytest.mark.extended),
        pytest.param("torch", "fsdp fsdp fsdp", marks=pytest.mark.extended),
    ],
)
def test_torch_does_not_wait_for_a_local_peer_that_cannot_come(inner: str, kinds: str) -> None:
    """It would wait for half an hour: no wait here is that long."""
    env = {"HVD_ADPSGD_INNER": inner, SIZE: "2"}
    imports = ["torch.distributed.fsdp"] if "fsdp" in kinds else []
    program = PROGRAMS / "late_peers.py"
    result = run_learners(6, program, args=kinds.split(), env=env, imports=imports)
    assert result.returncode != 0, result.report()
    learners = result.by_rank()
    assert len(learners) == 6, result.report()
    crossed = ("learner 1 is in barrier at ", " after 3 steps and ", "learner 0 waits in operation")
    for facts in learners:
        words = f"StrategyMismatchError: join() after 3 steps on learner {facts['rank']}: "
        assert facts["join"].startswith(words), facts
    for facts in learners[1:]:
        assert facts["barrier"].startswith("CollectiveMismatchError: "), facts
    elsewhere = {"ddp": "admit", "fsdp": "barrier"}[kinds.split()[-1]]
    inside = (
        f"learner 5 is in {elsewhere} at ",
        "late_peers.py:",
        "learner 4 waits for its gradients",
    )
    assert learners[5]["inside"].startswith("CollectiveMismatchError: "), learners[5]
    for place, kind, words in (
        (4, "CollectiveMismatchError: step 3: ", inside),
        (5, "CollectiveMismatchError: ", inside),
        (0, "CollectiveMismatchError: step 3: ", crossed),
        (2, "LearnerFailedError: step 3, learner 2: learner 3, of the same super learner, ", EARLY),
    ):
        assert learners[place]["next"].startswith(kind), learners[place]
        for word in words:
            assert word in learners[place]["next"], learners[place]
        assert place == 5 or f"hvd_adpsgd: {kind}" in result.stderr, result.report()
