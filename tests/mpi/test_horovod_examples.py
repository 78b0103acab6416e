"""Horovod's own examples, with only the import swapped; where their sources are at hand.

They are in Horovod's repository (tag v0.28.1), not in its sdist: TEST_HOROVOD_EXAMPLES names its folder
`examples`. They need torchvision.
"""

import atexit
import functools
import importlib.util
import os
import random
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import Result, run_learners
from tests.mpi.test_optimizer import SIZE

EXAMPLES = Path(os.environ.get("TEST_HOROVOD_EXAMPLES", ""))
IMPORT = "import horovod.torch as hvd\n"

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.skipif(
        "TEST_HOROVOD_EXAMPLES" not in os.environ, reason="TEST_HOROVOD_EXAMPLES is not set"
    ),
    pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="no torchvision"),
]


def swapped(name: str, folder: Path) -> Path:
    """The example `name` in `folder`, with another import and nothing else changed."""
    text = (EXAMPLES / name).read_text()
    assert text.count(IMPORT) == 1
    file = folder / Path(name).name
    file.write_text(text.replace(IMPORT, "import hvd_adpsgd.torch as hvd\n"))
    return file


def run_example(np: int, program: Path, **how: Any) -> Result:
    """As run_learners; the examples have a lock in the user's home, which is one of the tests here."""
    env = {**how.pop("env"), "HOME": home()}
    return run_learners(np, program, env=env, imports=["torchvision"], **how)


@functools.cache
def home() -> str:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def mnist(folder: Path) -> list[str]:
    """Digits that are bars at different heights, in MNIST's format; the examples' arguments for them."""
    raw, rng = folder / "MNIST" / "raw", random.Random(0)
    raw.mkdir(parents=True)
    for part, n in (("train", 400), ("t10k", 100)):
        labels, images = [rng.randrange(10) for _ in range(n)], bytearray()
        for digit in labels:
            image = bytearray(rng.randrange(40) for _ in range(28 * 28))
            image[56 * digit : 56 * digit + 224] = b"\xfa" * 224
            images += image
        header = struct.pack(">IIII", 2051, n, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images)
        header = struct.pack(">II", 2049, n)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(labels))
    return ["--data-dir", str(folder), "--epochs", "2", "--batch-size", "20"]


def pictures(folder: Path) -> list[str]:
    """10 + 4 pictures of two classes in folders; the examples' arguments for them."""
    from PIL import Image

    for part, n in (("train", 5), ("val", 2)):
        for name, colour in (("green", (0, 200, 0)), ("red", (200, 0, 0))):
            (folder / part / name).mkdir(parents=True)
            for number in range(n):
                Image.new("RGB", (40, 40), colour).save(folder / part / name / f"{number}.png")
    return [
        *("--train-dir", str(folder / "train"), "--val-dir", str(folder / "val")),
        *("--log-dir", str(folder / "logs")),
        *("--checkpoint-format", str(folder / "epoch{epoch}.pt")),
        *("--batch-size", "2", "--val-batch-size", "2"),
    ]


def settings(folder: Path, size: int) -> dict[str, str]:
    """Variables: super learners of `size`, a trace."""
    return {SIZE: str(size), "HVD_ADPSGD_TIMELINE": str(folder / "trace.json")}


def steps(folder: Path, learners: int) -> list[int]:
    """The steps of each learner. Leaders have exchanged."""
    traces = [(folder / f"trace.{rank}.json").read_text() for rank in range(learners)]
    assert any('"exchange (' in trace for trace in traces), "no exchange"
    return [trace.count('"name":"offer"') for trace in traces]


def held_out_losses(result: Result) -> list[float]:
    """After each epoch, said by one learner."""
    return [float(x) for x in re.findall(r"Test set: Average loss: ([\d.]+)", result.stdout)]


@pytest.mark.parametrize(
    ("launcher", "inner", "more"),
    [
        ("mpirun", "horovod", []),
        ("mpirun", "horovod", ["--use-adasum"]),
        ("horovodrun", "horovod", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
        ("torchrun", "torch", []),
        ("torchrun", "torch", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
    ],
)
def test_mnist(tmp_path: Path, launcher: str, inner: str, more: list[str]) -> None:
    program = swapped("pytorch/pytorch_mnist.py", tmp_path)
    env = {**settings(tmp_path, 2), "HVD_ADPSGD_INNER": inner}
    args = [*mnist(tmp_path), *more]
    result = run_example(4, program, args=args, env=env, launcher=launcher).checked()
    assert steps(tmp_path, 4) == [10] * 4
    first, second = held_out_losses(result)
    assert second < first < 2.303, "ln 10: guessing"


def test_mnist_by_horovods_run_function(tmp_path: Path) -> None:
    """The script starts its learners itself, and sends them its main function."""
    program = swapped("pytorch/pytorch_mnist.py", tmp_path)
    args = [*mnist(tmp_path), "--num-proc", "4", "--communication", "gloo"]
    env = settings(tmp_path, 2)
    result = run_example(1, program, args=args, env=env, launcher=None).checked()
    assert steps(tmp_path, 4) == [10] * 4
    first, second = held_out_losses(result)
    assert second < first


def test_one_synchronous_super_learner_is_plain_horovod(tmp_path: Path) -> None:
    """Also for the elastic example: every loss that is printed is the same."""
    args = [*mnist(tmp_path), "--log-interval", "1"]
    env = {"HVD_ADPSGD_AVERAGING": "synchronous"}
    for name in ("pytorch/pytorch_mnist.py", "elastic/pytorch/pytorch_mnist_elastic.py"):
        plain, ours = (
            run_example(2, program, args=args, env=env).checked()
            for program in (EXAMPLES / name, swapped(name, tmp_path))
        )
        assert plain.stdout.count("Loss: ") >= 20, plain.report()
        assert sorted(plain.stdout.splitlines()) == sorted(ours.stdout.splitlines())


@pytest.mark.parametrize(
    "name", ["pytorch_mnist_elastic.py", "pytorch_synthetic_benchmark_elastic.py"]
)
def test_elastic_examples_are_told_of_what_is_there_instead(tmp_path: Path, name: str) -> None:
    program = swapped(f"elastic/pytorch/{name}", tmp_path)
    args = mnist(tmp_path) if "mnist" in name else ["--model", "squeezenet1_1"]
    result = run_example(2, program, args=args, env=settings(tmp_path, 1))
    assert result.returncode != 0
    assert "InnerOnlyError: elastic.TorchState()" in result.stderr
    assert "hvd.admit" in result.stderr


def test_imagenet_trains_saves_and_resumes(tmp_path: Path) -> None:
    """The second job accumulates gradients, with a remainder: 2 + 2 + 1 samples."""
    program = swapped("pytorch/pytorch_imagenet_resnet50.py", tmp_path)
    given, env = pictures(tmp_path), settings(tmp_path, 1)
    run_example(2, program, args=[*given, "--epochs", "1"], env=env).checked()
    assert steps(tmp_path, 2) == [3, 3]
    args = [*given, "--epochs", "2", "--batches-per-allreduce", "2"]
    result = run_example(2, program, args=args, env=env).checked()
    assert "Train Epoch     #2" in result.stderr and "Train Epoch     #1" not in result.stderr
    assert steps(tmp_path, 2) == [2, 2]
    assert (tmp_path / "epoch2.pt").exists()


def test_synthetic_benchmark(tmp_path: Path) -> None:
    program = swapped("pytorch/pytorch_synthetic_benchmark.py", tmp_path)
    few = ["--num-warmup-batches", "2", "--num-iters", "3", "--num-batches-per-iter", "4"]
    args = ["--model", "squeezenet1_1", "--batch-size", "1", *few]
    env = settings(tmp_path, 1)
    result = run_example(3, program, args=args, env=env).checked()
    assert steps(tmp_path, 3) == [2 + 3 * 4] * 3
    assert "Total img/sec on 3 CPU(s)" in result.stdout
