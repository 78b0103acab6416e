"""A build is made again if a variable that changes it has another value, and only then."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIVEN = "CC CFLAGS CPPFLAGS LDFLAGS MPICC TORCH MAKEFLAGS MFLAGS MAKELEVEL".split()

HOROVOD, EXTENSION = "hvd_adpsgd/tools/build_horovod.py", "setup.py --quiet build_ext --inplace"
# In place of the environment's Python: notes what it is called for, and with which variables.
PYTHON = """#!/bin/sh
echo "$* | $HOROVOD_GPU_OPERATIONS | $CFLAGS" >>"${0%.venv/*}called"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the set-up reads, with an environment whose Python only takes notes."""
    for name in ("Makefile", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in (HOROVOD, "setup.py", "pyproject.toml", "lab/setup.py", "lab/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / ".venv" / ".stamps").mkdir()
    (tmp_path / ".venv" / ".stamps" / "created").touch()
    return tmp_path


def venv(tree: Path, **variables: str) -> list[str]:
    """`make venv`: what it has called the environment's Python for, in short."""
    outer = {k: v for k, v in os.environ.items() if k not in GIVEN and k[:7] != "HOROVOD"}
    done = subprocess.run(
        ["make", "venv"], cwd=tree, env={**outer, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    called = tree / "called"
    lines = called.read_text().splitlines() if called.exists() else []
    called.unlink(missing_ok=True)
    return [line.replace("-m pip --disable-pip-version-check ", "") for line in lines]


def test_a_set_up_without_variables_is_made_once(tree: Path) -> None:
    first = venv(tree)
    assert f"{HOROVOD} |  | " in first and f"{EXTENSION} |  | " in first
    assert any(line.startswith("install --quiet torch==") for line in first)
    assert venv(tree) == []


def test_horovod_is_built_again_for_gpus_and_stays_so(tree: Path) -> None:
    venv(tree)
    assert venv(tree, HOROVOD_GPU_OPERATIONS="NCCL") == [f"{HOROVOD} | NCCL | "]
    assert venv(tree, HOROVOD_GPU_OPERATIONS="NCCL") == []
    assert venv(tree) == [], "another shell"
    (tree / ".venv" / ".stamps" / "horovod").unlink()
    assert venv(tree)[0] == f"{HOROVOD} | NCCL | "


def test_the_extension_is_compiled_with_new_flags(tree: Path) -> None:
    venv(tree)
    again = [f"{EXTENSION} |  | -g -O0", f"{EXTENSION} --force |  | -g -O0"]  # and the laboratory's
    assert venv(tree, CFLAGS="-g -O0") == again
    assert venv(tree) == []
    (tree / ".venv" / ".stamps" / "extension").unlink()
    assert venv(tree) == [f"{EXTENSION} |  | -g -O0"]


def test_the_help_fits_one_screen() -> None:
    lines = subprocess.check_output(["make", "help"], cwd=ROOT, text=True).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 120
    assert sum(line.startswith("  make ") for line in lines) <= 18


def test_another_torch_is_installed_and_horovod_built_for_it(tree: Path) -> None:
    venv(tree)
    again = venv(tree, TORCH="torch==2.13.0 --index-url https://example.org/cpu")
    assert again[:2] == [
        "uninstall --quiet --yes torch |  | ",
        "install --quiet torch==2.13.0 --index-url https://example.org/cpu |  | ",
    ]
    assert f"{HOROVOD} |  | " in again
    assert venv(tree) == []
