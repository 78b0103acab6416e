"""The engine by itself: nothing lost, little memory, no time wasted."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.strategies import Plan
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

PROGRAMS = Path(__file__).parent / "programs"


def learners(n: int, program: str, *args: object) -> list[dict[str, Any]]:
    """What the learners of a program said, by rank."""
    arguments = [str(a) for a in args]
    return run_learners(n, PROGRAMS / program, args=arguments).checked().by_rank()


SHARED, SENT = (), ("--no-share",)


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
    how = ("--steps", 60, "--check", 30, "--seed", seed, "--strategy", strategy, *narrow, *way)
    found = learners(n, "mean.py", "--least", 5 * n, *how)[0]
    worst = found["worst"]
    assert max(worst["float32"], worst["float16"]) <= 1e-6 and worst["float64"] <= 1e-12, found
    assert found["exchanges"] >= 5 * n, found


@functools.cache
def quiet() -> dict[str, list[dict[str, Any]]]:
    """What the learners said of each wire, by rank."""
    return run_learners(2, PROGRAMS / "quiet.py").checked().by_case()


@pytest.mark.parametrize(
    ("n", "k", "slots"), [(4, 2, 3), pytest.param(2, 1, 2, marks=pytest.mark.extended)]
)
def test_memory_is_a_mirror_and_slots_on_leaders_and_none_elsewhere(
    n: int, k: int, slots: int
) -> None:
    """For each leader: a mirror and two slots of corrections, three where it is not alone, and at most 64 MiB
    besides. They are shared with the other learners of the super learner, the mirror with peers on the host.
    """
    mib = 200
    own = 64 + slots * mib * (k == 1)
    said = learners(n, "memory.py", "--mib", mib, "--k", k)
    for facts in said:
        assert facts["exchanges"] >= 12, said
        assert facts["private"] <= (own if facts["leads"] else 16), said
    leaders = sum(facts["leads"] for facts in said)
    host = sum(facts["pss"] for facts in said)
    most = leaders * ((1 + slots) * mib + 64) + (n - leaders) * 16
    least = (
        0.98 * leaders * (1 + slots) * mib
    )  # pages of programs count less while other jobs share them
    assert least < host <= most, said


@pytest.mark.parametrize("wire", ["mpi", "tcp"])
def test_an_idle_engine_sleeps_10_ms_between_turns(wire: str) -> None:
    """A hundred turns per second of some microseconds each, and some more for messages: less than a hundredth
    of a core. A busy machine makes turns longer, and never more.
    """
    said = quiet()[wire]
    assert all(facts["exchanges"] > 0 for facts in said)
    assert all(0 < facts["turns_per_s"] < 150 for facts in said), said
    assert all(facts["sleeps"] for facts in said), said


def test_a_step_waits_for_old_snapshots_before_it_publishes() -> None:
    """Which are too old, simulated jobs check."""
    engine = Engine.__new__(Engine)
    engine.loop, engine.memory, engine._plan = mock.Mock(), mock.Mock(), Plan.nobody()
    engine.memory.own.published, engine.config = False, Config(max_staleness=3, deadline_s=7.0)
    with mock.patch.object(Engine, "check"):
        engine.publish(10)
    engine.loop.wait_fresh.assert_called_once_with(10, engine.config)
