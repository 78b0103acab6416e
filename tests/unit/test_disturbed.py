"""The parts of `lab.studies.cluster` that compute: models, ratios, tables, curves."""

# The imports come after the check that the packages are there.
# ruff: noqa: E402

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from examples.acoustic_model.speech.keeper import Job, perform_jobs
from examples.acoustic_model.speech.problem import Problem
from lab.studies.disturbed import jobs, network, picture, stragglers, surface

# ---- jobs


def test_a_finished_job_is_kept_and_a_failed_one_does_not_stop_the_others(tmp_path):
    done = []

    def act(folder):
        done.append(folder)
        return {"value": len(done)}

    def fail(folder):
        raise Problem("on purpose")

    told = [Job("a", {"x": 1}, act), Job("b", {}, fail), Job("a", {"x": 2}, act)]
    records, failures = perform_jobs(told, tmp_path)
    assert [record and record["value"] for record in records] == [1, None, 2]
    assert failures == ["b: on purpose"]
    again, _ = perform_jobs(told, tmp_path)
    assert [record and record["value"] for record in again] == [1, None, 2]
    assert len(done) == 2
    assert done[0] != done[1]
    recalled, failures = perform_jobs(told, tmp_path, recall_only=True)
    assert [record and record["value"] for record in recalled] == [1, None, 2]
    assert failures == []


@pytest.mark.parametrize(
    ("script", "deadline_s", "message"),
    [("import sys; print('why'); sys.exit(3)", 30, "status 3.*why"),
     ("import time; time.sleep(60)", 0.5, "not over after")],
)  # fmt: skip
def test_a_command_that_fails_or_takes_too_long_is_a_problem(script, deadline_s, message, tmp_path):
    command = [sys.executable, "-u", "-c", script]
    with pytest.raises(Problem, match=f"(?s){message}"):
        jobs.run(command, {}, deadline_s, tmp_path / "log")


# ---- stragglers


def _block(healthy: float, slow: float) -> stragglers.Block:
    """Three learners of that pace and a slow one, for 2 seconds."""
    paces, met = [healthy] * 3 + [slow], [1, 1, 1, 7]
    return [
        {"steps": 2 * p, "seconds": 2.0, "exchanges": m * p}
        for p, m in zip(paces, met, strict=True)
    ]


def _record(at_ten: stragglers.Block) -> dict:
    first, last = _block(9, 9), _block(11, 11)
    return {"blocks": [[1.0, first], [10.0, at_ten], [1.0, last]], "load_before": 0.5}


def _stragglers() -> dict:
    schemes = ("random_pairs", "synchronous")
    records = [
        _record(_block(9.9, 1)), _record(_block(1, 1)),
        _record(_block(9.5, 1)), _record(_block(1.1, 1.1)),
        _record(_block(10.2, 1)), _record(_block(0.9, 0.9)),
    ]  # fmt: skip
    return stragglers.results(stragglers.gather(schemes, 3, records))


def test_speeds_are_against_those_of_the_same_run():
    kept = _stragglers()["random_pairs"]["kept"]
    assert kept["1"]["all"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert kept["10"]["healthy"]["median"] == pytest.approx(0.99)
    assert kept["10"]["healthy"]["min"] == pytest.approx(0.95)
    assert kept["10"]["all"]["median"] == pytest.approx((3 * 9.9 + 1) / 40)
    assert kept["10"]["exchanges"] == 0.5


def test_the_model_is_that_of_theory():
    """(L - 1 + 1/s) / L where nobody waits, 1 / s where all wait."""
    result = _stragglers()
    assert result["random_pairs"]["kept"]["10"]["model"] == pytest.approx(3.1 / 4)
    assert result["synchronous"]["kept"]["10"]["model"] == pytest.approx(1 / 10)
    waiting = {scheme for scheme in stragglers.SCHEMES if stragglers.waits(scheme)}
    assert set(stragglers.SCHEMES) - waiting == {"random_pairs", "fixed_ring", "random_ring"}


@pytest.mark.parametrize(("slowest", "verdict"), [(9.8, "98.0%.*met"), (9.6, "96.0%.*missed")])
def test_the_goal_is_for_gossip_and_its_worst_case(slowest, verdict):
    records = [_record(_block(slowest, 1)), _record(_block(1, 1))]
    found = stragglers.gather(("random_pairs", "synchronous"), 1, records)
    *_, line = stragglers.notes(stragglers.results(found), 1)
    assert re.search(verdict, line), line


def test_a_scheme_with_a_failed_run_is_left_out():
    records = [_record(_block(9, 1)), None, _record(_block(9, 1)), _record(_block(1, 1))]
    assert list(stragglers.gather(("random_pairs", "synchronous"), 2, records)) == ["random_pairs"]


def test_undisturbed_blocks_come_first_and_last():
    assert stragglers.order((1, 2, 5), 0) == [1, 2, 5, 1]
    assert stragglers.order((1, 2, 5), 1) == [1, 5, 2, 1]


# ---- network


@pytest.mark.parametrize("model", network.MODELS)
def test_models_have_their_size(model):
    from lab.studies.disturbed import far_learner

    sizes = network.sizes(model)
    assert network.count(sizes) == pytest.approx(network.MODELS[model], rel=2e-3)
    if model == "1 M":
        built = far_learner.mlp(sizes, 0)
        assert network.count(sizes) == sum(p.numel() for p in built.parameters())


def test_a_model_takes_its_bits_divided_by_the_rate():
    assert network.wire_s("1 Gb/s", "10 M") == pytest.approx(0.32)


def _told(on: float, off: float = 10.0) -> dict:
    """A run of one block of a second each; two learners, one of them a tenth faster."""

    def block(pace: float) -> list[dict]:
        counts = dict.fromkeys(network.COUNTED, pace * 4)
        return [{"steps": p, "seconds": 1.0, **counts} for p in (pace, 1.1 * pace)]

    rows = [{"off": block(off), "on": block(on)} for _ in range(2)]
    return {"rows": {"32:0": rows, "8:0.25": rows}}


def _network(on: float = 9.6, synchronous: float = 3.0) -> dict:
    link, model = network.GOAL_CELL
    cells = {network.GOSSIP: _told(on), network.SYNCHRONOUS: _told(synchronous, 12.0)}
    return network.results({(link, model, scheme): told for scheme, told in cells.items()})


def test_ratios_are_of_neighbouring_blocks_and_runs_are_compared_by_them():
    found = _network()["1 Gb/s"]["43.15 M"]["cpu"]
    assert found[network.GOSSIP]["kept"] == pytest.approx(0.96)
    assert found[network.SYNCHRONOUS]["kept"] == pytest.approx(0.25)
    assert found[network.GOSSIP]["times_synchronous"] == pytest.approx(3.84)
    assert found[network.GOSSIP]["bytes_sent_per_step"] == pytest.approx(8 / 2.1)


def test_goals_are_judged():
    assert all(line.count("met") == 2 for line in network.goal(_network()))
    assert all(line.count("missed") == 2 for line in network.goal(_network(9.4, 5.0)))
    assert network.goal({}) == []


def test_tables_and_pictures_of_the_network_and_of_stragglers(tmp_path):
    curves = {network.GOSSIP: [_copy("steps 8", 8, 1.9), _copy("steps 16", 16, 1.7)]}
    assert "| `random_pairs` | 0.990 (0.950 to 1.020) | 0.50, 0.50 |" in stragglers.table(
        _stragglers()
    )
    assert "| random_pairs | 10.5 | 10.1 | 96.0% (" in network.table(_network())
    assert len(network.profile(_network(), *network.GOAL_CELL).splitlines()) == 2 + 2 * 2 * 2
    assert "| steps 8 | 8, 1.900, 0.5 |" in network.curve_table(curves)
    picture.draw_stragglers(_stragglers(), tmp_path / "a.png")
    picture.draw_network(_network(), curves, tmp_path / "b.png")
    picture.draw_network({}, {}, tmp_path / "c.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "abc")


def _copy(at: str, steps: int, loss: float) -> dict:
    told = {"at": at, "steps": [steps, steps], "seconds": 10.0, "own_loss": loss, "loss": loss}
    return {**told, "consensus_distance": 0.5}


def test_curves_are_compared_where_all_have_a_copy():
    curves = {
        "a": [_copy("steps 16", 16, 1.5), _copy("time 0.5", 9, 1.7), _copy("steps 8", 8, 1.9)],
        "b": [_copy("steps 8", 8, 1.8), _copy("time 0.5", 6, 2.0)],
    }
    assert network.common(curves) == ["steps 8", "time 0.5"]


def test_samples_are_new_for_every_learner_and_step_and_the_same_again():
    from lab.studies.disturbed import far_learner

    task, again = (far_learner.Task(16, 10, 3) for _ in range(2))
    first = task.samples(4, 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again.samples(4, 1, 0), strict=True))
    others = [task.samples(4, who, step)[0] for who, step in ((0, 0), (1, 1), (2, 0))]
    assert not any(torch.equal(first[0], other) for other in others)


def test_bytes_on_the_wire_are_those_sent_by_all_but_the_loopback():
    from lab.studies.disturbed import far_learner

    text = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:     900       9    0    0    0     0          0         0      900       9    0
  eth0:    1000      10    0    0    0     0          0         0     2000      20    0
veth7a:       1      10    0    0    0     0          0         0       30      20    0
"""
    assert far_learner.wire_bytes(text) == 2030


# ---- the script


def test_the_script_refuses_an_unknown_link():
    command = [sys.executable, "-m", "lab.studies.cluster", "--links", "1 Tb/s"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert told.returncode == 2 and "known are 10 Gb/s" in told.stderr


# ---- surface


def _surface(kept: float = 0.9, steps: float = 4.0) -> dict:
    told = _told(kept * steps, steps)
    cells = surface.cells(["50 Mb/s", "1 Gb/s"], ["43.15 M"], surface.SCHEMES)
    return surface.results(dict.fromkeys(cells, told))


def test_what_all_reduces_of_other_libraries_leave():
    """By hand: a model takes 27.6 s at 50 Mb/s, 128 steps of 0.25 s take 32 s."""
    assert surface.kept_of_period("50 Mb/s", "43.15 M", 0.25, 128) == pytest.approx(0.537, abs=1e-3)
    assert surface.kept_of_period("50 Mb/s", "43.15 M", 0.25, 1) == pytest.approx(0.009, abs=1e-3)


def test_the_simulator_knows_how_many_exchanges_a_link_carries():
    """A link of 50 Mb/s takes 27.6 s for a model, each way: at most one exchange in 110 steps of 0.25 s."""
    found = surface.predicted(("50 Mb/s", "43.15 M", "whole"), 0.25)
    assert found == pytest.approx(1 / 110, rel=0.15)
    assert surface.predicted(("50 Mb/s", "43.15 M", "int8"), 0.25) > 1.8 * found
    assert math.isnan(surface.predicted(("50 Mb/s", "43.15 M", "auto"), 0.25))


def test_table_and_figure_of_the_surface(tmp_path):
    found = _surface()
    row = surface.table(found).splitlines()[2]
    assert "| 90.0% |" in row and "| 52.5% | 0.9% |" in row
    surface.draw(found, tmp_path / "a.png")
    surface.draw({}, tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
