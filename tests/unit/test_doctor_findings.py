"""The doctor's judgements, one table each, and what it reads; no MPI is started here."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.launch.host_name import unresolved_host
from hvd_adpsgd.tools.doctor import findings as f
from hvd_adpsgd.tools.doctor import hosts, launch, probes
from hvd_adpsgd.tools.doctor.findings import FAIL, OK, WARN, Finding, Survival, Visit
from hvd_adpsgd.tools.doctor.probes import Answer
from tests.launcher import is_running, wait_for

MIB, GIB = 2**20, 2**30
ROOT = Path(__file__).resolve().parents[2]


def require(finding: Finding, level: str, *words: str) -> None:
    """The level, the words in what was found or in the cure, and a cure where one is needed."""
    assert finding.level == level, finding
    assert bool(finding.cure) == (level != OK), finding
    assert all(word in str(finding) for word in words), finding
    assert "\n" not in finding.found + finding.cure
    assert len(str(finding).splitlines()) == 1 + (level != OK)


INSIDE = {"torch": "2.13.0", "gloo": True, "nccl": False, "gpus": 0, "cuda": None}
OPEN_MPI_5 = "Open MPI v5.0.11, package: Open MPI x@y Distribution, ident: 5.0.11, repo rev: v5"
LOADED = {
    "torch": "2.13.0", "mpi": True, "files": ["/a/libmpi.so.40"], "gpus": 0, "nccl": False, "cuda": "12.8",
}  # fmt: skip
HERE = f.Here("/v/bin/python", "0.1.0", {"torch": "2.13.0"})
SAID = {
    "version": "0.1.0", "packages": {"torch": "2.13.0"}, "cores": 8,
    "free_bytes": 8 * GIB, "daemon": True,
}  # fmt: skip


def library(version: str) -> dict[str, str]:
    return {"version": version, "file": "/v/lib/libmpi.so.40"}


JUDGED = {  # arguments, level, and words of what was found or of the cure
    f.judge_package: [
        (("torch", "2.13.0+cpu"), OK, "torch", "2.13.0+cpu"),
        (("torch", None), FAIL, "torch", "pip install torch"),
        (("torch", "1.13.1"), FAIL, "torch", "2.0"),
        (("numpy", "1.9.0"), FAIL, "numpy", "1.26"),
        (("mpi4py", "3.1.6"), FAIL, "mpi4py", "4.0"),
        (("horovod", "0.28.1+adpsgd.kdc8c6052f378"), OK, "horovod"),
        (("horovod", "0.29.0"), WARN, "horovod", "0.28.1"),
        (("horovod", None), FAIL, "horovod", "build-horovod"),
        (("numpy", "unknown"), FAIL, "numpy", "1.26"),
        (("horovod", None, "torch"), OK),
        (("torch", None, "torch"), FAIL),
    ],
    f.judge_torch_inside: [
        ((INSIDE,), OK, "2.13.0"),
        (({"error": "ModuleNotFoundError: No module named 'cloudpickle'"},),
         FAIL, "cloudpickle", "[torch]"),
        (({**INSIDE, "gloo": False},), FAIL, "without Gloo"),
        (({**INSIDE, "gpus": 2},), WARN, "2 GPUs", "no CUDA"),
        (({**INSIDE, "gpus": 2, "cuda": "13.0"},), WARN, "no NCCL"),
        (({**INSIDE, "gpus": 2, "cuda": "13.0", "nccl": True},), OK),
    ],
    f.judge_mpi: [
        (("/v/mpirun", "mpirun (Open MPI) 5.0.11", library(OPEN_MPI_5)),
         OK, "/v/mpirun", "5.0.11", "libmpi"),
        (("/v/mpirun", "mpirun (Open MPI) 5.0.7", library(OPEN_MPI_5)), WARN, "5.0.7", "5.0.11"),
        (("/v/mpirun", "mpirun (Open MPI) 4.1.6", library(OPEN_MPI_5)), FAIL, "4.1.6", "5.0.11"),
        (("/v/mpirun", "HYDRA build details:\n Version: 5.0.11", library(OPEN_MPI_5)), FAIL, "MPICH"),
        (("/v/mpirun", "what?", library(OPEN_MPI_5)), FAIL, "no known MPI"),
        ((None, "", library(OPEN_MPI_5)), FAIL, "no mpirun on PATH", "Open MPI 5.0.11"),
        (("/v/mpirun", "mpirun (Open MPI) 5.0.11", library("Home-made 1\nmore")), FAIL, "Home-made 1"),
        (("/v/mpirun", "", {"error": "No module named 'mpi4py'"}), FAIL, "named 'mpi4py'", "openmpi"),
    ],
    f.judge_ulfm_on: [
        (({"flags": ["-mca pml ob1", "--with-ft ulfm"]},), OK),
        (({"flags": ["-mca pml ob1", "-mca btl ^openib"]},), WARN, "--mpi-args=", "pml ob1"),
        (({"flags": None},), FAIL, "mpirun"),
        (({"error": "ImportError: on purpose"},), FAIL, "on purpose", "build-horovod"),
    ],
    f.judge_options: [((0, None), OK, "none"), ((2, None), OK, "2 set")],
    f.judge_home: [(({"HOME": "/"},), OK), (({},), FAIL, "mpirun does not start", "Set HOME")],
    f.judge_host_name: [
        (("vm", ""), OK), (("vm", "vm"), WARN, "no IPv4 address", "/etc/hosts"),
    ],
    f.judge_threads: [
        (({"level": "MPI_THREAD_MULTIPLE"}, {}), OK, "MPI_THREAD_MULTIPLE"),
        (({"level": "MPI_THREAD_SINGLE"}, {"MPI4PY_RC_THREAD_LEVEL": "single"}),
         FAIL, "MPI_THREAD_SINGLE", "Unset MPI4PY_RC_THREAD_LEVEL."),
        (({"level": "MPI_THREAD_SERIALIZED"}, {}), FAIL, "SERIALIZED", "thread support"),
        (({"error": "ended by SIGABRT"}, {}), FAIL, "SIGABRT"),
    ],
    f.judge_ulfm_compiled: [
        (("ompi:version:full:5.0.11\noptions:ft_mpi_support:yes\n",), OK),
        (("options:ft_mpi_support:no\n",), WARN),
        (("x:options:ft_mpi_support:yes\n",), WARN),
        (("",), WARN),
        ((None,), WARN),
    ],
    f.judge_horovod: [
        ((LOADED,), OK, "2.13.0"),
        (({**LOADED, "files": []},), OK),
        (({**LOADED, "files": ["/a/libmpi.so.40", "/b/libmpi.so.12"]},),
         FAIL, "/a/libmpi.so.40, /b/libmpi.so.12"),
        (({**LOADED, "mpi": False},), FAIL, "without MPI", "build-horovod"),
        (({**LOADED, "gpus": 2},), FAIL, "2 GPUs", "HOROVOD_GPU_OPERATIONS=NCCL"),
        (({**LOADED, "gpus": 2, "cuda": None},), WARN, "2 GPUs", "no CUDA"),
        (({**LOADED, "gpus": 2, "nccl": True},), OK),
        (({"error": "ModuleNotFoundError: No module named 'torch'"},), FAIL, "said above"),
        (({"error": "undefined symbol: _ZN3c10"},), FAIL, "_ZN3c10", "build-horovod"),
    ],
    f.judge_extension: [
        (({"modules": ["_engine"]},), OK, "_engine"),
        (({"error": "No module named '_engine'"},), FAIL, "_engine", "make build"),
    ],
    f.judge_memory: [
        ((65 * MIB, 1, False), OK, "a float32 model of 22 MiB"),
        ((64 * MIB - 1, 1, False), FAIL, "64 MiB", "SUPER_LEARNER_SIZE=1"),
        ((MIB, 1, True), OK, "1 MiB free"),
        ((100 * MIB, 4, False), OK, "a float32 model of 8 MiB"),
        ((8 * GIB, 4, False), OK, "8.0 GiB"),
        (("no file can be made there", 1, False), FAIL, "no file can be made there"),
    ],
    f.judge_cores: [
        ((2.0, None), OK, "2 usable"),
        ((1.5, 2), WARN, "1.5 usable for 2 learners"),
        ((2.0, 3), WARN, "Start fewer"),
    ],
    f.judge_host: [
        ((Visit("a", 4, local=True), HERE), OK, "host a", "this host"),
        ((Visit("a", 4, said=SAID), HERE), OK, "host a", "ssh works", "8 cores for 4"),
        ((Visit("a", 4, status=None, error="not done after 9 s"), HERE),
         FAIL, "host a", "not done after 9 s"),
        ((Visit("a", 4, status=None), HERE), FAIL, "host a", "no answer in time"),
        ((Visit("a", 4, status=255, error="Connection refused"), HERE),
         FAIL, "host a", "refused", "ssh-copy-id"),
        ((Visit("a", 4, status=127, error="not found"), HERE), FAIL, "host a", "no /v/bin/python there"),
        ((Visit("a", 4, status=1, error="No module named 'hvd_adpsgd'"), HERE),
         FAIL, "host a", "No module"),
        ((Visit("a", 4, said={**SAID, "version": "0.2.0"}), HERE),
         FAIL, "host a", "0.2.0 there, 0.1.0 here"),
        ((Visit("a", 4, said={**SAID, "packages": {}}), HERE), FAIL, "host a", "torch missing there"),
        ((Visit("a", 4, said={**SAID, "packages": {"torch": "2.12.0"}}), HERE),
         WARN, "host a", "torch 2.12.0 there, 2.13.0 here"),
        ((Visit("a", 4, said={**SAID, "daemon": False}), HERE), WARN, "host a", "prted"),
        ((Visit("a", 9, said=SAID), HERE), WARN, "host a", "at most 8 slots"),
        ((Visit("a", 4, said={**SAID, "free_bytes": MIB}), HERE), WARN, "host a", "1 MiB free", "/dev/shm"),
    ],
    f.judge_launch: [
        ((Survival(2, True, True, 1, 9.0), True), OK, "2 learners", "9 s"),
        ((Survival(5, True, True, 4, 9.0), False), OK, "4 went on"),
        ((Survival(2, True, True, 1, 60.0, "not done after 60 s"), True), OK),
        ((Survival(2, True, True, None, 9.0, "mpirun: killed"), True), FAIL, "mpirun: killed"),
        ((Survival(2, True, True, None, 9.0), False), WARN, "did not go on"),
        ((Survival(2, True, True, 2, 9.0), True), FAIL, "did not go on"),
        ((Survival(5, True, True, 1, 9.0), True), FAIL, "did not go on"),
        ((Survival(2, True, False, 1, 9.0), True), FAIL, "did not go on"),
        ((Survival(2, False, False, None, 9.0, "no horovodrun"), True), FAIL, "no horovodrun"),
        ((Survival(2, False, False, 1, 9.0, "what"), False), FAIL, "did not start"),
        ((Survival(2, True, True, 1, 9.0, launcher="run -n"), True), OK, "2 learners started"),
        ((Survival(2, True, True, None, 9.0, launcher="run -n"), True), FAIL, "run -n 2 python"),
        ((Survival(2, False, False, 1, 9.0, "what", "run -n"), True), FAIL, "run -n 2 python -c"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("judge", "row"),
    [
        pytest.param(judge, row, id=f"{judge.__name__}-{number}")
        for judge, rows in JUDGED.items()
        for number, row in enumerate(rows)
    ],
)
def test_judgement(judge, row):
    arguments, level, *words = row
    require(judge(*arguments), level, *words)
    if judge is f.judge_ulfm_on:
        assert f.switches_ulfm_on(*arguments) == (level == OK)


MPICH_4 = "MPICH Version:      4.2.0\nMPICH Release date: Fri Feb  9 12:29:21 CST 2024"
INTEL = "Intel(R) MPI Library 2021.11 for Linux* OS"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN_MPI_5, ("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", ("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 5.1.0rc1", ("Open MPI", "5.1.0")),
        (MPICH_4, ("MPICH", "4.2.0")),
        ("HYDRA build details:\n    Version:           4.2.0\n", ("MPICH", "4.2.0")),
        (INTEL, ("Intel MPI", "2021.11")),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023",
            ("Intel MPI", "2021.11"),
        ),
        ("slurm 23.02", None),
        ("", None),
    ],
)
def test_read_mpi(text, expected):
    assert f.read_mpi(text) == expected


def test_the_options_are_those_of_the_documentation():
    page = " ".join((ROOT / "docs" / "launching.md").read_text().split())
    for option in f.ULFM_OPTIONS:
        name, _, value = option.partition("=")
        assert f'{name}="{value}"' in page
        assert f'{name}="{value}"' in f.judge_ulfm_on({"flags": []}).cure


def test_survival_is_read_from_marked_lines():
    out = (
        '[1,0]<stdout>: @doctor {"rank": 0, "together": 2}\n@doctor {"rank": 1, "together": 2}\n'
        '[1,1]<stdout>: @doctor {"rank": 1, "killed": true}\nnoise\n'
        '[1,0]<stdout>: @doctor {"rank": 0, "alive": 1}\n'
    )
    answer = Answer(137, out, "", 5.0)
    assert launch.parse_survival(2, answer) == Survival(2, True, True, 1, 5.0, "exit status 137")
    assert not launch.parse_survival(3, answer).together


@pytest.mark.parametrize(
    ("err", "error"),
    [
        ("Traceback\nLaunchError: so it is.\nmpirun noticed\n", "LaunchError: so it is."),
        ("mpirun noticed\n\n", "mpirun noticed"),
        ("", "exit status 1"),
    ],
)
def test_survival_that_never_came(err, error):
    """What others than learner 0 say does not count."""
    out = '@doctor {"rank": 1, "together": 2}\n@doctor {"rank": 1, "alive": 1}'
    survival = launch.parse_survival(2, Answer(1, out, err, 5.0))
    assert survival == Survival(2, False, False, None, 5.0, error)


@pytest.mark.parametrize(
    "text", ["", "node1", "node1:", "a:4,", "fd00::1:4", "a b:1", "a:-1", "a:1x", "a:1 b:1"]
)
def test_hosts_that_horovod_refuses(text):
    with pytest.raises(ConfigError, match="-H"):
        hosts.read_hosts(text)


def test_a_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("node1 slots=4\nnode2  slots=2  \n")
    assert hosts.read_hostfile(str(file)) == [("node1", 4), ("node2", 2)]


@pytest.mark.parametrize(
    "line", ["", "# all", "node2", "node2 slots=", "node2 slots=two", "node2 slots=2 max_slots=4"]
)
def test_a_hostfile_that_horovod_refuses(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(f"node1 slots=4\n{line}\nnode3 slots=1\n")
    with pytest.raises(ConfigError, match="line 2") as problem:
        hosts.read_hostfile(str(file))
    require(f.judge_problem("hosts", str(problem.value)), FAIL, "line 2", "NAME slots=N")


def test_a_hostfile_that_is_none(tmp_path):
    file = tmp_path / "hosts"
    for content in (None, b"", b"\xff\xfe"):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError) as problem:
            hosts.read_hostfile(str(file))
        require(f.judge_problem("hosts", str(problem.value)), FAIL, str(file))


@pytest.mark.parametrize(
    ("name", "local"),
    [("localhost", True), ("127.0.0.1", True), ("203.0.113.1", False), ("no-such.invalid", False)],
)
def test_which_host_is_this_one(name, local):
    assert hosts.is_local(name) is local


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path):
    """A child of the program, in its group, is gone as well, and what was said is kept."""
    began = time.monotonic()
    answer = probes.bounded(["sh", "-c", "sleep 600 & echo $!; wait"], 1)
    assert time.monotonic() - began < 60
    assert (answer.status, answer.error) == (None, "not done after 1 s")
    wait_for(lambda: not is_running(int(answer.out)), "the end of the child")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("say(a=1)", {"a": 1}),
        ("print('banner'); say(a=1); print('more')", {"a": 1}),
        (
            "import no_such_module",
            {"error": "ModuleNotFoundError: No module named 'no_such_module'"},
        ),
        ("import os; os._exit(3)", {"error": "exit status 3"}),
        (f"import os; os.kill(os.getpid(), {signal.SIGSEGV:d})", {"error": "ended by SIGSEGV"}),
    ],
)
def test_ask(code, expected):
    assert probes.ask(code, 60) == expected


def test_a_program_that_is_not_there():
    answer = probes.bounded(["/no/such/program"], 5)
    assert answer.status is None
    assert "/no/such/program" in answer.error


def test_programs_belong_to_no_job(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("OMPI_MCA_btl", "self")
    monkeypatch.setenv("HVD_ADPSGD_TIMELINE", "x")
    seen = probes.environment({"HVD_ADPSGD_TIMELINE": None, "NEW": "1"})
    assert not {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "HVD_ADPSGD_TIMELINE"} & set(seen)
    assert seen["OMPI_MCA_btl"] == "self"
    assert seen["NEW"] == "1"


def test_shared_memory_that_is_not_there(tmp_path):
    assert "No such file" in str(probes.shared_memory(str(tmp_path / "none")))


def test_it_loads_nothing_but_the_standard_library():
    """-S: no site-packages, so torch, numpy, mpi4py and Horovod are missing."""
    code = (
        "import json, sys\nimport hvd_adpsgd.__main__\nimport hvd_adpsgd.tools.doctor\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted(tops - set(sys.stdlib_module_names) - {'hvd_adpsgd'})))\n"
    )
    command, env = [sys.executable, "-S", "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert answer.returncode == 0, answer.stderr
    assert set(json.loads(answer.stdout)) <= {"__main__"}


def test_the_name_of_the_host_is_needed_without_mpi(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    assert unresolved_host() == "no-such-host.invalid"


@pytest.mark.parametrize(
    ("quota", "most"), [("150000 100000", 1.5), ("max 100000", math.inf), ("", math.inf)]
)
def test_cores_are_those_that_a_container_may_use(
    tmp_path: Path, quota: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "cpu.max").write_text(quota)
    assert probes.usable_cores(str(tmp_path / "cpu.max")) == min(3, most)
