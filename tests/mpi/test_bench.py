"""The benchmarks run, with arguments that make them short, and say what they are read for."""

import json
import subprocess
import sys

import pytest
import torch
from hvd_adpsgd_lab.bench import table

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


@pytest.mark.parametrize(
    ("kind", "option", "value", "least"),
    [
        ("exchange", "mib", "0.0", "0.01"),
        ("exchange", "mib", "nan", "0.01"),
        ("exchange", "rounds", "0", "1"),
        ("step", "threads", "0", "1"),
        ("exchange", "chunk-kib", "0", "1"),
        ("step", "straggler", "-1.0", "0.0"),
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


def test_table_names_what_is_nested() -> None:
    (line,) = table({"on": {"cpu_ms_per_step": 1.5}}).splitlines()
    assert line.split()[:2] == ["on.cpu_ms_per_step", "1.5"]
    assert line.endswith("CPU of a learner, with the threads of the library")
