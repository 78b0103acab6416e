"""Operations over all learners that do not fit, that run in several threads, and their own collectives."""

import tempfile
import textwrap
from typing import Any

import pytest

from tests.launcher import once, run_learners

pytestmark = pytest.mark.mpi

ALONE = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}

OPERATIONS = """
    import torch
    import hvd_adpsgd.torch as hvd
    from tests.mpi.programs import learner
    from tests.mpi.programs.learner import outcome
    hvd.init()
    rank = hvd.rank()
    model = torch.nn.Linear(3, 2)
    optimizer = learner.wrap(model)

    def entered(context):
        with context:
            pass

    def step():
        learner.step(model, optimizer, torch.ones(1, 3))

    x = torch.ones(4)
    CALLS = {
        "averaged": lambda: entered(hvd.averaged(model)),
        "average_model": lambda: hvd.average_model(model),
        "averaging_paused": lambda: entered(hvd.averaging_paused()),
        "consensus_distance": lambda: hvd.consensus_distance(model),
        "allreduce": lambda: hvd.allreduce(x),
        "large allreduce": lambda: hvd.allreduce(torch.ones(10**6)),
        "named allreduce": lambda: hvd.allreduce(x, name="loss"),
        "allreduce of 5": lambda: hvd.allreduce(torch.ones(5)),
        "allreduce of doubles": lambda: hvd.allreduce(x.double()),
        "allreduce of maxima": lambda: hvd.allreduce(x, op=hvd.Max),
        "allgather": lambda: hvd.allgather(x),
        "allgather_object": lambda: hvd.allgather_object("x" * 10**6),
        "broadcast": lambda: hvd.broadcast(x, 0),
        "broadcast of 1": lambda: hvd.broadcast(x, 1),
        "broadcast_object": lambda: hvd.broadcast_object(3, 0),
        "broadcast_parameters": lambda: hvd.broadcast_parameters(model.state_dict(), 0),
        "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        "barrier": lambda: hvd.barrier(),  # the line is that of the script
        "join": lambda: hvd.join(),
        "admit": lambda: hvd.admit(model, optimizer),
        "hvd.DistributedOptimizer": lambda: hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()),
    }
"""


@once
def by_part() -> dict[str, list[dict[str, Any]]]:
    """What the learners of one job said of each part, which follows the errors of those before."""
    with tempfile.TemporaryDirectory() as folder:
        program = _program(PAIRS + ERRORS + THREADS + INTERRUPTED)
        result = run_learners(3, program, args=[folder], env=ALONE).checked()
    assert "are gone" not in result.stderr, result.report()
    lines = [line for line in result.stderr.splitlines() if "hvd_adpsgd:" in line]
    assert len(lines) <= 10, result.report()
    return result.by_case()


PAIRS = """
    names = list(CALLS)
    for i, name in enumerate(names):
        other = names[(i + 7) % len(names)]
        found = outcome(CALLS[name if rank == 1 else other])
        step()
        after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        say(case="pairs", rank=rank, pair=[other, name], after=after, **found)
"""


def test_pairs_of_operations_that_differ() -> None:
    """All learners raise, name both operations and both lines, and the next operation works.

    At once: as many waits for a deadline would last longer than the launch.
    """
    assert len(by_part()["pairs"]) == 3 * 21
    for facts in by_part()["pairs"]:
        text = facts["text"]
        assert facts["error"] == "CollectiveMismatchError", facts
        first, other = (name.split()[-1] for name in facts["pair"])
        assert facts["after"] == 3.0, facts
        assert (
            text.count("program.py:") == 2 and "on learner 0" in text and "on learner 1" in text
        ), facts
        if " " not in "".join(facts["pair"]):
            assert f"learner 0 is in {first}" in text and f"learner 1 in {other}" in text, facts


@pytest.mark.extended
def test_a_leader_whose_step_ends_an_operation_takes_part_in_no_other() -> None:
    """Its mate waits for it in Horovod, and could not come."""
    program = """
        def train():
            for _ in range(3 if hvd.super_rank() == 1 else 6):
                step()

        errors = [outcome(act).get("error") for act in (train, hvd.barrier)]
        say(rank=rank, told=[error for error in errors if error])
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_AVERAGING": "delay_by_one"}
    said = run_learners(4, _program(program), env=env).by_rank()
    assert said[0]["told"] == ["CollectiveMismatchError"] * 2, said
    assert said[1]["told"] == ["LearnerFailedError"] * 2, said  # waited for gradients of the leader
    for facts in said[2:]:
        assert facts["told"] == ["CollectiveMismatchError"], said


def _program(more: str) -> str:
    return textwrap.dedent(OPERATIONS) + textwrap.dedent(more)


ERRORS = """
    from hvd_adpsgd.errors import ConfigError
    from hvd_adpsgd.launch import world as worlds
    from mpi4py import MPI
    collectives = worlds.current().collectives

    def run(operation):
        return list(outcome(lambda: collectives.run("experiment", operation)).values())

    def raised(error):
        def operation(attempt):
            if rank == 2:
                raise error
            attempt.allreduce(torch.ones(10**6).numpy())  # rank 2 does not come
        return run(operation)

    def truncated(attempt):
        comm = collectives.comm
        if rank == 0:
            comm.Send(torch.ones(9).numpy(), 1, 5)
        if rank == 1:
            comm.Recv(torch.ones(3).numpy(), 0, 5)  # shorter than what is sent
        attempt.barrier()

    told = [raised(ConfigError("a bad option")), raised(KeyError("x"))]
    told += [run(truncated) for _ in range(2)]
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    say(case="errors", rank=rank, told=told, after=after, left=collectives.ranks)
"""


def test_an_error_of_one_learner_is_an_error_of_all() -> None:
    """Ours keeps its class; another one is named. No learner blocks, and the next operation works."""
    assert len(by_part()["errors"]) == 3
    for facts in by_part()["errors"]:
        ours, other, *mpi = facts["told"]
        assert ours == ["ConfigError", "a bad option"], facts
        assert other[0] == ("KeyError" if facts["rank"] == 2 else "TransportError"), facts
        assert facts["rank"] == 2 or "learner 2 raised KeyError" in other[1], facts
        for kind, text in mpi:
            assert kind == "TransportError" and "MPI failed on learner 1" in text, facts
            assert "TRUNCATE" in text, facts
        assert len(mpi) == 2 and facts["after"] == 3.0 and facts["left"] == [0, 1, 2], facts


THREADS = """
    import threading
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda i: hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), range(80)))
    with ThreadPoolExecutor(8) as pool:
        def work(i):
            try:
                return hvd.allreduce(torch.tensor([float(i)]), name=f"metric {i}").item() == i
            except Exception as error:
                return type(error).__name__
        outcomes = [work(i) if i % 8 == 0 else pool.submit(work, i) for i in range(80)]
        outcomes = [str(o) if isinstance(o, (bool, str)) else str(o.result()) for o in outcomes]
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    say(case="threads", rank=rank, sums=sums, outcomes=outcomes, after=after)
"""


def test_operations_of_several_threads_run_one_after_the_other() -> None:
    """In the same order on all learners they work; in another one, all learners raise."""
    for facts in by_part()["threads"]:
        assert facts["sums"] == [3.0] * 80 and facts["after"] == 3.0, facts
        assert set(facts["outcomes"]) <= {"True", "CollectiveMismatchError"}, facts
    mismatches = {
        facts["outcomes"].count("CollectiveMismatchError") for facts in by_part()["threads"]
    }
    assert len(by_part()["threads"]) == 3 and len(mismatches) == 1


def test_a_learner_that_its_peers_declared_failed_raises() -> None:
    """It is alive: MPI would say so of one that was cut off. It decides nothing on its own."""
    program = """
        from hvd_adpsgd.errors import LearnerFailedError
        from hvd_adpsgd.launch import world as worlds
        messages = worlds.current().collectives.messages
        hvd.barrier()
        if rank == 1:
            messages.believe_failed({2})  # alone; it convinces learner 0
        told = []
        while not told or told[-1] == 3.0:
            try:
                told.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            except LearnerFailedError as error:
                told.append(str(error))
        say(rank=rank, told=told, left=worlds.current().collectives.ranks)
    """
    result = run_learners(3, _program(program), env=ALONE)
    first, second, late = result.by_rank()
    assert late["rank"] == 2, result.report()
    *before, error = late["told"]
    assert "declared failed by its peers" in str(error), result.report()
    # what it sent before the others knew counts: for both or for neither
    assert first["told"] == second["told"], result.report()
    *all_three, last = first["told"]
    assert last == 2.0 and len(before) <= len(all_three), result.report()
    assert first["left"] == second["left"] == [0, 1], result.report()
    assert "learners [2] are gone" in result.stderr, result.report()


INTERRUPTED = """
    import signal, traceback
    from pathlib import Path
    interrupted = Path(sys.argv[1], "interrupted")

    def interrupt():
        me = threading.main_thread().ident
        inside = lambda: [f.name for f in traceback.extract_stack(sys._current_frames()[me])]
        while "compare" not in inside():
            time.sleep(0.01)
        signal.pthread_kill(me, signal.SIGALRM)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    if rank == 1:
        threading.Thread(target=interrupt, daemon=True).start()
    try:
        while rank == 0 and not interrupted.exists():
            time.sleep(0.01)
        hvd.barrier()
    except BaseException as error:
        told = [type(error).__name__, str(error)]
        if rank == 1:
            interrupted.touch()
    after = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    say(case="interrupted", rank=rank, told=told, after=after)
"""


def test_an_interrupted_operation_is_an_error_of_all_and_the_next_one_works() -> None:
    """Ctrl-C in a notebook, on one learner, while it waits for another one that is not there yet."""
    first, interrupted, last = by_part()["interrupted"]
    assert interrupted["told"][0] == "KeyboardInterrupt"
    for facts in (first, last):
        assert facts["told"][0] == "TransportError", facts
        assert "learner 1 raised KeyboardInterrupt" in facts["told"][1], facts
    assert [facts["after"] for facts in by_part()["interrupted"]] == [3.0] * 3


@pytest.mark.parametrize(
    "n", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.extended) for n in (5, 17))]
)
def test_collectives_against_numpy(n: int) -> None:
    """Both ways to reduce, gather and broadcast; as messages, and through the memory of one or more hosts.

    The bits are the same on all learners.
    """
    program = """
        import hashlib
        import mpi4py
        mpi4py.rc.finalize = True
        from mpi4py import MPI
        import numpy as np
        from hvd_adpsgd.messaging.host_memory import Sharing
        from hvd_adpsgd.messaging.attempt import Attempt
        from hvd_adpsgd.messaging.messages import COMPLETE, Messages
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        messages = Messages(comm)
        rank, n = comm.rank, comm.size
        wrong, bits = [], hashlib.sha256()

        def values(r, size):
            return np.random.default_rng([r, size]).standard_normal(size)

        # hosts of two learners, and one of one if their number is odd; all on one
        some, one = Sharing(("host", rank % ((n + 1) // 2))), Sharing()
        sizes = (0, 1, 7, 10**4, 10**6 + 1)
        for size, sharing in [(size, None) for size in sizes] + [(sizes[-1], some), (sizes[-1], one)]:
            attempt = Attempt(messages, range(n), range(n), sharing=sharing)
            all_values = np.stack([values(r, size) for r in range(n)])
            for combine in (np.add, np.minimum):
                got = attempt.allreduce(values(rank, size), combine)
                bits.update(got.tobytes())
                if not np.allclose(got, combine.reduce(all_values, axis=0), rtol=1e-12, atol=1e-12):
                    wrong.append(f"allreduce {size}")
            for root in (0, n - 1):
                got = values(rank, size)
                attempt.broadcast(got, root)
                if not (got == all_values[root]).all():
                    wrong.append(f"broadcast {size} {root}")
            counts = [8 * (size if r % 2 else size // 3) for r in range(n)]
            everything = np.empty(sum(counts), np.uint8)
            mine = values(rank, size)[: counts[rank] // 8].view(np.uint8)
            attempt.allgatherv(mine, everything, counts)
            want = b"".join(all_values[r].tobytes()[: counts[r]] for r in range(n))
            if everything.tobytes() != want:
                wrong.append(f"allgatherv {size}")
            gathered = attempt.gather("x" * size * rank)
            if gathered != ["x" * size * r for r in range(n)]:
                wrong.append(f"gather {size}")
            attempt.flush()
            decision = messages.decision(messages.vote(COMPLETE, size))
            if decision[1:] != (COMPLETE, True, ()):
                wrong.append(str(decision))
            if sharing is not None and n > 1:
                groups = sharing.among(attempt).groups
                wanted = [[r for r in range(n) if r % ((n + 1) // 2) == i] for i in range((n + 1) // 2)]
                if sharing is one:
                    wanted = [range(n)]
                if [list(group) for group in groups] != [list(group) for group in wanted]:
                    wrong.append(f"hosts {groups}")
        messages.close(time.monotonic() + 30)
        say(rank=rank, wrong=wrong, bits=bits.hexdigest())
    """
    said = run_learners(n, program).checked().by_rank()
    assert [facts["wrong"] for facts in said] == [[]] * n
    assert len({facts["bits"] for facts in said}) == 1


AGREEMENTS = """
    import sys, threading
    from mpi4py import MPI
    from hvd_adpsgd.messaging.messages import Messages
    count = int(sys.argv[1])
    comms = [MPI.COMM_WORLD.Dup() for _ in range(4)]
    for comm in comms:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    wrong, errors = [0] * 4, []

    def agree(i):
        try:
            messages = Messages(comms[i])
            for number in range(count):
                flag = 3 if number % 7 or messages.place != number % messages.size else 1
                decision = messages.decision(messages.vote(flag, number))
                want = (number, 3 if number % 7 else 1, True, ())
                wrong[i] += tuple(decision) != want
            messages.close(time.monotonic() + 60)
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=agree, args=(i,)) for i in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(rank=MPI.COMM_WORLD.rank, wrong=wrong, errors=errors, seconds=time.monotonic() - began)
"""


@pytest.mark.parametrize("count", [300, pytest.param(62500, marks=pytest.mark.extended)])
def test_agreements_of_four_threads_on_four_ranks(count: int) -> None:
    """Where MPI's agreement gives split answers: all of ours are right, a million in the longer run."""
    said = run_learners(4, AGREEMENTS, args=[str(count)], timeout=280, fresh=True).checked()
    for facts in said.by_rank():
        assert facts["wrong"] == [0] * 4 and facts["errors"] == [], facts
    print(f"{16 * count:,} votes in {said.by_rank()[0]['seconds']:.1f} s")
