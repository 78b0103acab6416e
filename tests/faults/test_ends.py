"""Promise 6: every run ends, and no process is left."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launcher import environment, is_running, needs_horovod_inside, run_learners, wait_for

pytestmark = pytest.mark.mpi

# Promised are 10 s, on a machine that does nothing else. Whoever waits for a deadline waits 30 s or more.
ENDS_S = 25.0
GONE_S = 60.0  # then no process is left

SCRIPT = """
    import signal, torch
    import hvd_adpsgd.torch as hvd
    hvd.init()
    rank, how = hvd.rank(), sys.argv[1]
    say(rank=rank, pid=os.getpid())
    model = torch.nn.Linear(1000, 100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()
    steps = 10 if how == "uneven" and rank == 1 else 300
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 1000)).pow(2).mean().backward()
        optimizer.step()
        if how == "interrupt":
            time.sleep(0.2)  # until the test interrupts
        if how == "uneven" and rank != 1:
            time.sleep(5e-3)  # a gradient
    ends = time.monotonic() + 60
    while how == "uneven" and rank != 1 and hvd.metrics()["peers"][2 - rank] < 20:
        assert time.monotonic() < ends, "learners 0 and 2 do not go on with each other"
        optimizer.zero_grad()
        model(torch.ones(4, 1000)).pow(2).mean().backward()
        optimizer.step()
    say(rank=rank, done=time.monotonic(), steps=steps)
    if how == "uneven":
        hvd.shutdown()
"""


@pytest.mark.parametrize("how", ["uneven", "no_shutdown"])
def test_every_run_ends(how: str) -> None:
    """Soon after the last learner is done, and no process is left."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    result = run_learners(3, SCRIPT, args=[how], env=env, fresh=True).checked()
    ended = time.monotonic()
    said = result.by_rank()
    assert len(said) == 3, result.report()
    done = [facts["done"] for facts in said if "done" in facts]
    assert len(done) == 3, result.report()
    assert ended - max(done) < ENDS_S, result.report()
    if how == "uneven":
        assert [facts["steps"] for facts in said] == [300, 10, 300]
    wait_for(
        lambda: not any(is_running(facts["pid"]) for facts in said), "all processes ended", GONE_S
    )


def test_interrupted_run_ends(tmp_path: Path) -> None:
    """SIGINT to the launcher, as of Ctrl-C."""
    script = SCRIPT.replace("say(rank=rank, pid=os.getpid())", INTRODUCE)
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"}
    with ThreadPoolExecutor(1) as pool:
        args = ["interrupt", str(tmp_path)]
        run = pool.submit(run_learners, 3, script, args=args, env=env, fresh=True)
        files = wait_for(
            lambda: [*tmp_path.glob("*.started")][2:] and [*tmp_path.iterdir()], "start", 200
        )
        pids = [int(file.stem) for file in files]
        time.sleep(1.0)  # in the middle of training
        os.kill(int(files[0].read_text()), signal.SIGINT)
        interrupted = time.monotonic()
        result = run.result()
    assert time.monotonic() - interrupted < ENDS_S, result.report()
    assert result.returncode != 0, result.report()
    wait_for(lambda: not any(is_running(pid) for pid in pids), "all processes ended", GONE_S)


FREES = r"""
    #include <mpi.h>
    #include <stdio.h>
    #include <unistd.h>
    int MPI_Comm_free(MPI_Comm *comm) {
        fprintf(stderr, "MPI_Comm_free on %s thread\n", gettid() == getpid() ? "the main" : "another");
        return PMPI_Comm_free(comm);
    }
"""


@needs_horovod_inside("its background loop")
@pytest.mark.parametrize(
    "fails",
    [
        pytest.param(False, marks=pytest.mark.extended, id="shutdown"),
        pytest.param(True, id="error"),
    ],
)
def test_horovod_frees_no_communicator_when_its_loop_ends(tmp_path: Path, fails: bool) -> None:
    """Open MPI may be walking them on another thread, to tell of a process that has failed: a SIGSEGV."""
    source, library = tmp_path / "frees.c", tmp_path / "frees.so"
    source.write_text(textwrap.dedent(FREES))
    mpicc = str(Path(sys.executable).with_name("mpicc"))
    compiler = mpicc if os.path.exists(mpicc) else shutil.which("mpicc") or pytest.skip("no mpicc")
    command = [compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    program = """
        import signal
        import hvd_adpsgd.torch as hvd, torch
        hvd.init()
        hvd.allreduce(torch.ones(2), process_set=hvd.super_learner)
        if sys.argv[1] == "True":
            if hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                while True:
                    hvd.allreduce(torch.ones(2), process_set=hvd.super_learner)
            except Exception as error:
                print(f"saw {type(error).__name__}", file=sys.stderr)
        hvd.shutdown()
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", "HVD_ADPSGD_LEAVE_DEADLINE_S": "2"}
    preloaded = {**env, "LD_PRELOAD": str(library)}
    result = run_learners(2, program, args=[str(fails)], env=preloaded, fresh=True)
    assert ("MPI_Comm_free on the main thread" in result.stderr) != fails, result.report()
    assert ("background loop uncaught exception" in result.stderr) == fails, result.report()
    assert "MPI_Comm_free on another thread" not in result.stderr, result.report()


def test_a_signal_to_horovodrun_ends_the_job(tmp_path: Path) -> None:
    """SIGTERM to the process that was started, as of a scheduler, `timeout` or Popen.terminate()."""
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "-c"]
    if shutil.which(command[0]) is None:
        pytest.skip("horovodrun is not installed")
    program = (
        "import os, pathlib, time, hvd_adpsgd.torch as hvd; hvd.init(); "
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(100)"
    )
    env = environment({"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1"})
    with subprocess.Popen([*command, program], env=env, start_new_session=True) as job:
        try:
            wait_for(lambda: len([*tmp_path.iterdir()]) == 2, "start", 200)
            pids = [int(file.name) for file in tmp_path.iterdir()]
            job.terminate()
            assert job.wait(GONE_S) != 0
            wait_for(
                lambda: not any(is_running(pid) for pid in pids), "all processes ended", GONE_S
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


# each learner leaves its pid, and that of the launcher, once it is set up
INTRODUCE = """
    import pathlib
    pathlib.Path(sys.argv[2], "new%d" % rank).write_text(str(os.getppid()))
    pathlib.Path(sys.argv[2], "new%d" % rank).rename(f"{sys.argv[2]}/{os.getpid()}.started")
"""
