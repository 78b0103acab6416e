"""The benchmarks run, with arguments that make them short, and say what they are read for."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_adpsgd import __main__ as commands
from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools.bench import peers, peers_learner, picture, with_slots
from tests.launcher import QUICK, environment

pytestmark = pytest.mark.mpi


def bench(*args: str, first: Sequence[Path] = (QUICK,)) -> str:
    command = [sys.executable, "-m", "hvd_adpsgd", "bench", *args]
    done = subprocess.run(
        command,
        env=environment({}, first),
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


@pytest.mark.slow
@pytest.mark.extended
def test_overlap() -> None:
    result = json.loads(
        bench("overlap", "--json", "--mib=0.5", "--blocks=2", "--steps=3", "--compute", "1", "3")
    )
    assert result["learners"] == 2
    for times in ("compute 1", "compute 3"):
        numbers = result[times]
        assert min(numbers["mean_ms"], numbers["off_ms"], numbers["delay_to_max"]) > 0
        assert numbers["delay_to_sum"] > 0


@pytest.mark.extended
@pytest.mark.slow
def test_gossip() -> None:
    options = ["--windows=2", "--simulated=2", "--steps=5", "--columns=3", "--seeds", "0", "1"]
    result = json.loads(bench("gossip", "--json", "--learners=4", *options))
    assert result["decay"]["windows"] == 4
    assert result["decay"]["from_law"] < 1e-12
    assert all(result["left"]["drift"][scheme] > 0 for scheme in ("plain", "a2cid2", "double"))


def test_wires() -> None:
    result = json.loads(bench("wires", "--json", "--mib=1", "--rounds=2"))
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


@pytest.mark.extended
def test_shards() -> None:
    result = json.loads(bench("shards", "--json", "--mib=8", "--rounds=2", "--learners=4"))
    whole, shards = result["whole"], result["shards"]
    assert 0.4 < shards["private_mib"] / whole["private_mib"] < 0.7
    assert all(shards[f"{name}_ms"] > 0 for name in ("exchange", "copies", "engine_cpu"))


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
        ("absorb", "rounds", "0", "1"),
        ("absorb", "threads", "-1", "0"),
        ("exchange", "chunk-kib", "0", "1"),
        ("step", "straggler", "-1.0", "0.0"),
        ("scaling", "learners", "0", "1"),
        ("step", "steps", "0", "1"),
        ("gossip", "steps", "-1", "0"),
        ("peers", "seconds", "nan", "0.1"),
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
    monkeypatch.setattr(sys, "argv", ["hvd_adpsgd", "bench", kind, f"--{option}={value}"])
    assert commands.main() == 2
    assert capsys.readouterr().err == (
        f"bench: --{option} {value}: allowed is at least {least}. Pass a finite number in that range.\n"
    )


def test_absorb() -> None:
    result = json.loads(bench("absorb", "--json", "--mib=64", "--rounds=3", "--threads=2"))
    assert result["threads"] == 2
    for ratio in ("one_to_copy", "several_to_copy", "several_to_one"):
        assert 0 < result[f"{ratio}_min"] <= result[ratio] <= result[f"{ratio}_max"]


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
@pytest.mark.slow
def test_peers() -> None:
    """What is not installed is said to be; the others train."""
    options = ["--learners=2", "--rounds=1", "--steps=4", "--seconds=1", "--slow=0.2"]
    names = ["random_pairs", "horovod", "ddp", "post_local_sgd", "torchft"]
    result = json.loads(bench("peers", "--json", *options, "--schemes", *names, first=()))
    for name in names[:4]:
        assert isinstance(result[name], dict), result
        assert result[name]["samples_per_s"] > 0, result
        assert 0 < result[name]["slow_loss_after_time"] < 10, result
    if importlib.util.find_spec("torchft") is None:
        assert "pip install torchft" in result["torchft"]


@pytest.mark.parametrize(
    "option", ["--learners=1", "--rounds=0", "--steps=0", "--seconds=0", "--slow=-1"]
)
def test_arguments_of_peers_are_checked(option: str) -> None:
    name, value = option[2:].split("=")
    given = {
        "learners": 2,
        "rounds": 1,
        "steps": 1,
        "seconds": 1.0,
        "slow": 0.0,
        name: float(value),
    }
    with pytest.raises(ConfigError, match=f"--{name} .*: allowed is at least"):
        peers.measure(argparse.Namespace(schemes=["ddp"], hosts="", **given))


def test_each_scheme_has_its_learner() -> None:
    assert list(peers.SCHEMES) == list(peers_learner.SCHEMES)


def test_a_peer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--schemes nccl: .* Pass some of random_pairs, horovod"):
        peers.measure(argparse.Namespace(schemes=["nccl"], learners=2, rounds=1))


@pytest.mark.extended
def test_watching() -> None:
    result = json.loads(bench("watching", "--json", "--blocks=2", "--steps=20"))
    assert 0 < result["watched_speed_kept_min"] <= result["watched_speed_kept_max"]
    assert 0 <= result["watching_cpu"] < 0.5


@pytest.mark.extended
def test_allreduce() -> None:
    result = json.loads(bench("allreduce", "--json", "--learners=8", "--mib=0.5", "--rounds=2"))
    for n in ("n 2", "n 4", "n 8"):
        assert all(result[n][f"{way}_ms"] > 0 for way in ("allreduce", "mpi", "butterfly"))


@pytest.mark.extended
def test_table_names_what_is_nested() -> None:
    table = bench("gossip", "--learners=4", "--windows=2", "--simulated=0", "--steps=0")
    assert any(line.startswith("decay.plain.theory") for line in table.splitlines())


@pytest.mark.slow
@pytest.mark.extended
def test_picture_of_overlap(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "overlap.png"
    bench("overlap", f"--picture={path}", "--mib=0.5", "--steps=8")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert os.path.getsize(path) > 10_000


def test_what_a_trace_shows() -> None:
    """Steps of 10 ms: 6 of computation, 1 of the optimizer, 3 of collect, 2 of them waiting."""

    def event(name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": 0, "name": name, "ts": 1e3 * ts, "dur": 1e3 * dur}

    events = [{"ph": "M", "pid": 0, "name": "process_name"}]
    for k in range(6):
        events += [
            event("inner_allreduce", 10 * k + 6, 0),
            event("optimizer", 10 * k + 6, 1),
            event("collect", 10 * k + 7, 3),
            event("offer", 10 * k + 10, 0),
            event("mean of all", 10 * k + 0.5, 8.5),
        ]
    bars = picture.shown(events, steps=2)
    total = {
        what: sum(lasts for *_, name, _, lasts in bars if name == what) for what in picture.COLOURS
    }
    assert total["computation"] / total["waiting"] == pytest.approx(3)
    assert total["update"] == pytest.approx(total["waiting"])
    assert {name for *_, name, _, _ in bars} == set(picture.COLOURS)


@pytest.mark.extended
@pytest.mark.slow
def test_scaling() -> None:
    options = ["--learners=4", "--mib=0.5", "--rounds=2", "--steps=5", "--pause-ms=2"]
    result = json.loads(bench("scaling", "--json", *options))
    assert result["2"]["cpu_to_two"] == 1
    assert result["4"]["cpu_ms_per_exchange"] > 0 and result["4"]["exchanges_per_step"] > 0
