"""The same script under each launcher: with MPI, and without it."""

import json
from pathlib import Path

import pytest

from tests.launcher import run_learners

PROGRAM = Path(__file__).parent / "programs" / "core.py"
OF_TWO = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}


@pytest.mark.parametrize(
    ("launcher", "wire"),
    [
        ("srun", "auto"),
        ("torchrun", "auto"),
        ("mpirun", "tcp"),
        pytest.param("gloo", "auto", marks=pytest.mark.extended),
        pytest.param("mpirun", "auto", marks=pytest.mark.extended),
    ],
)
def test_a_script_sees_the_same(launcher: str, wire: str) -> None:
    env = {**OF_TWO, "HVD_ADPSGD_WIRE": wire}
    facts = run_learners(4, PROGRAM, env=env, launcher=launcher).checked().by_rank()
    assert [f["has_mpi"] for f in facts] == [launcher == "mpirun"] * 4
    for rank, fact in enumerate(facts):
        assert fact["places"] == {
            "rank": rank,
            "size": 4,
            "local_rank": rank,
            "local_size": 4,
            "cross_rank": 0,
            "cross_size": 1,
            "super_rank": rank // 2,
            "super_size": 2,
            "is_leader": rank % 2 == 0,
        }
        assert fact["operations"] == {
            "sum": [10.0] * 3,
            "large": pytest.approx(10 * 300_000 * 299_999 / 2, rel=1e-6),
            "gathered": [2.0, 3.0, 3.0, 4.0, 4.0, 4.0],
            "objects": [{"rank": i} for i in range(4)],
            "broadcast": [2],
            "later": [4.0] * 3,
            "inner": [3.0 if rank < 2 else 7.0] * 3,
        }
        for averaging in ("random_pairs", "delay_by_one"):
            assert fact[averaging]["drift"] < 1e-6
            assert fact[averaging]["same_inside"] and fact[averaging]["same_mean"]
        assert fact["again"] == 4.0
        assert fact["forked"] == 0
    assert sum(f["random_pairs"]["averagings"] for f in facts) > 0
    assert sum(f["delay_by_one"]["averagings"] for f in facts) > 0


TRAINS_ON = """
    import signal
    import torch
    import hvd_adpsgd
    import hvd_adpsgd.torch as hvd
    hvd.init()
    victim, how, steps = int(sys.argv[1]), sys.argv[2], 60
    model = torch.nn.Linear(50, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    try:
        for step in range(steps):
            if hvd.rank() == victim and step == steps // 2:
                if how == "exception":
                    raise RuntimeError("of the script")
                os.kill(os.getpid(), getattr(signal, how))
            optimizer.zero_grad()
            model(torch.ones(4, 50)).sum().backward()
            optimizer.step()
            time.sleep(5e-3)
        total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
        say(rank=hvd.rank(), total=total, failed=list(hvd.failed_ranks()))
    except hvd_adpsgd.LearnerFailedError as error:
        say(rank=hvd.rank(), lost=str(error))
        raise
"""


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (2, "SIGKILL"),
        *(
            pytest.param(victim, how, marks=pytest.mark.extended)
            for victim, how in ((0, "SIGKILL"), (1, "SIGKILL"), (3, "SIGSEGV"), (0, "exception"))
        ),
    ],
)
def test_without_mpi_a_failed_learner_takes_its_super_learner_only(victim: int, how: str) -> None:
    """No ULFM, and no launcher that ends the others: as srun --no-kill, ssh per host, pods."""
    args, env = [str(victim), how], {**OF_TWO, "HVD_ADPSGD_LEAVE_DEADLINE_S": "2"}
    result = run_learners(4, TRAINS_ON, args=args, env=env, launcher="srun")
    assert result.returncode != 0, result.report()
    gone = {0, 1} if victim < 2 else {2, 3}
    facts = {f["rank"]: f for f in result.said}
    assert set(facts) >= set(range(4)) - {victim}, result.report()
    for rank in set(range(4)) - gone:
        assert facts[rank]["total"] == sum(set(range(4)) - gone), result.report()
        assert facts[rank]["failed"] == sorted(gone)
    for mate in gone - {victim}:
        if how == "exception":
            assert "has ended its training" in facts[mate]["lost"]
            continue
        assert "train on without it" in facts[mate]["lost"]
        assert "unless its script calls hvd.admit" in facts[mate]["lost"]
    assert result.stderr.count("Training continues without it") == 1, result.report()


CUTS = """
    import contextlib, socket
    import torch
    import hvd_adpsgd.torch as hvd

    def cut():
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET:
                    end.getpeername()  # not a listener
                    end.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    hvd.init()
    rank, size, count = hvd.rank(), hvd.size(), 0
    model = torch.nn.Linear(300, 200)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters()
    )
    exchanges = 0
    while exchanges < 20:
        for step in range(30):
            if step % 10 == 3 * rank:
                count += cut()
            optimizer.zero_grad()
            model(torch.ones(4, 300)).sum().backward()
            optimizer.step()
            time.sleep(5e-3)
        exchanges = hvd.allreduce(torch.tensor([hvd.metrics()["exchanges"]]), op=hvd.Sum).item()
    count += cut()
    with hvd.averaged(model):
        mean = model.weight.double()
        error = (mean - (size - 1) / 2).abs().max().item()
    count += cut()
    sum_of_ranks = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item()
    facts = {"failed": list(hvd.failed_ranks()), "leads": hvd.is_coordinator(), "sum": sum_of_ranks}
    say(rank=rank, cuts=count, error=error, **facts)
"""


@pytest.mark.parametrize("same_host", ["memory", pytest.param("mpi", marks=pytest.mark.extended)])
def test_connections_that_end_between_living_learners_split_no_job(same_host: str) -> None:
    """As a firewall or a NAT ends them: all connections of each learner in turn, many times."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "ADPSGD_SAME_HOST": same_host}
    result = run_learners(3, CUTS, env=env, launcher="srun").checked()
    for rank, fact in enumerate(result.by_rank()):
        assert fact["cuts"] > 0
        assert fact["failed"] == [] and fact["sum"] == 3.0, result.report()
        assert fact["leads"] == (rank == 0)
        assert fact["error"] < 1e-6
    assert "has failed" not in result.stderr, result.report()


QUORUM = """
    import signal
    import torch
    import hvd_adpsgd
    import hvd_adpsgd.torch as hvd
    hvd.init()
    victims, steps, ends = json.loads(sys.argv[1]), int(sys.argv[2]), time.monotonic() + 60
    model = torch.nn.Linear(50, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    digest = lambda: float(sum(p.detach().double().sum() for p in model.parameters()))
    before, step = digest(), 0
    try:
        for step in range(steps):
            assert time.monotonic() < ends
            if hvd.rank() in victims and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            before = digest()
            optimizer.zero_grad()
            model(torch.ones(4, 50)).sum().backward()  # with several learners it raises here
            optimizer.step()
            time.sleep(5e-3)
        say(rank=hvd.rank(), done=True)
    except hvd_adpsgd.QuorumLostError:
        say(rank=hvd.rank(), step=step, whole=digest() == before)
    except hvd_adpsgd.LearnerFailedError:
        pass
"""


@pytest.mark.parametrize(
    ("victims", "learners", "size"),
    [
        ([1, 2], 3, 1),
        pytest.param([1], 3, 1, marks=pytest.mark.extended),
        pytest.param([1], 2, 1, marks=pytest.mark.extended),
        pytest.param([3, 4], 6, 2, marks=pytest.mark.extended),
    ],
)
def test_a_minority_stops_where_a_quorum_is_asked_for(
    victims: list[int], learners: int, size: int
) -> None:
    env = {
        "HVD_ADPSGD_QUORUM": "majority",
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size),
        "HVD_ADPSGD_LEAVE_DEADLINE_S": "2",
    }
    gone = {victim // size for victim in victims}
    goes_on = 2 * len(gone) < learners // size
    args = [json.dumps(victims), "400" if goes_on else str(10**9)]
    result = run_learners(learners, QUORUM, args=args, env=env, launcher="srun")
    others = [rank for rank in range(learners) if rank // size not in gone]
    facts = {f["rank"]: f for f in result.said}
    assert sorted(facts) == others, result.report()
    if goes_on:
        assert all(f.get("done") for f in facts.values()), result.report()
        return
    assert all(f.get("whole") for f in facts.values()), result.report()
    assert len({f["step"] for f in facts.values()}) == 1, result.report()


@pytest.mark.extended
def test_a_super_learner_is_a_node_of_slurm() -> None:
    """Also where Slurm has several nodes on one host."""
    program = """
        rank = int(os.environ["SLURM_PROCID"])
        os.environ["SLURM_NODEID"] = str(rank // 2)
        import hvd_adpsgd.torch as hvd
        hvd.init()
        say(rank=rank, places=[hvd.super_rank(), hvd.super_size(), hvd.local_rank(), hvd.local_size()])
    """
    facts = run_learners(4, program, launcher="srun").checked().by_rank()
    assert [f["places"] for f in facts] == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]


@pytest.mark.parametrize("left", [[0, 1], pytest.param([0], marks=pytest.mark.extended)])
def test_operations_of_a_minority_are_errors_on_all_that_are_left(left: list[int]) -> None:
    """The one that finds the others gone, and each later one; with a majority they go on."""
    program = """
        import signal
        import torch
        import hvd_adpsgd
        import hvd_adpsgd.torch as hvd
        hvd.init()
        left, told = json.loads(sys.argv[1]), []
        hvd.barrier()
        if hvd.rank() not in left:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            try:
                told.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            except hvd_adpsgd.QuorumLostError as error:
                told.append(str(error))
        say(rank=hvd.rank(), told=told)
    """
    env = {
        "HVD_ADPSGD_QUORUM": "majority",
        "HVD_ADPSGD_SUPER_LEARNER_SIZE": "1",
        "HVD_ADPSGD_LEAVE_DEADLINE_S": "2",
    }
    args = [json.dumps(left)]
    result = run_learners(3, program, args=args, env=env, launcher="srun")
    assert sorted(f["rank"] for f in result.said) == left, result.report()
    for fact in result.said:
        if len(left) == 1:
            assert all("only learners [0] of 3 are left" in told for told in fact["told"][1:])
        else:
            assert fact["told"][1:] == [2.0, 2.0]
            assert fact["told"][0] in (2.0, 3.0)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "inner"), [("KILL", "horovod"), ("STOP", "torch"), ("STOP", "horovod")]
)
def test_horovodrun_of_this_build_lets_the_others_train_on(how: str, inner: str) -> None:
    """With Gloo; the status of the command is that of the first surviving learner."""
    env = {**OF_TWO, "HVD_ADPSGD_INNER": inner, "HVD_ADPSGD_FAILURE_TIMEOUT_S": "10"}
    result = run_learners(4, TRAINS_ON, args=["2", f"SIG{how}"], env=env, launcher="gloo")
    assert result.returncode == 75, result.report()
    facts = {f["rank"]: f for f in result.said}
    assert [facts[rank]["total"] for rank in (0, 1)] == [1.0, 1.0], result.report()
    assert "train on without it" in facts[3]["lost"]


@pytest.mark.extended
def test_horovodrun_ends_a_job_that_has_not_begun() -> None:
    """As Horovod does: a learner that fails before all have met would be waited for."""
    program = """
        import hvd_adpsgd.torch as hvd
        if os.environ["HOROVOD_RANK"] == "1":
            sys.exit(3)
        hvd.init()
        say(rank=hvd.rank())
    """
    result = run_learners(3, program, launcher="gloo")
    assert result.returncode != 0
    assert result.said == []
    assert "Terminating remaining workers" in result.stdout + result.stderr


@pytest.mark.parametrize("launcher", ["srun", pytest.param("gloo", marks=pytest.mark.extended)])
def test_without_mpi_process_sets_are_made_at_run_time(launcher: str) -> None:
    """In a job of one super learner, which is plain Horovod: it connects the set's learners anew."""
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        pair = hvd.add_process_set([0, 2])
        total = None
        if hvd.rank() != 1:
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="of two", process_set=pair).item()
        everyone = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="of all").item()
        say(rank=hvd.rank(), total=total, all=everyone)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "3", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    facts = run_learners(3, program, env=env, launcher=launcher).checked().by_rank()
    assert [f["total"] for f in facts] == [2.0, None, 2.0]
    assert [f["all"] for f in facts] == [3.0] * 3


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        pytest.param("srun", "nothing of learners [1] at the store", marks=pytest.mark.extended),
        ("mpirun", "MPI_Init has not returned in HVD_ADPSGD_START_TIMEOUT_S=2 s"),
    ],
)
def test_a_learner_that_does_not_come_is_an_error_on_the_others(launcher: str, words: str) -> None:
    """MPI_Init, in which the others wait, has no time limit of its own."""
    program = """
        import hvd_adpsgd
        import hvd_adpsgd.torch as hvd
        rank = int(os.environ.get("SLURM_PROCID") or os.environ["OMPI_COMM_WORLD_RANK"])
        if rank == 1:
            os._exit(0)
        try:
            hvd.init()
        except hvd_adpsgd.LaunchError as error:
            say(rank=rank, text=str(error))
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            try:
                hvd.init()
            except hvd_adpsgd.WorldError as error:
                say(rank=rank, again=str(error))
    """
    env = {"HVD_ADPSGD_START_TIMEOUT_S": "2"}
    result = run_learners(3, program, env=env, launcher=launcher).checked()
    first, last = (f["text"] for f in result.by_rank())
    assert words in first, result.report()
    assert words in last, result.report()
    for facts in result.by_rank() if launcher == "mpirun" else ():
        assert "left behind in MPI_Init, which waits for processes of the job" in facts["again"]
        assert "Start the job again." in facts["again"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HVD_ADPSGD_WIRE": "mpi"}, ("MPI does not join", "horovodrun --mpi")),
        ({"HVD_ADPSGD_NICS": "none7"}, ("HVD_ADPSGD_NICS=none7", "is up and has an address")),
        ({"COMM": "1"}, ("init(comm=...)", "srun")),
    ],
)
def test_without_mpi_errors_are_those_of_all(env: dict[str, str], words: tuple[str, ...]) -> None:
    program = """
        import hvd_adpsgd
        import hvd_adpsgd.torch as hvd
        try:
            hvd.init(comm=[0, 1, 2] if "COMM" in os.environ else None)
        except hvd_adpsgd.AdpsgdError as error:
            say(rank=int(os.environ["SLURM_PROCID"]), text=str(error))
    """
    result = run_learners(3, program, env=env, launcher="srun").checked()
    assert len(result.said) == 3, result.report()
    for fact in result.said:
        assert all(word in fact["text"] for word in words), result.report()
