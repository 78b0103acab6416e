"""What setup.py, the requirement files, workflows and the version say."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import hvd_adpsgd

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The sources alone, without anything built in place."""
    tree = tmp_path_factory.mktemp("tree")
    built = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("hvd_adpsgd", "ext"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=built)
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    return tree


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PATH": beside, **environment},
        capture_output=True,
        text=True,
    )


def test_other_flags_compile_a_module_again(tmp_path):
    """setuptools compares times of sources only; here with a module of one line."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    for folder in ("ext/c", "ext/hvd_adpsgd/part", "hvd_adpsgd/part"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ext/c/some.c").write_text("int adpsgd_some;\n")
    (tmp_path / "ext/hvd_adpsgd/part/tiny.pyx").write_text(
        "# cython: language_level=3\nVALUE = 1\n"
    )
    found = []
    for flags in ("-DONE", "-DONE", "-g"):
        command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
        built = run(*command, cwd=tmp_path, CFLAGS=flags)
        assert built.returncode == 0, built.stderr
        (module,) = (tmp_path / "hvd_adpsgd" / "part").glob("tiny.*.so")
        found.append((module.stat().st_mtime_ns, module.stat().st_size))
    assert found[0] == found[1]
    assert found[1][1] < found[2][1], "with debugging information"


def imported(path: Path) -> set[str]:
    """Names of the packages, but for the standard library, that a module imports at its top."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names)


def test_what_training_imports_is_a_dependency():
    """Torch, and what runs inside super learners, are there already; views and integrations are extras."""
    extras = {"integrations", "tools"}
    of_views = {"prometheus_client"}
    found = {"hvd_adpsgd": set()}
    for path in sorted((ROOT / "hvd_adpsgd").rglob("*.py")):
        part = path.relative_to(ROOT / "hvd_adpsgd").parts[0]
        if part not in extras:
            for name in imported(path) - of_views:
                found.setdefault(name, set()).add(str(path))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"\w+", one)[0] for one in project["dependencies"]}
    assert {"numpy", "cloudpickle"} <= found.keys()
    rest = found.keys() - needed - {"hvd_adpsgd", "torch", "horovod"}
    assert not rest, {name: found[name] for name in rest}


def test_says_mpicc_is_missing(tree):
    answer = run(sys.executable, "setup.py", "-q", "build_ext", cwd=tree, MPICC="/nowhere/mpicc")
    assert answer.returncode != 0
    assert answer.stderr.splitlines()[-1] == (
        "hvd_adpsgd: MPICC=/nowhere/mpicc is not an executable. Set MPICC to the mpicc of your MPI."
    )
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("module", ["Cython", "mpi4py"])
def test_says_module_is_missing(tree, module):
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; "
        "sys.argv = ['setup.py', '-q', 'build_ext']; runpy.run_path('setup.py')"
    )
    answer = run(sys.executable, "-c", program, cwd=tree)
    assert answer.returncode != 0
    assert answer.stderr.splitlines()[-1].startswith(
        f"hvd_adpsgd: {module} is not installed. Run: python -m pip install {module.lower()}"
    )


def test_no_compiler_may_fuse_multiplications_with_additions(tree):
    """Only GCC follows -std=c11 in this: with others the numbers would depend on the width of vectors."""
    program = (
        "import runpy, sys; sys.argv = ['setup.py', '--name']; "
        "print(*runpy.run_path('setup.py')['COMPILE_FLAGS'])"
    )
    answer = run(sys.executable, "-c", program, cwd=tree)
    assert "-ffp-contract=off" in answer.stdout.split(), answer.stderr


def test_requirements_are_pinned_once():
    """Every line of the requirement files names one version, and no two files disagree."""
    pins: dict[str, str] = {}
    for file in sorted(ROOT.glob("requirements*.txt")):
        for line in file.read_text().splitlines():
            requirement = line.split("#")[0].strip()
            if not requirement or requirement.startswith("-"):
                continue
            name, _, version = requirement.partition("==")
            version = version.split(";")[0].strip()
            assert version, f"{file.name}: {requirement} is not pinned"
            assert pins.setdefault(name.strip().lower(), version) == version, file.name


def test_workflows_trust_commits_only():
    """Not tags or branches, which can be moved; and no job may write to the repository."""
    found = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for path in found:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert set(job.get("permissions", {})) <= {"id-token"}
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", use) for use in used), used
    assert len(found) == 2


def test_a_release_has_no_relative_links(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = workflow["jobs"]["packages"]["steps"]
    (script,) = [step["run"] for step in steps if step.get("name", "").startswith("addresses")]
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    at = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "a/b"}
    done = run("bash", "-ec", script, cwd=tmp_path, GITHUB_REF_NAME="v1", **at)
    assert done.returncode == 0, done.stderr
    links = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert {"https://host/a/b/blob/v1/docs/start.md", "https://host/a/b/raw/v1/docs/demo.png"} < {
        *links
    }
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] == "https://host/a/b"


def test_the_laboratory_is_compiled_as_the_engine():
    """A simulated exchange rounds as a real one, and both are for every Python."""
    flags, other = (
        {
            node.targets[0].id: ast.unparse(node.value)
            for node in ast.parse((ROOT / part / "setup.py").read_text()).body
            if isinstance(node, ast.Assign)
        }
        for part in ("", "lab")
    )
    for name in ("STABLE_ABI", "ABI_MACROS", "IN_PLACE"):
        assert flags[name] == other[name]
    ours, labs = (set(ast.literal_eval(one["COMPILE_FLAGS"])) for one in (flags, other))
    assert ours - labs == {"-fopenmp-simd"} and labs < ours  # for ext/c only
    for part in ("", "lab"):
        assert 'options={"bdist_wheel": {"py_limited_api": "cp311"}}' in (
            (ROOT / part / "setup.py").read_text()
        )


def test_version_is_in_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "hvd_adpsgd.__version__"
    release = hvd_adpsgd.__version__.partition(".dev")[0]
    assert f"## [{release}]" in (ROOT / "CHANGELOG.md").read_text()
