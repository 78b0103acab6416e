"""`install()`: libraries that import horovod.torch themselves get this one."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import run_learners

pytestmark = pytest.mark.mpi

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("programs") / "ignite_run.py"


@pytest.mark.skipif(importlib.util.find_spec("ignite") is None, reason="no Ignite")
def test_ignite_trains_with_its_horovod_backend(tmp_path: Path) -> None:
    """The script of docs/frameworks.md."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    result = run_learners(4, PROGRAM, args=[str(tmp_path)], env=env).checked()
    learners = result.by_rank()
    assert [facts["rank"] for facts in learners] == list(range(4))
    for facts in learners:
        assert facts["face"] and facts["begins_alike"], facts
        assert (facts["size"], facts["backend"]) == (4, "horovod")
        assert facts["places"] == 1
        assert len(facts["accuracies"]) == 3 and facts["accuracies"][-1] > 0.5
        assert facts["accuracies"] == learners[0]["accuracies"], "not one model, or not all data"
        assert facts["apart"] == 0.0 and facts["saved"]
    steps = sum(facts["steps"] for facts in learners)  # of the last epoch
    assert 480 // 10 <= steps <= 52, "an epoch did not end with the loader"


MAIN = "WorldError install(): __main__ imported"
LATE = """
import sys, types
{before}
import hvd_adpsgd.torch as hvd
{after}
try:
    hvd.install()
except Exception as error:
    print(type(error).__name__, error)
else:
    import horovod.torch
    print(horovod.torch is hvd, sys.modules["horovod.torch.elastic"] is hvd.elastic)
"""


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        # binds horovod only
        pytest.param("import horovod.torch", "", "True True", marks=pytest.mark.extended),
        pytest.param("import horovod.torch as plain", "", MAIN, marks=pytest.mark.extended),
        pytest.param("from horovod.torch import allreduce", "", MAIN, marks=pytest.mark.extended),
        pytest.param(
            "",
            "other = sys.modules['other'] = types.ModuleType('other')\n"
            "exec('import horovod.torch as hvd', vars(other))",
            "WorldError install(): other imported horovod.torch before. Call hvd_adpsgd.torch.install()",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_who_has_imported_horovod_before_is_named(before: str, after: str, told: str) -> None:
    program = LATE.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(told), done.stdout + done.stderr


SUBMODULES = """
import hvd_adpsgd.torch as hvd
hvd.install()
import horovod.torch.compression, horovod.torch.sync_batch_norm, horovod.torch.elastic.sampler
from horovod.torch.elastic import state
from horovod.torch.compression import Compression
print(horovod.torch.compression is hvd.compression, Compression is hvd.Compression)
print(horovod.torch.sync_batch_norm is hvd.sync_batch_norm, state is hvd.elastic.state)
print(horovod.torch.elastic.sampler is hvd.elastic.sampler)
try:
    import horovod.torch.basics
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def test_submodules_are_this_librarys_or_missing() -> None:
    """Python would find basics.py of this library, and run it a second time."""
    done = subprocess.run(
        [sys.executable, "-c", SUBMODULES], cwd=ROOT, capture_output=True, text=True
    )
    *same, missing = done.stdout.splitlines()
    assert " ".join(same).split() == ["True"] * 5, done.stdout + done.stderr
    assert missing.startswith("horovod.torch.basics No module named 'horovod.torch.basics'")


def test_this_library_keeps_the_horovod_that_it_has() -> None:
    """All its modules that import horovod.torch are loaded before install() can be called."""
    needing = []
    for path in (ROOT / "hvd_adpsgd").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name.startswith("hvd_adpsgd.tools"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(one.startswith("horovod.torch") for one in names):
                needing.append(name)
    assert {"hvd_adpsgd.inner.horovod", "hvd_adpsgd.inner.elastic"} <= set(needing)
    program = f"import sys, hvd_adpsgd.torch; print([n for n in {needing} if n not in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
