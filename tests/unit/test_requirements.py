"""Where torch, Horovod or MPI is missing, the error names the command that installs it."""

import os
import subprocess
import sys
import types

import pytest
from hvd_adpsgd_lab import bench

from hvd_adpsgd.__main__ import main
from hvd_adpsgd.errors import MissingRequirementError
from hvd_adpsgd.launch.communicators import load_mpi
from hvd_adpsgd.launch.deadline import Deadline


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        ("torch", "Run python -m pip install 'hvd_adpsgd[torch]', then python -m hvd_adpsgd"),
        ("horovod", "Run python -m hvd_adpsgd build-horovod (it compiles Horovod for"),
    ],
)
def test_package_imports_and_its_torch_interface_names_the_cure(module, cure):
    code = (
        f"import sys; sys.modules[{module!r}] = None; import hvd_adpsgd; import hvd_adpsgd.strategies; "
        "print('base'); import hvd_adpsgd.torch"
    )
    env = {**os.environ, "HVD_ADPSGD_INNER": "horovod"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert answer.stdout == "base\n"
    last = answer.stderr.strip().splitlines()[-1]
    start = f"MissingRequirementError: hvd_adpsgd.torch needs {module}, which is not installed"
    assert start in last
    assert cure in last


def test_horovod_that_does_not_load(monkeypatch):
    from hvd_adpsgd.torch.requirements import require_torch_and_horovod

    require_torch_and_horovod()
    monkeypatch.setitem(sys.modules, "horovod.torch", types.ModuleType("horovod.torch"))
    monkeypatch.delitem(sys.modules, "horovod.torch.mpi_lib_v2")
    with pytest.raises(MissingRequirementError, match=r"mpi_lib_v2.*build-horovod --rebuild"):
        require_torch_and_horovod()


def test_no_mpi_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(MissingRequirementError, match=r"loads no MPI library.*'hvd_adpsgd\[mpi\]'"):
        load_mpi(Deadline(60))


def test_bench_without_horovod(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["hvd_adpsgd", "bench", "exchange"])
    assert main() == 1
    assert "Run python -m hvd_adpsgd build-horovod." in capsys.readouterr().err


def test_bench_takes_mpirun_where_horovod_is_not_installed(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.touch(mode=0o755)
    assert bench._launcher(str(tmp_path))[0] == str(mpirun)
    horovodrun = tmp_path / "horovodrun"
    horovodrun.touch(mode=0o755)
    assert bench._launcher(str(tmp_path)) == [str(horovodrun)]
