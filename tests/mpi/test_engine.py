"""The engine by itself: nothing lost, little memory, no time wasted, errors said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "programs"


def learners(n: int, program: str, *args: object) -> list[dict[str, Any]]:
    """What each learner of a program said, by rank."""
    arguments = [str(a) for a in args]
    result = run_learners(n, PROGRAMS / program, args=arguments).checked()
    return result.by_rank()


# ---- promise 1: nothing lost --------------------------------------------------------------------

SHARED, SENT = (), ("--no-share",)


def run_mean(n: int, *args: object) -> dict[str, Any]:
    """What mean.py prints on n super learners."""
    arguments = [str(a) for a in ("--steps", 60, "--check", 30, "--least", 5 * n, *args)]
    result = run_learners(n, PROGRAMS / "mean.py", args=arguments).checked()
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("n", "strategy", "wire", "way", "seed"),
    [
        pytest.param(2, "random_pairs", None, SHARED, 1, marks=pytest.mark.extended),
        pytest.param(2, "fixed_ring", "float16", SENT, 2, marks=pytest.mark.extended),
        (3, "random_ring", "bfloat16", SHARED, 3),
        (4, "random_pairs:seed=4", None, SENT, 4),
        pytest.param(4, "fixed_ring", "bfloat16", SENT, 5, marks=pytest.mark.extended),
        pytest.param(5, "random_pairs", "float16", SHARED, 6, marks=pytest.mark.extended),
        pytest.param(8, "random_ring:seed=7", None, SHARED, 7, marks=pytest.mark.extended),
    ],
)
def test_the_mean_moves_only_by_local_updates(
    n: int, strategy: str, wire: str | None, way: tuple[str, ...], seed: int
) -> None:
    """Exchanges as fast as they go, of models that change meanwhile, in every interleaving."""
    narrow = ("--wire", wire) if wire else ()
    found = run_mean(n, "--seed", seed, "--strategy", strategy, *narrow, *way)
    assert found["worst"]["float32"] <= 1e-6, found
    assert found["worst"]["float64"] <= 1e-12, found
    assert found["worst"]["float16"] <= 1e-6, found
    assert found["exchanges"] >= 5 * n, found  # it has shown something


def test_the_mean_test_sees_a_loss() -> None:
    """One number of one super learner, moved by 1e-3, is noticed."""
    found = run_mean(2, "--seed", 1, "--break-merge", 1e-3)
    assert found["worst"]["float64"] > 1e-12, found
    assert found["worst"]["float32"] <= 1e-6, found


@pytest.mark.parametrize("way", [SHARED, SENT])
def test_tensors_may_be_added_while_exchanges_run(way: tuple[str, ...]) -> None:
    said = learners(3, "quiet.py", "--grow", *way)
    for facts in said:
        assert facts["worst"] <= 1e-12, said
        assert facts["chunks"] > 100, said


# ---- what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "slots"), [(4, 2, 3), pytest.param(2, 1, 2, marks=pytest.mark.extended)]
)
def test_memory_is_a_mirror_and_slots_on_leaders_and_none_elsewhere(
    n: int, k: int, slots: int
) -> None:
    """For each leader: a mirror and two slots of corrections, three where it is not alone, and at most 64 MiB
    besides. They are shared with the other learners of the super learner, and with peers
    on the host.
    """
    mib = 200
    said = learners(n, "memory.py", "--mib", mib, "--k", k)
    for facts in said:
        assert facts["exchanges"] >= 12, said
        assert facts["private"] <= (64 if facts["leads"] else 16), said
    leaders = sum(facts["leads"] for facts in said)
    host = sum(facts["pss"] for facts in said)
    most = leaders * ((1 + slots) * mib + 64) + (n - leaders) * 16
    assert leaders * (1 + slots) * mib < host <= most, said


@pytest.mark.parametrize("wire", ["mpi", "tcp"])
def test_an_idle_engine_sleeps_10_ms_between_turns(wire: str) -> None:
    """A hundred turns per second of some microseconds each, and some more for messages: less than a hundredth
    of a core. A busy machine makes turns longer, and never more.
    """
    said = learners(2, "quiet.py", "--idle", "--wire", wire)
    assert all(facts["exchanges"] > 0 for facts in said)
    assert all(0 < facts["turns_per_s"] < 150 for facts in said), said
    assert all(facts["sleeps"] for facts in said), said


# ---- bounds and errors --------------------------------------------------------------------------


def oldest(staleness: list[int]) -> int:
    """The largest staleness that occurred, in steps; 0 without an exchange."""
    return max((i for i, count in enumerate(staleness) if count), default=0)


def test_max_staleness_bounds_the_age_of_corrections() -> None:
    free = learners(3, "quiet.py", "--stale", 1000, "--until", 2)
    bounded = learners(3, "quiet.py", "--stale", 2)
    assert max(oldest(facts["staleness"]) for facts in free) > 2, "nothing to bound"
    assert sum(facts["exchanges"] for facts in bounded) > 0, bounded
    for facts in bounded:
        assert oldest(facts["staleness"]) <= 2, bounded


def test_a_warning_of_each_that_cannot_go_on_also_of_one_soon_after_the_other() -> None:
    """The next leader cannot know whether the second one has warned of the first, and warns too."""
    told = learners(4, "broken_leaders.py")
    failed = [[line.split()[2] for line in one["warned"]] for one in told]
    assert failed == [["3"], ["0", "3"], [], []], told


def test_a_model_cut_differently_is_an_error_and_no_crash() -> None:
    """Chunks of another size than the peer's are not even asked for: no buffer gets more than it holds."""
    said = learners(2, "quiet.py", "--elsewhere")
    errors = {facts["error"] for facts in said}
    assert "ModelMismatchError" in errors, said
    assert errors <= {"ModelMismatchError", None}, said
