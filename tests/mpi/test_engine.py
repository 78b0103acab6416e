"""The engine by itself: nothing lost, little memory, no time wasted, errors said, exchanges cut short."""

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


def learners(n: int, program: str, *args: object, **how: Any) -> list[dict[str, Any]]:
    """What the learners of a program said, by rank."""
    arguments = [str(a) for a in args]
    return run_learners(n, PROGRAMS / program, args=arguments, **how).checked().by_rank()


SHARED, SENT = (), ("--no-share",)
LEFT = 2  # as in Loop.peers
LEAVE_S = 16.0


def require_mean_kept(n: int, least: int, *args: object, **how: Any) -> dict[str, Any]:
    """The mean of n models moves by local updates only, in so many exchanges."""
    found = learners(n, "mean.py", "--least", least, *args, **how)[0]
    worst = found["worst"]
    assert worst["float32"] <= 1e-6 and worst["float64"] <= 1e-12 and worst["float16"] <= 1e-6, (
        found
    )
    assert found["exchanges"] >= least, found
    return found


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
    require_mean_kept(n, 5 * n, *how)


def test_the_mean_test_sees_a_loss() -> None:
    """One number of one super learner, moved by 1e-3, is noticed."""
    how = ("--steps", 60, "--check", 30, "--seed", 1, "--break-merge", 1e-3)
    (found, *_) = learners(2, "mean.py", *how)
    assert found["worst"]["float64"] > 1e-12 and found["worst"]["float32"] <= 1e-6, found


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.alone
def test_64_engines_for_a_minute_lose_nothing() -> None:
    """In 64 processes that exchange all the time, without torch."""
    how = "--seed 64 --steps 160 --check 40 --step-s 1.0 --rate 2".split()
    found = require_mean_kept(64, 20 * 64, *how, timeout=400, fresh=True)
    assert found["engines"] == 64 and found["seconds"] >= 60 and found["pss_mib"] < 100, found


@functools.cache
def quiet(n: int, runs: str) -> list[list[dict[str, Any]]]:
    """What the learners said in each run of quiet.py, by rank."""
    result = run_learners(n, PROGRAMS / "quiet.py", args=runs.split()).checked()
    return list(result.by_case().values())


IN_PAIRS = "--idle --wire mpi --then --idle --wire tcp --then --elsewhere"
IN_THREES = "--grow --then --grow --no-share"


def test_tensors_may_be_added_while_exchanges_run() -> None:
    for said in quiet(3, IN_THREES):  # shared, and sent
        for facts in said:
            assert facts["worst"] <= 1e-12, said
            assert facts["chunks"] > 100, said


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


@pytest.mark.parametrize("wire", [0, 1], ids=["mpi", "tcp"])
def test_an_idle_engine_sleeps_10_ms_between_turns(wire: int) -> None:
    """A hundred turns per second of some microseconds each, and some more for messages: less than a hundredth
    of a core. A busy machine makes turns longer, and never more.
    """
    said = quiet(2, IN_PAIRS)[wire]
    assert all(facts["exchanges"] > 0 for facts in said)
    assert all(0 < facts["turns_per_s"] < 150 for facts in said), said
    assert all(facts["sleeps"] for facts in said), said


def test_max_staleness_bounds_the_age_of_corrections() -> None:
    """What exchanges compute after a step's publish() reaches the parameters one step later."""
    engine = Engine.__new__(Engine)
    engine.loop, engine.memory, engine._plan = mock.Mock(), mock.Mock(), Plan.nobody()
    engine.memory.own.published, engine.config = False, Config(max_staleness=3, deadline_s=7.0)
    with mock.patch.object(Engine, "check"):
        engine.publish(10)
    engine.loop.wait_fresh.assert_called_once_with(8, 7.0)


def test_a_warning_of_each_that_cannot_go_on_also_of_one_soon_after_the_other() -> None:
    """The next leader cannot know whether the second one has warned of the first, and warns too."""
    told = learners(4, "broken_leaders.py")
    failed = [[line.split()[2] for line in one["warned"]] for one in told]
    assert failed == [["3"], ["0", "3"], [], []], told


def test_a_model_cut_differently_is_an_error_and_no_crash() -> None:
    """Chunks of another size than the peer's are not even asked for: no buffer gets more than it holds."""
    said = quiet(2, IN_PAIRS)[2]
    errors = {facts["error"] for facts in said}
    assert "ModelMismatchError" in errors, said
    assert errors <= {"ModelMismatchError", None}, said


@pytest.mark.parametrize(
    ("who", "way"),
    [
        ("first", SHARED),
        pytest.param("both", SENT, marks=pytest.mark.extended),
        pytest.param("first", SENT, marks=pytest.mark.extended),
    ],
)
def test_who_leaves_cuts_a_long_exchange_short_and_loses_nothing(
    who: str, way: tuple[str, ...]
) -> None:
    """After half of leave_deadline_s; what either side has begun is averaged on both.

    In the other half the exchange ends. It takes milliseconds; on a busy machine it may take seconds.
    """
    told = learners(2, "cut_short.py", "--who", who, "--leave-s", 10, *way)
    merged = [one["merged"] for one in told]
    assert merged[0] == merged[1] and 0 < merged[0] < 100, told
    assert all(one["moved"] < 1e-15 and one["lost"] == [] for one in told), told


@pytest.mark.parametrize(
    "way",
    [("--twice",), *(pytest.param(way, marks=pytest.mark.extended) for way in (SENT, SHARED))],
)
def test_one_that_was_stopped_while_its_partner_left_waits_for_nothing(
    way: tuple[str, ...],
) -> None:
    """The rest of their exchange never comes: it comes to rest all the same, and leaves in good order.

    So has who left, though the other had come back in between.
    """
    told = learners(3, "left_behind.py", "--leave-s", LEAVE_S, *way)
    # for half of it the first waits for its partner, and the second for nothing
    assert told[0]["left_behind"] == 1 and told[0]["leave_s"] < LEAVE_S, told
    assert told[1]["rests"] and told[1]["leave_s"] < LEAVE_S / 2, told
    assert told[2]["peers"] == [LEFT, LEFT], told
