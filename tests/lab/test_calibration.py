"""Costs of averaging on a host: measured, written, read, and used by plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hvd_adpsgd_lab.simulation.calibration import Calibration
from hvd_adpsgd_lab.simulation.planner import Cluster, plan

from hvd_adpsgd import __main__ as command_line
from hvd_adpsgd.errors import ConfigError

CLUSTER = Cluster(8, 10e6, 0.35, 1.25e9, 50e-6, minutes=0.5)


def test_bench_writes_what_simulate_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(line: str) -> int:
        monkeypatch.setattr("sys.argv", ["hvd_adpsgd", *line.split()])
        return command_line.main()

    path, plan_path = tmp_path / "here.json", tmp_path / "plan.json"
    assert run(f"bench calibrate --mib 2 --rounds 2 --out {path}") == 0
    found = Calibration.read(path)
    assert found.chunk_nbytes == 256 * 1024 and found.model_nbytes == 2 * 2**20
    # less than 1 TB/s; how much less is the machine's
    assert found.step_s_per_byte > 1e-12 and found.chunk_s_per_byte > 1e-12
    assert found.machine
    arguments = f"--model 1M --step 100ms --minutes 0.1 --json {plan_path} --calibration {path}"
    assert run(f"simulate --super-learners 4 {arguments}") == 0
    written = json.loads(plan_path.read_text())["cluster"]["calibration"]
    assert written["chunk_s_per_byte"] == found.chunk_s_per_byte


def test_a_step_takes_longer_by_its_work_on_the_model() -> None:
    a_tenth = Calibration(step_s_per_byte=0.035 / CLUSTER.model_nbytes, chunk_s_per_byte=0.0)
    kept = [plan(replace(CLUSTER, calibration=each)).steps_kept for each in (None, a_tenth)]
    assert kept[1] / kept[0] == pytest.approx(1 / 1.1, abs=0.01)


def test_the_engine_s_work_bounds_the_exchanges() -> None:
    """An engine that works two steps on a model finishes about one exchange in two steps."""
    busy = Calibration(step_s_per_byte=0.0, chunk_s_per_byte=0.7 / CLUSTER.model_nbytes)
    outcome = plan(replace(CLUSTER, minutes=2, calibration=busy))
    assert outcome.exchanges_per_step == pytest.approx(0.5, abs=0.1)
    assert outcome.steps_kept > 0.98  # the trainer waits for none of it


@pytest.mark.parametrize(
    "text", ["", "[]", '{"step_s_per_byte": 1}', '{"step_s_per_byte": -1, "chunk_s_per_byte": 0}']
)
def test_a_file_that_is_no_calibration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="bench calibrate"):
        Calibration.read(path)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "file.json"
    with pytest.raises(ConfigError, match="bench calibrate"):
        Calibration.read(nowhere)
    with pytest.raises(ConfigError, match="a folder that exists"):
        Calibration(1e-10, 1e-10).write(nowhere)
