"""A failed super learner is replaced by a new one, which takes the mean model and trains on."""

import itertools
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "replaced.py"
TIMEOUT_S = 240.0  # each joining learner loads torch once more, on a machine that may be busy
RECONNECT_S = 10.0  # hvd_adpsgd.joining.reconnect.RECONNECT_S
# whoever waits for its deadline is found out
RECONNECT_WITHOUT_END = ("--reconnect-s", TIMEOUT_S / 2)
# Promise 6 is 10 s, on a machine that does nothing else. Whoever waits for a deadline waits 30 s or more.
ENDS_S = 25.0


def train(
    folder: Path,
    np: int,
    victims: str,
    *args: object,
    of: int = 1,
    launcher: str = "mpirun",
    env: Mapping[str, str] | None = None,
) -> Result:
    arguments = [str(a) for a in ("--folder", folder, "--victims", victims, *args)]
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(of), **(env or {})}
    return run_learners(np, PROGRAM, args=arguments, env=env, timeout=TIMEOUT_S, launcher=launcher)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-12)


def joinings(facts: dict[str, Any]) -> list[tuple[int, float, float, list[int], list[int]]]:
    """(epoch, mean before, mean after, who lived before, who lives after) where somebody has joined.

    No step lies between the two means.
    """
    pairs = itertools.pairwise(facts["told"])
    return [
        (epoch, after[0], after[1], before[2], after[2])
        for epoch, (before, after) in enumerate(pairs, 2)
        if len(after[2]) > len(before[2])
    ]


def require_replaced(result: Result, np: int, of: int, joined: int, new: set[int]) -> None:
    """All learners are there at the end, and what joined did not change the mean."""
    learners = result.by_rank()
    assert [f["rank"] for f in learners] == list(range(np)), result.report()
    assert {f["rank"] for f in learners if f["new"]} == new, result.report()
    everybody = list(range(np // of))
    for facts in learners:
        assert facts["size"] == np
        assert facts["super"] == facts["rank"] // of
        assert facts["told"][-1][2] == everybody, result.report()
        assert facts["last"] == learners[0]["last"]  # average_model works for all
        told = joinings(facts)
        assert len(told) == joined, result.report()
        for _, before, after, fewer, more in told:
            assert len(fewer) == len(more) - 1
            assert close(before, after), told
    for facts in (f for f in learners if f["new"]):
        began, mean, *_ = joinings(facts)[-1]
        assert all(close(value, mean) for value in facts["first"]), (facts["first"], mean)
        assert facts["began"] == began
        assert facts["momentum"] == [True]
    for facts in learners:
        if facts["rank"] % of == 0:  # leaders have exchanged with everybody since
            met = [n for i, n in enumerate(facts["peers"]) if i != facts["super"]]
            assert min(met) > 0, facts["peers"]


@pytest.mark.parametrize(
    "launcher", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.extended)]
)
def test_replaced_under(tmp_path, launcher):
    result = train(tmp_path, 3, "2", "--after", 3, launcher=launcher)
    assert result.returncode == 0, result.report()
    require_replaced(result, 3, 1, joined=1, new={2})
    assert "super learner 2 has joined" in result.stderr


@pytest.mark.parametrize(
    ("of", "launcher"),
    [
        pytest.param(1, "srun", marks=pytest.mark.extended),
        pytest.param(2, "srun", marks=pytest.mark.extended),
        pytest.param(2, "gloo", marks=pytest.mark.extended),
    ],
)
def test_replaced_without_mpi(tmp_path, of, launcher):
    result = train(tmp_path, 3 * of, str(2 * of), "--after", 6, of=of, launcher=launcher)
    require_replaced(result, 3 * of, of, joined=1, new=set(range(2 * of, 3 * of)))
    assert "super learner 2 has joined" in result.stderr


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_newcomer_that_dies_as_soon_as_it_has_joined_keeps_nobody_waiting(tmp_path, launcher):
    result = train(tmp_path, 3, "2", "--fails", "joined", *RECONNECT_WITHOUT_END, launcher=launcher)
    require_replaced(result, 3, 1, joined=1, new={2})
    assert "super learner 2 failed directly after it had joined." in result.stderr
    assert max(f["slowest_s"] for f in result.said) < TIMEOUT_S / 4


@pytest.mark.extended
def test_the_timeline_has_both_learners(tmp_path):
    """The file of the failed learner stays, and the new one's records come after its failure."""
    traces = tmp_path / "traces"
    traces.mkdir()
    env = {"HVD_ADPSGD_TIMELINE": str(traces / "trace.json")}
    train(tmp_path, 3, "1", env=env).checked()
    assert (traces / "trace.1.old.json").exists()
    assert (traces / "trace.2.json").exists()
    began = {
        rank: [
            event["ts"]
            for file in traces.glob(f"trace.{rank}.*json")
            for event in json.loads(file.read_text())
            if event["ph"] == "X"
        ]
        for rank in (0, 1)
    }
    assert min(began[0]) < min(began[1]) < max(began[0]), "on one clock"


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("start", "it ended before it was ready, with status -9"),
        ("wrapped", "it ended before it was ready"),
        ("reconnect", "it failed, or did not come, when all met"),
        ("met", "it failed, or did not come, when all met"),
    ],
)
def test_newcomer_that_dies_keeps_nobody_waiting(tmp_path, where, told, launcher):
    """The others go on, and start another one."""
    args = ("--after", 10, "--fails", where, "--patience-s", 20)
    result = train(tmp_path, 3, "2", *args, launcher=launcher)
    assert (tmp_path / "failed0").exists(), result.report()
    require_replaced(result, 3, 1, joined=1, new={2})
    assert f"super learner 2 has not joined: {told}" in result.stderr
    slowest = max(f["slowest_s"] for f in result.said if not f["new"])
    assert slowest < 2 * RECONNECT_S, slowest


@pytest.mark.extended
@pytest.mark.parametrize("where", ["reconnect", "met"])
def test_newcomer_that_stops_is_waited_for_no_longer_than_promised(tmp_path, where):
    args = ("--after", 10, "--fails", where, "--stops", "--seconds", 120)
    result = train(tmp_path, 3, "2", *args)
    require_replaced(result, 3, 1, joined=1, new={2})
    assert "super learner 2 has not joined: it failed, or did not come" in result.stderr
    slowest = max(f["slowest_s"] for f in result.said if not f["new"])
    assert RECONNECT_S - 1 < slowest < 3 * RECONNECT_S, slowest


@pytest.mark.extended
def test_starter_that_fails_when_all_meet_is_replaced_too(tmp_path):
    """What it has started ends, and others start both anew; four, so that a majority goes on."""
    result = train(tmp_path, 4, "3", "--after", 10, "--starter-fails")
    learners = result.by_rank()
    assert [f["rank"] for f in learners] == [0, 1, 2, 3], result.report()
    assert {f["rank"] for f in learners if f["new"]} == {0, 3}
    for facts in learners:
        assert facts["told"][-1][2] == [0, 1, 2, 3]
        assert facts["last"] == learners[0]["last"]
        for _, before, after, fewer, more in joinings(facts):
            assert len(fewer) == len(more) - 1 and close(before, after)


def test_newcomer_is_put_off_when_another_learner_fails_as_all_meet(tmp_path):
    """It waits for the next call, and is not started anew."""
    result = train(tmp_path, 4, "3", "--after", 6, "--member-fails", 1)
    assert (tmp_path / "member").exists(), result.report()
    learners = result.by_rank()
    assert [f["rank"] for f in learners] == [0, 1, 2, 3], result.report()
    assert {f["rank"] for f in learners if f["new"]} == {1, 3}
    assert "has not joined" not in result.stderr, result.report()
    assert result.stderr.count("starting another one") == 2, result.report()


@pytest.mark.extended
def test_three_attempts(tmp_path):
    """A line in the log for each; the others train to the end."""
    args = ("--fails", "start", "--exits", "--fail-times", 3, "--alone", 200)
    result = train(tmp_path, 3, "2", *args)
    told = "super learner 2 has not joined: it ended before it was ready, with status 1"
    assert result.stderr.count(told) == 3, result.report()
    assert "no more after 3 attempts" in result.stderr
    learners = result.by_rank()
    assert [f["rank"] for f in learners] == [0, 1], result.report()


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("srun", marks=pytest.mark.extended)])
def test_job_that_ends_before_the_newcomer_joins(tmp_path, launcher):
    """The joining learner ends, too, and does not keep the launcher."""
    result = train(tmp_path, 3, "2", "--alone", 1, launcher=launcher)
    ended = time.monotonic()
    learners = result.by_rank()
    assert [f["rank"] for f in learners] == [0, 1], result.report()
    assert "starting another one in its place" in result.stderr
    assert "at shutdown" not in result.stderr, result.report()
    assert ended - max(f["done"] for f in learners) < ENDS_S


@pytest.mark.extended
def test_a_replacement_averages_each_model_with_its_own() -> None:
    """Two models with the same names and shapes, of which one is wrapped again in each epoch: so the job's
    learners have wrapped the other one first, and the replacement has not."""
    program = """
        import signal, torch
        import hvd_adpsgd.torch as hvd
        replaces = "HVD_ADPSGD_JOIN" in os.environ
        hvd.init()
        models = torch.nn.ModuleList([torch.nn.Linear(64, 16), torch.nn.Linear(64, 16)])
        with torch.no_grad():
            for i, model in enumerate(models):
                for p in model.parameters():
                    p.fill_(100.0 * i)

        def wrap(i):
            return hvd.DistributedOptimizer(
                torch.optim.SGD(models[i].parameters(), lr=0.0),
                named_parameters=models[i].named_parameters())

        optimizers = [wrap(0), wrap(1)]
        ends, alone = time.monotonic() + 150, True
        epoch = hvd.admit(models, optimizers, state=0)
        while True:
            for _ in range(10):
                for model, optimizer in zip(models, optimizers):
                    optimizer.zero_grad()
                    model(torch.ones(4, 64)).sum().backward()
                    optimizer.step()
            if epoch == 1 and hvd.rank() == 3 and not replaces:
                os.kill(os.getpid(), signal.SIGKILL)
            whole = len(hvd.allgather_object(0)) == 4 and epoch > 1
            if any(hvd.allgather_object(whole or time.monotonic() > ends)):
                break
            if epoch < 2 and not replaces:
                optimizers[0] = None
                optimizers[0] = wrap(0)
            epoch = hvd.admit(models, optimizers, state=epoch + 1)
        means = [sorted({round(float(p.mean()), 3) for p in m.parameters()}) for m in models]
        say(rank=hvd.rank(), means=means)
        hvd.shutdown()
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    result = run_learners(4, program, env=env, timeout=200, fresh=True)
    assert [facts["means"] for facts in result.by_rank()] == [[[0.0], [100.0]]] * 4, result.report()
