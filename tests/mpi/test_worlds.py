"""The worlds: who is where, what is refused, and that leaving ends."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.errors import TopologyError
from hvd_adpsgd.launch.world import Placement, form_super_learners
from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

SIZE = "HVD_ADPSGD_SUPER_LEARNER_SIZE"

PLACES = """
    import torch
    import hvd_adpsgd.torch as hvd
    from hvd_adpsgd.launch import world as worlds
    try:
        hvd.init()
    except Exception as error:
        say(rank=int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)),
            error=type(error).__name__, text=str(error))
        sys.exit()
    world = worlds.current()
    inner = hvd.allreduce(torch.tensor([2.0 ** hvd.rank()]), op=hvd.Sum,
                          process_set=hvd.super_learner)
    say(rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank(),
        local_size=hvd.local_size(), cross_rank=hvd.cross_rank(), cross_size=hvd.cross_size(),
        super_rank=hvd.super_rank(), super_size=hvd.super_size(), leads=hvd.is_leader(),
        inner_rank=hvd.super_learner.rank(), inner_size=hvd.super_learner.size(),
        outer=world.outer and world.outer.Get_size(), inner=inner.item(),
        leaders=tuple(group[0] for group in world.groups),
        all=hvd.allreduce(torch.tensor([2.0 ** hvd.rank()]), op=hvd.Sum).item())
"""


def expected_places(n: int, k: int) -> list[dict[str, object]]:
    """The places of n learners of one host in super learners of k."""
    places = []
    for rank in range(n):
        group, inner_rank = divmod(rank, k)
        place = {"rank": rank, "size": n, "local_rank": rank, "local_size": n}
        place |= {"cross_rank": 0, "cross_size": 1, "super_rank": group, "super_size": n // k}
        place |= {"leads": inner_rank == 0, "inner_rank": inner_rank, "inner_size": k}
        place |= {"outer": n // k}
        place |= {"leaders": list(range(0, n, k))}
        place |= {"inner": float(sum(2**r for r in range(group * k, group * k + k)))}
        places.append({**place, "all": float(2**n - 1)})
    return places


def test_without_launcher_one_learner_though_it_has_no_home() -> None:
    program = 'os.environ.pop("HOME", None)\n' + textwrap.dedent(PLACES)
    result = run_learners(1, program, launcher=None).checked()
    assert result.by_rank() == expected_places(1, 1)


def test_synchronous_is_one_super_learner_whatever_the_size() -> None:
    env = {SIZE: "1", "HVD_ADPSGD_AVERAGING": "synchronous"}
    result = run_learners(3, PLACES, env=env).checked()
    assert result.by_rank() == expected_places(3, 3)


REFUSED = """
    from hvd_adpsgd.launch import bootstrap
    from tests.mpi.programs.learner import outcome
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    for case in json.loads(sys.argv[1]):
        own = {name: value if type(value) is str else value[rank] for name, value in case.items()}
        os.environ.update(own)
        say(rank=rank, case=json.dumps(case), **outcome(bootstrap.init))
        for name in own:
            del os.environ[name]
"""
HOSTS = {  # variables, or what each learner has: the error, and words of it
    "TopologyError": [({SIZE: "2"}, "host | SIZE=2 | 3 learners | divisor of 3")],
    "ConfigError": [
        ({"HVD_ADPSGD_DEADLINE_S": "soon"}, "HVD_ADPSGD_DEADLINE_S | 'soon' | learner 0"),
        ({"ADPSGD_CHUNK_KIB": ["64", "128", "256"]}, "ADPSGD_CHUNK_KIB | 64 | 128 | learner 1"),
    ],
}
ALONE = {
    "LaunchError": [
        ({"HOROVOD_CONTROLLER": "gloo"}, "HOROVOD_CONTROLLER=gloo | horovodrun --mpi"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}, "--gloo | HOROVOD_RANK is ''"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 | world of one | mpirun"),
        ({"PMI_SIZE": "4", "SLURM_PROCID": "0"}, "PMI_SIZE=4 | world of one | srun --mpi=none"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 | RANK | torchrun | horovodrun -np N | mpirun"),
    ]
}
THREADS = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}  # read when mpi4py is imported
NO_THREADS = {"LaunchError": [(THREADS, "SERIALIZED | MPI_THREAD_MULTIPLE | Unset")]}


@pytest.mark.parametrize(
    ("n", "refused", "env"),
    [(3, HOSTS, {}), (1, ALONE, {}), (1, NO_THREADS, THREADS)],
    ids=["hosts", "alone", "threads"],
)
def test_bad_launches_and_options_are_refused_on_all(
    n: int, refused: dict[str, list[Any]], env: dict[str, str]
) -> None:
    cases = [(json.dumps(case), kind, words) for kind in refused for case, words in refused[kind]]
    args = [f"[{', '.join(case for case, *_ in cases)}]"]
    launcher = "mpirun" if n > 1 else None
    errors = run_learners(n, REFUSED, args=args, env=env, launcher=launcher).checked().by_case()
    for case, kind, words in cases:
        assert [facts.get("error") for facts in errors[case]] == [kind] * n, case
        for facts in errors[case]:
            assert all(word in facts["text"] for word in words.split(" | ")), facts


UNEQUAL = (
    """
    from hvd_adpsgd.launch import communicators
    # two hosts, one with learners 0, 2, 4 and one with 1, 3: as MPI's shared-memory split would say
    communicators.of_host = lambda comm: comm.Split(comm.Get_rank() % 2, comm.Get_rank())
"""
    + PLACES
)


def test_unequal_super_learners() -> None:
    said = run_learners(5, UNEQUAL).checked().by_rank()
    assert [f["super_rank"] for f in said] == [0, 1, 0, 1, 0]
    for where in ("inner", "local"):
        assert [f[f"{where}_rank"] for f in said] == [0, 0, 1, 1, 2]
        assert [f[f"{where}_size"] for f in said] == [3, 2, 3, 2, 3]
    assert [f["cross_rank"] for f in said] == [0, 1, 0, 1, 0]
    assert [f["cross_size"] for f in said] == [2, 2, 2, 2, 1]
    assert [f["leaders"] for f in said] == [[0, 1]] * 5
    assert [f["outer"] for f in said] == [2, 2, 2, 2, None], "of those who have counterparts"
    assert [f["inner"] for f in said] == [21.0, 10.0, 21.0, 10.0, 21.0]
    assert [f["all"] for f in said] == [31.0] * 5


def placements(*hosts: int) -> list[Placement]:
    """Hosts with so many learners each, ranks host by host."""
    first = [sum(hosts[:i]) for i in range(len(hosts))]
    return [
        Placement(start, f"node{i}", r, n)
        for i, (start, n) in enumerate(zip(first, hosts, strict=True))
        for r in range(n)
    ]


def test_form_super_learners() -> None:
    assert form_super_learners(placements(2, 3), None) == ((0, 1), (2, 3, 4))
    assert form_super_learners(placements(4, 2), 2) == ((0, 1), (2, 3), (4, 5))
    assert form_super_learners(placements(1), None) == ((0,),)
    assert form_super_learners(placements(2, 3), 2, joined=True) == ((0, 1, 2, 3, 4),)
    with pytest.raises(TopologyError, match=r"node1.*SIZE=2.*3 learners"):
        form_super_learners(placements(2, 3), 2)


def test_shutdown_init_and_merge() -> None:
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.launch import bootstrap
        from hvd_adpsgd.launch import world as worlds
        from hvd_adpsgd.config import Config
        from tests.mpi.programs.learner import outcome

        def kind(call):
            return outcome(call).get("error")

        before = kind(hvd.rank), kind(lambda: hvd.allreduce(torch.ones(1))), hvd.is_initialized()
        hvd.shutdown()  # before init: nothing to do
        hvd.init()
        stopped = []
        for name in "ab":
            worlds.current().teardown.at_shutdown(lambda name=name: stopped.append(name))
        twice = kind(hvd.init), kind(lambda: hvd.init(config=Config(super_learner_size=3)))
        bootstrap.merge_super_learners(worlds.current())
        merged = hvd.super_size(), hvd.super_learner.size(), hvd.allreduce(
            torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
        hvd.shutdown()
        hvd.shutdown()
        after = kind(hvd.size), hvd.is_initialized()
        hvd.init(config=Config(super_learner_size=1))
        again = hvd.super_size(), hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()
        rank = hvd.rank()
        hvd.shutdown()
        hvd.init(comm=[0, 2]) if rank != 1 else None
        part = (hvd.rank(), hvd.size()) if rank != 1 else None
        say(rank=rank, before=before, twice=twice, merged=merged, stopped=stopped, after=after,
            again=again, part=part)
    """
    # whoever waited for a deadline in shutdown() would do so beyond the launch
    env = {SIZE: "1", "HVD_ADPSGD_LEAVE_DEADLINE_S": "600"}
    said = run_learners(3, program, env=env).checked().by_rank()
    uninitialized = "NotInitializedError"
    for rank, facts in enumerate(said):
        assert facts == {
            "rank": rank,
            "before": [uninitialized, uninitialized, False],
            "twice": [None, "AlreadyInitializedError"],
            "merged": [1, 3, 3.0],
            "stopped": ["b", "a"],
            "after": [uninitialized, False],
            "again": [3, 3.0],
            "part": [[0, 2], None, [1, 2]][rank],
        }
    assert len(said) == 3


def test_after_an_init_that_failed_the_next_one_works(tmp_path: Path) -> None:
    """A bad option that is found late, and one that only another learner has."""
    program = """
        import threading, torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.config import Config
        from tests.mpi.programs.learner import outcome, wrap
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        os.chdir(sys.argv[1])
        secret = "secret"

        def refused(**options):
            config = lambda: Config(super_learner_size=1, join_secret_file=secret, **options)
            error = outcome(lambda: hvd.init(config=config())).get("error")
            ends = time.monotonic() + 60
            while threads() and time.monotonic() < ends:
                time.sleep(0.01)
            return error, hvd.is_initialized(), threads()

        def threads():
            names = [thread.name for thread in threading.enumerate()]
            return [name for name in names if name in ("hvd_adpsgd.listener", "hvd_adpsgd.watching")]

        refusals = [
            refused(metrics_address="nowhere"),
            refused(metrics_address="no address" if rank == 1 else "127.0.0.1:0"),
        ]
        hvd.init(config=Config(super_learner_size=1, record="record", timeline="trace.json"))
        from mpi4py import MPI
        os.chdir("/")  # files named before stay where they are
        wrap(torch.nn.Linear(2, 2))
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        say(rank=rank, refusals=refusals, total=total, mpi=MPI.COMM_WORLD.allreduce(rank))
        hvd.shutdown()
    """
    result = run_learners(2, program, args=[str(tmp_path)]).checked()
    for rank in range(2):
        assert (tmp_path / f"trace.{rank}.json").exists()
        assert '"left"' in (tmp_path / "record" / f"{rank}.events.jsonl").read_text()
    assert "deleted" not in result.stderr
    for facts in result.by_rank():
        assert facts["refusals"] == [["ConfigError", False, []]] * 2, result.report()
        assert (facts["total"], facts["mpi"]) == (2.0, 1)


@pytest.mark.parametrize("how", ["spawn", pytest.param("forkserver", marks=pytest.mark.extended)])
def test_a_worker_that_imports_the_script_again_is_refused(how: str) -> None:
    """A script without `if __name__ == "__main__":`."""
    program = """
        import multiprocessing, torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        worker = multiprocessing.get_context(sys.argv[1]).Process(target=print)
        try:
            worker.start()
            worker.join()
            end = worker.exitcode
        except OSError as error:  # the fork server has ended
            end = type(error).__name__
        say(rank=hvd.rank(), end=end, total=hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
    """
    result = run_learners(1, program, args=[how]).checked()
    (facts,) = result.by_rank()
    assert facts["end"] != 0 and facts["total"] == 1.0, result.report()
    assert result.stderr.count("this is a child process of the learner with pid") == 1


def test_leaving_without_the_others_is_bounded_and_ends_nothing() -> None:
    """Learner 0 fails while learner 1 is busy: it leaves, learner 1 goes on and has the last word."""
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.config import Config
        hvd.init(config=Config(super_learner_size=1, leave_deadline_s=0.5))
        rank = hvd.rank()
        pid = hvd.broadcast_object(os.getpid(), root_rank=0)
        if rank == 0:
            began = time.monotonic()
            hvd.shutdown()
            say(rank=0, seconds=time.monotonic() - began)
            sys.exit(3)
        ends = time.monotonic() + 300
        gone = False
        while not gone and time.monotonic() < ends:
            gone = not os.path.exists(f"/proc/{pid}")
            time.sleep(0.01)
        say(rank=1, gone=gone, alone=hvd.allreduce(torch.tensor([7.0]), op=hvd.Sum).item())
        sys.exit(5)
    """
    result = run_learners(2, program)
    first, second = result.by_rank()
    assert first["seconds"] > 0.4
    assert second == {"rank": 1, "gone": True, "alone": 7.0}
    assert result.returncode == 5, result.report()


def test_operations_continue_without_a_learner_that_has_left(tmp_path: Path) -> None:
    """Learner 0 makes fewer steps and returns from shutdown(); its process stays until all are done."""
    program = """
        import pathlib, torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.config import Config
        from tests.mpi.programs.learner import outcome, step, wrap
        hvd.init(config=Config(super_learner_size=1, leave_deadline_s=0.5))
        rank, folder = hvd.rank(), pathlib.Path(sys.argv[1])
        model = torch.nn.Linear(10, 10)
        optimizer = wrap(model, averaging="periodic_averaging:period=1")
        one = lambda: step(model, optimizer, torch.ones(2, 10))
        steps = [outcome(one).get("error", "") for _ in range(2 if rank == 0 else 4)]
        if rank == 0:
            hvd.shutdown()
            ends = time.monotonic() + 100
            while len(list(folder.iterdir())) < 2 and time.monotonic() < ends:
                time.sleep(0.01)
            sys.exit()
        objects = hvd.allgather_object("x" * 2**20)  # a large message to learner 0, too
        sums = [hvd.allreduce(torch.full((300_000,), 1.0), op=hvd.Sum)[-1].item() for _ in range(3)]
        with hvd.on_failure("raise"):
            told = ": ".join(outcome(hvd.barrier).values())
        say(rank=rank, objects=len(objects), sums=sums, told=told, failed=hvd.failed_ranks(), steps=steps)
        (folder / str(rank)).touch()
    """
    result = run_learners(3, program, args=[str(tmp_path)]).checked()
    facts = {f["rank"]: f for f in result.said}
    assert sorted(facts) == [1, 2], result.report()
    for fact in facts.values():
        assert (fact["objects"], fact["sums"], fact["failed"]) == (2, [2.0] * 3, [])
        assert fact["steps"][:2] == ["", ""] and {*fact["steps"]} <= {"", "PeerFailedError"}
        assert fact["told"].startswith("PeerFailedError: barrier: learners [0] of 3 are gone")
    assert "are gone" not in result.stderr, "it has left in order"


def test_lost_learner_is_left_out_of_operations_over_all() -> None:
    program = """
        import signal, torch
        import hvd_adpsgd.torch as hvd
        from tests.mpi.programs.learner import outcome, wrap
        hvd.init()
        rank = hvd.rank()
        first = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sums = [hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() for _ in range(3)]
        lost = outcome(lambda: hvd.broadcast_object("x", root_rank=1)).get("error")
        one = outcome(lambda: wrap(torch.nn.Linear(2, 2), averaging="synchronous"))
        hvd.shutdown()
        say(rank=rank, first=first, sums=sums, lost=lost, one=list(one.values()))
    """
    env = {SIZE: "1", "HVD_ADPSGD_LEAVE_DEADLINE_S": "600"}  # nobody waits for that
    result = run_learners(4, program, env=env)
    said = result.by_rank()
    assert [facts["rank"] for facts in said] == [0, 2, 3], result.report()
    for facts in said:
        assert facts["first"] == 6.0
        assert facts["sums"] == [5.0] * 3
        assert facts["lost"] == "PeerFailedError"
        kind, text = facts["one"]
        assert kind == "WorldError" and "learners [1] of 4 have failed" in text, "no super learner"
    assert "learners [1] are gone" in result.stderr


def test_the_caller_chooses_what_is_done_without_the_lost() -> None:
    """Learner 0 dies: it is asked who saves now; operations go on, or raise on all that live."""
    program = """
        import signal, torch
        import hvd_adpsgd.torch as hvd
        from tests.mpi.programs.learner import outcome, wrap
        hvd.init()
        rank = hvd.rank()
        firsts = [hvd.is_coordinator()]
        hvd.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        ends = time.monotonic() + 60
        while not hvd.failed_ranks() and time.monotonic() < ends:
            time.sleep(0.01)
        firsts.append(hvd.is_coordinator())
        outcomes = []
        for what in ("raise", "continue", "raise"):
            with hvd.on_failure(what):
                sums = []
                add = lambda: sums.append(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item())
                outcomes.append(list(outcome(add).values()) or sums[0])
        object = hvd.broadcast_object(f"of {rank}", root_rank=None)
        model = torch.nn.Linear(1, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=None)
        say(rank=rank, lost=hvd.failed_ranks(), firsts=firsts, outcomes=outcomes, object=object)
    """
    result = run_learners(4, program, env={SIZE: "2"})
    said = result.by_rank()
    assert [facts["rank"] for facts in said] == [1, 2, 3], result.report()
    for facts in said:
        assert facts["lost"] == [0, 1], "a super learner has failed with any of its learners"
        assert facts["firsts"] == [False, facts["rank"] == 2]
        for kind, text in facts["outcomes"][::2]:
            assert kind == "PeerFailedError"
            assert "learners [0] of 4 are gone" in text
        assert facts["outcomes"][1] == 6.0
        assert facts["object"] == "of 1", "the first that lives"
