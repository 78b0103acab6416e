"""A whole small job under each launcher, started as users start it: the command and script of docs/start.md.

Nothing that makes other tests cheaper is at work here: no forked learners, no preloaded library.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import LONGEST_S, ROOT, free_port

SCRIPT = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / "docs" / "start.md").read_text())[0]
SETTINGS = ("HVD_ADPSGD_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "LD_PRELOAD", "TEST_")
COMMANDS = {
    "run": "python -m hvd_adpsgd run -np 2 train.py",
    "horovodrun": "horovodrun -np 2 python train.py",
    "gloo": "horovodrun --gloo -np 2 python train.py",
    "torchrun": f"torchrun --nproc-per-node 2 --master-port {free_port()} train.py",
    "mpirun": "mpirun -np 2 --bind-to none --map-by :OVERSUBSCRIBE --with-ft ulfm python train.py",
    "srun": "srun --mpi=none -n 2 python train.py",
}
UNNEEDED = ("run", "torchrun")  # there Horovod and MPI are not needed


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", COMMANDS)
def test_the_first_script_trains(tmp_path: Path, launcher: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env |= {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "1", "PYTHONPATH": str(ROOT)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if launcher in UNNEEDED:
        env["HVD_ADPSGD_INNER"] = "torch"
    words = COMMANDS[launcher].split()
    if shutil.which(words[0], path=env["PATH"]) is None or not is_served(launcher):
        pytest.skip(f"{words[0]} is not here")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        words,
        env=env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    assert len(re.findall(r"epoch \d: accuracy of the averaged model", done.stdout)) == 3, said
    steps = dict(re.findall(r"super learner (\d): (\d+) steps, \d+ exchanges", done.stdout))
    assert len(steps) == 2 and 0 <= sum(map(int, steps.values())) - 384 <= 3, said
    assert (tmp_path / "model.pt").exists()
    assert ("torchrun ends all learners of a host" in said) == (launcher == "torchrun"), said


def is_served(launcher: str) -> bool:
    """Whether a controller of Slurm answers where srun is asked for."""
    if launcher != "srun":
        return True
    return subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0
