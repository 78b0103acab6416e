"""The benchmarks run, with arguments that make them short, and say what they are read for."""

import json
import subprocess
import sys

import pytest
import torch
from hvd_adpsgd_lab.bench import with_slots

from hvd_adpsgd import __main__ as commands
from tests.launcher import QUICK, environment

pytestmark = pytest.mark.mpi


def bench(*args: str, **options: str) -> str:
    command = [sys.executable, "-m", "hvd_adpsgd", "bench", *args]
    done = subprocess.run(
        command,
        env=environment(options, (QUICK,)),
        capture_output=True,
        text=True,
        timeout=800,  # a hang ends: no verdict is about it
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.extended
def test_operations() -> None:
    result = json.loads(bench("operations", "--json", "--mib=1", "--rounds=2", "--learners=4"))
    for n in ("n 2", "n 4"):
        for numbers in result[n].values():
            assert min(numbers["mpi_ms"], numbers["over_mpi_to_mpi"], numbers["sockets_to_mpi"]) > 0
    assert result["n 2"].keys() == {"allreduce_small", "allreduce_large", "broadcast_large"}


def test_wires() -> None:
    given = {"HVD_ADPSGD_WIRE_DTYPE": "int8"}
    result = json.loads(bench("wires", "--json", "--mib=1", "--rounds=2", **given))
    # of the tests
    options = {k: v for k, v in result["options"].items() if k != "HVD_ADPSGD_INNER"}
    assert options == {"HVD_ADPSGD_WIRE_DTYPE": "int8"}  # numbers say of what they are
    for way in ("socket", "mpi", "tcp"):
        assert all(result[way][name] > 0 for name in ("mb_per_s_each_way", "cpu_s_per_gb"))
    assert result["tcp"]["speed_to_socket_min"] > 0


@pytest.mark.parametrize(
    ("hosts", "learners", "told"),
    [
        ("node1,node2", 2, "node1:1,node2:1"),
        ("node1,node2", 5, "node1:3,node2:3"),
        ("node1:2,node2", 8, "node1:2,node2:6"),
        ("node1:8,node2", 8, "node1:8,node2:1"),
    ],
)
def test_hosts_without_slots_share_the_learners(hosts: str, learners: int, told: str) -> None:
    assert with_slots(hosts, learners) == told


def test_kernels() -> None:
    result = json.loads(bench("kernels", "--json", "--mib=1", "--rounds=2"))
    assert result["memcpy_gb_per_s"] > 0
    for loop in ("snapshot", "merge", "half_difference", "merge_half", "apply", "merge_mean"):
        for dtype in ("float32", "float64", "bfloat16", "float16"):
            assert 0 < result[loop][f"{dtype}_min"] <= result[loop][dtype], (loop, dtype)


@pytest.mark.parametrize(
    ("kind", "option", "value", "least"),
    [
        ("kernels", "mib", "0.0", "0.01"),
        ("kernels", "mib", "nan", "0.01"),
        ("kernels", "rounds", "0", "1"),
        ("step", "threads", "0", "1"),
        ("exchange", "chunk-kib", "0", "1"),
        ("step", "straggler", "-1.0", "0.0"),
        ("operations", "learners", "1", "2"),
        ("step --straggler=1", "learners", "1", "2"),
        ("step", "learners", "0", "1"),
        ("step", "steps", "0", "1"),
    ],
)
def test_an_argument_out_of_bounds_is_one_line(
    kind: str,
    option: str,
    value: str,
    least: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["hvd_adpsgd", "bench", *kind.split(), f"--{option}={value}"])
    assert commands.main() == 2
    assert capsys.readouterr().err == (
        f"bench: --{option} {value}: allowed is at least {least}. Pass a finite number in that range.\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that torch can use")
def test_step_on_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hvd_adpsgd", "bench", "step", "--gpu"])
    assert commands.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: --gpu: torch ") and "Leave the option out" in error


@pytest.mark.extended
@pytest.mark.slow
def test_step() -> None:
    result = json.loads(bench("step", "--json", "--learners=2", "--blocks=2", "--steps=4"))
    assert 0 < result["step_in_copies_min"] <= result["step_in_copies"]
    assert min(result["speed_kept"], result["on"]["cpu_ms_per_step"]) > 0


@pytest.mark.extended
def test_table_names_what_is_nested() -> None:
    table = bench("kernels", "--mib=0.1", "--rounds=1")
    assert any(line.startswith("merge.float32") for line in table.splitlines())
