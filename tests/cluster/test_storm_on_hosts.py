"""A storm on three hosts: a link is cut, a learner is killed and replaced, one is stopped and killed."""

from pathlib import Path

import pytest
from hvd_adpsgd_lab.machines import unavailable

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.alone, pytest.mark.extended]
REASON = unavailable()
if REASON:
    pytest.skip(REASON, allow_module_level=True)


def test_all_faults_are_played_and_nothing_is_left(tmp_path: Path) -> None:
    """The run is short; its driver then waits until the replacements have made a step."""
    study = pytest.importorskip("lab.studies.storm_on_hosts")
    faults = tmp_path / "faults.txt"
    faults.write_text("1 kill 2\n2 cut 0 3\n3 stop 1 30\n5 kill 1\n")
    words = ["--slots=3", "--minutes=0.1", "--calm=0.1", "--step=0.2", "--every=2"]
    words += [f"--schedule={faults}", f"--out={tmp_path / 'out'}"]
    result = study.played(study.arguments(words))
    found = result["hadpsgd"]
    assert not isinstance(found, str), found
    assert found["faults"] == "1 cut, 2 kill, 1 stop"
    assert found["left_out"] == "none"
    assert (found["not_replaced"], found["hangs"], found["killed_at_the_end"]) == (0, 0, 0)
    assert min(found["steps_kept"], found["participation"], found["sent_mb"]) > 0
    assert (result["processes_left"], result["shared_memory_left_bytes"]) == (0, 0)
