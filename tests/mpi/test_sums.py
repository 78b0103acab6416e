"""The mean of all, summed by the butterfly: exact to rounding, for any number of learners."""

import math

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

MOST = 8
PRELUDE = """
    import hashlib
    import numpy as np
    from mpi4py import MPI
    from tests.mpi.programs.engines import Driven

    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)

    def driven_by(comm, *models):
        return Driven(comm, "periodic_averaging:period=1", *models, chunk_kib=64)

    def average(driven):
        driven.offer()
        driven.engine.rounds.begin(driven.step)
        driven.engine.rounds.finish()
        driven.engine.publish(driven.step)
        driven.absorb()
        driven.step += 1
"""
SUMS = (
    PRELUDE
    + """
    SIZES = {"float64": 40_003, "float32": 100_001, "float16": 3_001}
    for n in range(2, world.size + 1):
        if world.rank >= n:
            continue
        comm = world.Create_group(world.Get_group().Incl(range(n)))
        rng = np.random.default_rng([7, n, comm.rank])
        start = [rng.standard_normal(count).astype(kind) for kind, count in SIZES.items()]
        exact = [sum(comm.allgather(x.astype(np.longdouble))) / n for x in start]
        model = [x.copy() for x in start]
        driven = driven_by(comm, *model)
        for _ in range(3):  # the mean of equal models is itself
            average(driven)
        sent = driven.engine.metrics()["bytes_sent"]
        driven.engine.stop()
        errors = {k: float(abs(x - e).max()) for k, x, e in zip(SIZES, model, exact)}
        digest = hashlib.sha256(b"".join(x.tobytes() for x in model)).hexdigest()
        say(rank=world.rank, n=n, errors=errors, digest=digest, sent=sent / 3)
        comm.Barrier()
"""
)
UNLIKE = (
    PRELUDE
    + """
    kinds = []
    for n in (3, 4):
        comm = world.Create_group(world.Get_group().Incl(range(n))) if world.rank < n else None
        if comm is not None:
            driven = driven_by(comm, np.ones(9_000 if comm.rank == 2 else 10_000))
            try:
                average(driven)
                kinds.append("")
            except Exception as error:
                kinds.append(type(error).__name__)
        world.Barrier()  # who goes on before the others have their sum has failed for them
    say(rank=world.rank, kinds=kinds)
    world.Barrier()
    os._exit(0)
"""
)
PUBLISHED = (
    PRELUDE
    + """
    CHUNKS = 8
    driven = driven_by(world, np.full(CHUNKS * 2**13, float(world.rank)))
    engine = driven.engine
    merged = lambda: engine.loop.counters()["chunks"]
    driven.offer()
    if world.rank == 0:
        engine.memory.own.store.publish()
    engine.rounds.begin(0)
    ends = time.monotonic() + 50
    while merged() < CHUNKS and time.monotonic() < ends:
        time.sleep(1e-3)
    say(rank=world.rank, merged=merged())
    world.Barrier()
    engine.stop()
"""
)
# one unit in the last place of a sum of `MOST` numbers of size 5, for each of its additions
ROUNDING = {"float64": 1e-14, "float32": 1e-5, "float16": 5e-3}


@pytest.fixture(scope="module")
def said() -> list[dict]:
    return run_learners(MOST, SUMS).checked().said


@pytest.mark.parametrize("n", range(2, MOST + 1))
def test_the_mean_is_exact_to_rounding_and_has_the_same_bits_everywhere(
    said: list[dict], n: int
) -> None:
    found = [facts for facts in said if facts["n"] == n]
    assert len(found) == n
    assert len({facts["digest"] for facts in found}) == 1
    for facts in found:
        assert all(facts["errors"][kind] <= ROUNDING[kind] for kind in ROUNDING), facts


@pytest.mark.parametrize("n", range(2, MOST + 1))
def test_the_butterfly_sends_in_log2_n_stages_and_folds_the_rest(said: list[dict], n: int) -> None:
    power = 2 ** int(math.log2(n))
    for facts in said:
        if facts["n"] != n:
            continue
        paired, gives = facts["rank"] < 2 * (n - power), facts["rank"] % 2 == 0
        stages = math.log2(power) + paired if not (paired and gives) else 1
        assert facts["sent"] == stages * 4 * (2 * 40_003 + 100_001 + 3_001), facts


def test_models_of_other_sizes_are_refused_by_all() -> None:
    """Of three and of four; also by those whose neighbour in the butterfly has the same."""
    result = run_learners(4, UNLIKE)
    refused = ["ModelMismatchError"]
    kinds = [facts["kinds"] for facts in result.by_rank()]
    assert kinds == [2 * refused] * 3 + [refused], result.report()


def test_a_learner_that_waits_for_its_node_takes_its_part_in_a_mean() -> None:
    """Learner 0 has published and is in its all-reduce: all chunks are merged, there as elsewhere."""
    result = run_learners(4, PUBLISHED).checked()
    assert [facts["merged"] for facts in result.by_rank()] == [8] * 4, result.report()
