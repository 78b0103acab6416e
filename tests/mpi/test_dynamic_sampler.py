"""DynamicSampler in jobs: every index is counted; a slow learner costs what it is slower, not more."""

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launcher import ROOT, Result, run_learners

pytestmark = pytest.mark.mpi

PROGRAM = Path(__file__).parent / "programs" / "dynamic.py"
SIZE, BATCH = 403, 4  # as in the program


def run(
    folder: Path,
    pauses: list[float],
    inner: int = 1,
    epochs: int = 3,
    victims: tuple[int, ...] = (),
    by: int = signal.SIGKILL,
    variables: Mapping[str, str] = {},
    **how: str,
) -> Result:
    args = [str(folder), str(epochs), json.dumps(pauses), json.dumps(victims)]
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(inner), "SIGNAL": str(int(by)), **variables}
    imports = ("torch.distributed.fsdp",) if "fsdp2" in variables.values() else ()
    return run_learners(len(pauses), PROGRAM, args=args, env=env, imports=imports, **how)


def trained(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    """The steps of a learner: epoch in which it was, and indices."""
    return [tuple(json.loads(line)[:2]) for line in (folder / f"{rank}.steps").open()]


def progress(folder: Path, rank: int) -> list[int]:
    """hvd.progress() of a learner after each of its steps."""
    return [json.loads(line)[2] for line in (folder / f"{rank}.steps").open()]


def counts(folder: Path, ranks: list[int]) -> Counter[int]:
    return Counter(i for rank in ranks for _, indices in trained(folder, rank) for i in indices)


@pytest.mark.parametrize("how", ["mpirun", "gloo"])
def test_a_slow_learner_gets_less(tmp_path: Path, how: str) -> None:
    """The time is that of the summed speeds; with equal numbers of steps it would be 2.5 times as long."""
    result = run(tmp_path, [0.15, 0.05, 0.05, 0.05], launcher=how)
    facts = result.checked().by_rank()
    assert counts(tmp_path, [0, 1, 2, 3]) == dict.fromkeys(range(SIZE), 3)
    ideal = sum(one["steps"] for one in facts) / sum(1 / one["step_s"] for one in facts)
    assert max(one["ends"][-1] for one in facts) < 2 * ideal, facts
    assert all(one["length"] == 26 for one in facts)
    assert facts[0]["steps"] < 0.6 * facts[1]["steps"]
    for rank in range(4):  # no schedule lags on the slow one, which makes a tenth of the samples
        samples = progress(tmp_path, rank)
        assert samples == sorted(samples) and 1.5 * SIZE < samples[-1] <= 3 * SIZE, samples
    assert facts[0]["state"]["epoch"] >= 2  # reports of the last second may be missing


ROWS = [
    pytest.param(4, 1, "", (), 1.05, id="plain"),
    pytest.param(8, 2, "", (), 1.05, id="super-learners-of-2"),
    pytest.param(8, 2, "ddp", (), 1.05, id="ddp"),
    pytest.param(8, 2, "fsdp2", (), 1.05, id="fsdp2"),
    pytest.param(4, 1, "", (2,), 1.15, id="one-killed"),
    pytest.param(4, 1, "", (0,), 1.15, id="coordinator-killed"),
]


@pytest.mark.extended
@pytest.mark.parametrize(("np", "inner", "inside", "victims", "bound"), ROWS)
def test_three_epochs_take_the_time_of_the_summed_speeds(
    tmp_path: Path, np: int, inner: int, inside: str, victims: tuple[int, ...], bound: float
) -> None:
    """Steps of 50 ms, those of one super learner 150 ms; mean and checkpoint after each epoch."""
    size = 1600 * inner
    variables = {"INSIDE": inside, "SIZE": str(size), "SAVE": "1"}
    if inside:
        variables["HVD_ADPSGD_INNER"] = "torch"
    slow = range(np - inner, np)
    pauses = [0.15 if rank in slow else 0.05 for rank in range(np)]
    result = run(tmp_path, pauses, inner=inner, victims=victims, variables=variables)
    facts = result.checked().by_rank() if not victims else result.by_rank()
    leaders = [one for one in facts if one["rank"] % inner == 0]
    left = 3 * size - sum(len(i) for rank in victims for _, i in trained(tmp_path, rank))
    ideal = left / sum(BATCH * inner / one["step_s"] for one in leaders)
    took = max(one["averaged"][-1] for one in facts)
    rows = [{key: one[key] for key in ("steps", "step_s", "ends", "averaged")} for one in facts]
    print(f"{took:.2f} s are {took / ideal:.3f} of the ideal", *rows, sep="\n")
    assert took <= bound * ideal


@pytest.mark.parametrize("inside", ["", "ddp", pytest.param("fsdp2", marks=pytest.mark.extended)])
def test_the_learners_of_a_super_learner_make_equally_many_steps(
    tmp_path: Path, inside: str
) -> None:
    variables = {"INSIDE": inside, "HVD_ADPSGD_INNER": "torch"} if inside else {}
    result = run(tmp_path, [0.02, 0.02, 0.005, 0.005], inner=2, variables=variables)
    result.checked()
    for first, second in ((0, 1), (2, 3)):
        shapes = [[(e, len(i)) for e, i in trained(tmp_path, rank)] for rank in (first, second)]
        assert shapes[0] == shapes[1]
        assert progress(tmp_path, first) == progress(tmp_path, second)  # so rates are the same
        assert progress(tmp_path, first)[-1] > 1.5 * SIZE
    counted = counts(tmp_path, [0, 1, 2, 3])
    assert set(counted) == set(range(SIZE)) and min(counted.values()) >= 3
    assert sum(counted.values()) <= 3 * (SIZE + 2)  # short last steps are filled up


def test_the_learners_of_a_super_learner_get_the_same_shards(tmp_path: Path) -> None:
    pauses = [0.02, 0.02, 0.005, 0.005]
    run(tmp_path, pauses, inner=2, epochs=2, variables={"SHARDS": "1"}).checked()
    for first, second in ((0, 1), (2, 3)):
        assert trained(tmp_path, first) == trained(tmp_path, second)
    assert counts(tmp_path, [0, 2]) == dict.fromkeys(range(SIZE), 2)
    assert len(trained(tmp_path, 0)) < 0.6 * len(trained(tmp_path, 2))


@pytest.mark.parametrize(
    ("victim", "by"),
    [
        (0, signal.SIGKILL),  # the coordinator
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.extended),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.extended),
    ],
)
def test_what_an_ended_one_held_goes_to_the_others(
    tmp_path: Path, victim: int, by: signal.Signals
) -> None:
    result = run(tmp_path, [0.01, 0.01, 0.01, 0.03], victims=(victim,), by=by)
    others = [rank for rank in range(4) if rank != victim]
    assert len(trained(tmp_path, victim)) > 3 and not (tmp_path / f"{victim}.2").exists()
    assert [one["rank"] for one in result.by_rank()] == others, result.report()
    living, whole = counts(tmp_path, others), counts(tmp_path, [0, 1, 2, 3])
    assert max(living.values()) <= 3  # at most once per epoch
    assert set(whole) == set(range(SIZE)) and min(whole.values()) >= 3


def test_what_a_raising_one_held_goes_to_the_others_in_the_last_epoch(tmp_path: Path) -> None:
    """Its process runs on until all are through: it says that it leaves."""
    result = run(tmp_path, [0.01, 0.03, 0.01], epochs=2, victims=(1,), by=0)
    assert [one["rank"] for one in result.by_rank()] == [0, 2], result.report()
    assert max(counts(tmp_path, [0, 2]).values()) <= 2
    whole = counts(tmp_path, [0, 1, 2])
    assert set(whole) == set(range(SIZE)) and min(whole.values()) >= 2, result.report()


def test_what_one_held_that_breaks_its_loop_goes_to_the_others(tmp_path: Path) -> None:
    """Within the epoch, although the learner neither begins another nor leaves the job."""
    result = run(tmp_path, [0.03, 0.005, 0.03], epochs=2, variables={"BREAKS": "1"})
    assert result.checked().by_rank()[1]["held"], result.report()
    assert counts(tmp_path, [0, 1, 2]) == dict.fromkeys(range(SIZE), 2)


def test_samplers_that_differ_are_refused(tmp_path: Path) -> None:
    """Else some samples would be given twice and some never."""
    result = run(tmp_path, 3 * [0.05], epochs=40, variables={"SEEDS": "differ"})
    line = r"StrategyMismatchError: sampler 0 is of .*'seed': \d.* on learner \d, of .*'seed': \d"
    assert result.returncode != 0 and re.search(line, result.stderr), result.report()


@pytest.mark.extended
def test_what_a_stopped_learner_holds_stays_with_it(tmp_path: Path) -> None:
    """It is stopped for longer than others wait for an answer, in the second epoch, and continued."""
    result = run(tmp_path, [0.01, 0.01, 0.01, 0.03], victims=(2,), by=signal.SIGSTOP)
    result.checked()
    assert max(one["longest_s"] for one in result.by_rank()) > 2
    assert counts(tmp_path, [0, 1, 2, 3]) == dict.fromkeys(range(SIZE), 3)


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["ddp", "equal", "dynamic"])
def test_the_program_of_the_page_runs(scheme: str) -> None:
    args, env = [scheme, "--steps", "4"], {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    result = run_learners(
        2, ROOT / "examples" / "uneven.py", args=args, env=env, launcher="torchrun"
    )
    assert f"{scheme}: keeps " in result.checked().stdout
