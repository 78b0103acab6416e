"""With HVD_ADPSGD_SHRINK=1 a super learner trains on without a learner that has ended (an experiment)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hvd_adpsgd.lifecycle.shutdown import FAILED_STATUS
from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "programs"
STEP = 12
ROUNDING = 2e-5  # of float32 parameters near 1, over some hundred exchanges


def train(n: int, k: int, victims: list[int], place: str, *more: str) -> Result:
    """shrunken.py with super learners of k, to its end."""
    names = ",".join(map(str, victims))
    args = ("--victims", names, "--at", place, "--step", str(STEP), *more)
    return run(n, k, PROGRAMS / "shrunken.py", args)


def run(n: int, k: int, program: Path | str, args: Sequence[str]) -> Result:
    env = {
        "HVD_ADPSGD_INNER": "torch",
        "HVD_ADPSGD_SHRINK": "1",
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": str(k),
        "HVD_ADPSGD_LEAVE_DEADLINE_S": "2",
    }
    return run_learners(n, program, args=args, env=env, launcher="srun")


def require_trained_on(result: Result, n: int, k: int, victims: list[int]) -> None:
    """All others have trained on; each super learner is one model, and the mean moved by updates only."""
    learners = {f["rank"]: f for f in result.said}
    assert sorted(learners) == [r for r in range(n) if r not in victims], result.report()
    for rank, its in learners.items():
        group = [r for r in range(n) if r // k == rank // k]
        present = [r for r in group if r not in victims]
        assert its["failed"] == victims and its["size"] == n, result.report()
        assert its["coordinator"] == (rank == 0)
        # a step for each iteration of the script but those in which a mate has ended
        assert its["steps"] == its["iterations"] + 1 - (len(group) - len(present)), result.report()
        assert its["bits"] == learners[present[0]]["bits"], result.report()
        assert its["grad"] == pytest.approx(sum(r + 1 for r in present) / len(present), rel=1e-5)
        assert its["finite"] and its["moved"] > 100 * ROUNDING, result.report()
        assert its["drift"] < ROUNDING, result.report()
    assert "LearnerFailedError" not in result.stderr, result.report()
    assert "starting another one" not in result.stderr, result.report()
    for victim in victims:
        assert result.stderr.count(f"learners [{victim}] of super learner") == 1, result.report()


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("forward", marks=pytest.mark.extended),
        pytest.param("backward", marks=pytest.mark.extended),
        "reduction",
        pytest.param("update", marks=pytest.mark.extended),
        pytest.param("exception", marks=pytest.mark.extended),
    ],
)
def test_super_learner_of_two(place: str) -> None:
    result = train(4, 2, [1], place)
    require_trained_on(result, 4, 2, [1])
    assert result.returncode in (1, 9 + 128, FAILED_STATUS), result.report()


@pytest.mark.extended
@pytest.mark.parametrize("place", ["backward", "reduction", "update"])
def test_super_learner_of_three_that_loses_one_then_another(place: str) -> None:
    result = train(6, 3, [1, 2], place)
    require_trained_on(result, 6, 3, [1, 2])


def test_a_reduction_that_has_ended_well_for_some_counts_for_none() -> None:
    """The leader has averaged the gradients; learner 2 has not, as learner 1 ended too soon for it."""
    result = train(6, 3, [1], "half", "--cut", "2")
    require_trained_on(result, 6, 3, [1])


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(4))
def test_a_learner_may_end_at_any_time(seed: int) -> None:
    result = train(6, 3, [1], "anytime", "--seed", str(seed))
    require_trained_on(result, 6, 3, [1])


@pytest.mark.extended
def test_shared_moments() -> None:
    result = train(6, 3, [4], "reduction", "--optimizer", "adamw")
    require_trained_on(result, 6, 3, [4])


@pytest.mark.extended
def test_without_its_leader_a_super_learner_leaves() -> None:
    result = train(4, 2, [2], "backward", "--more", "0")
    assert "learner 2 of it has failed, so this super learner leaves" in result.stderr
    assert sorted(f["rank"] for f in result.said) == [0, 1], result.report()
    assert {tuple(f["failed"]) for f in result.said} == {(2, 3)}, result.report()


@pytest.mark.extended
def test_it_starts_a_replacement_of_another_super_learner(tmp_path: Path) -> None:
    """Learner 1 ends, and is not replaced; then learner 2, with which super learner 1 ends."""
    args = ("--folder", str(tmp_path), "--victims", "1,2", "--after", "3")
    result = run(4, 2, PROGRAMS / "replaced.py", args)
    learners = {f["rank"]: f for f in result.said}
    assert sorted(learners) == [0, 2, 3], result.report()
    assert {rank for rank, its in learners.items() if its["new"]} == {2, 3}, result.report()
    assert len({tuple(its["last"]) for its in learners.values()}) == 1, result.report()
    assert all(its["told"][-1][2] == [0, 1] for its in learners.values()), result.report()
    assert "super learner 1 has joined" in result.stderr, result.report()
    assert "super learner 0 is gone" not in result.stderr, result.report()


AFTERWARDS = """
    import os, signal
    import torch
    import torch.distributed as dist
    import hvd_adpsgd.torch as hvd
    hvd.init()
    model = torch.nn.Linear(4, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    def total():
        number = torch.tensor(hvd.rank() + 1.0)
        dist.all_reduce(number, group=hvd.super_learner_group())
        return number.item()
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().mean()
        loss.backward()
        return loss
    totals = [total()] if "early" in sys.argv else []
    losses = [optimizer.step(closure)]
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    losses += [optimizer.step(closure) for _ in range(3)]
    totals.append(total())
    say(rank=hvd.rank(), totals=totals, losses=[float(loss.detach()) for loss in losses])
"""


@pytest.mark.parametrize("when", [pytest.param("early", marks=pytest.mark.extended), "late"])
def test_a_new_group_and_the_losses_of_closures(when: str) -> None:
    """torch's group is made anew without the learner that has ended; a step that is dropped has its loss."""
    result = run(6, 3, AFTERWARDS, (when,))
    its = {f["rank"]: f for f in result.said}
    assert sorted(its) == [0, 2, 3, 4, 5], result.report()
    assert [its[rank]["totals"][-1] for rank in sorted(its)] == [4, 4, 15, 15, 15], result.report()
    assert all(len(facts["losses"]) == 4 for facts in its.values()), result.report()
    assert "Error" not in result.stderr, result.report()


UNEVEN = """
    import torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.errors import AdpsgdError
    hvd.init()
    model = torch.nn.Linear(4, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    told = ""
    try:
        for step in range(4):
            if step == 2 and hvd.rank() == int(sys.argv[1]):
                hvd.admit(model, optimizer, blocking=False)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).square().mean().backward()
            optimizer.step()
    except AdpsgdError as error:
        told = f"{type(error).__name__} {error}"
    say(rank=hvd.rank(), told=told)
"""


@pytest.mark.parametrize("caller", ["0", pytest.param("1", marks=pytest.mark.extended)])
def test_an_operation_and_a_step_do_not_wait_for_each_other(caller: str) -> None:
    """Learner 0 calls hvd.admit(blocking=False), which learner 1 does not; or the other way round."""
    result = run(4, 2, UNEVEN, (caller,))
    told = [facts["told"] for facts in result.by_rank()]
    mate = 1 - int(caller)
    assert f"learner {mate}: learner {caller}, of the same super learner, waits" in told[mate]
    assert told[mate].startswith("CollectiveMismatchError step 2"), result.report()
    assert told[2:] == ["", ""], result.report()


REFUSED = """
    import torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.errors import AdpsgdError
    hvd.init()
    model = torch.nn.Linear(4, 4)
    def wrap(**more):
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(plain, model.named_parameters(), **more)
    def refused(act):
        try:
            return str(act())
        except AdpsgdError as error:
            return f"{type(error).__name__} {error}"
    told = [refused(lambda: wrap(average_gradients=False)), refused(lambda: wrap(averaging="noloco"))]
    optimizer = wrap()
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    told += [refused(lambda: hvd.DistributedOptimizer(other)), refused(hvd.join)]
    optimizer = wrap()  # in place of the first one
    say(rank=hvd.rank(), told=told, size=hvd.size())
"""


def test_what_is_refused_in_a_job() -> None:
    result = run(4, 2, REFUSED, ()).checked()
    words = ("the script averages gradients", "is more than gossip", "a second", "join() with")
    kinds = ("ConfigError", "ConfigError", "ConfigError", "StrategyMismatchError")
    for facts in result.by_rank():
        for text, kind, word in zip(facts["told"], kinds, words, strict=True):
            assert kind in text and word in text and "HVD_ADPSGD_SHRINK=1" in text, facts
