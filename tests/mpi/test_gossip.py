"""A2CiD2 in the real engine: the law event by event, its gain, its mean, and the node's bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import ROOT, run_learners

from hvd_adpsgd import continuous, topology
from hvd_adpsgd.bench import MARK

pytestmark = pytest.mark.mpi

GOSSIP = ROOT / "hvd_adpsgd" / "bench" / "gossip.py"
TRAINING = Path(__file__).parent / "programs" / "accelerated.py"


def test_decay_with_and_without_a2cid2_on_a_ring_of_eight() -> None:
    """Every model follows the law to rounding, and the rates are theory's within 10 %.

    Exchanges come at times drawn from the seed, so this passes always or never. The sampling error
    of 200 windows is 2.6 %.
    """
    args = ["--windows=200", "--simulated=0", "--steps=0", "--seeds=0"]
    said = run_learners(8, GOSSIP, args=args, timeout=120).checked().stdout
    (line,) = (line for line in said.splitlines() if MARK in line)
    decay = json.loads(line.split(MARK, 1)[1])["decay"]
    edges = topology.ring_edges(8)
    assert decay["from_law"] < 1e-12
    measured = {name: decay[name]["measured"] for name in ("plain", "a2cid2", "gain")}
    assert measured["plain"] == pytest.approx(continuous.gossip_decay(8, edges), rel=0.1)
    assert measured["a2cid2"] == pytest.approx(continuous.accelerated_decay(8, edges), rel=0.1)
    assert measured["gain"] == pytest.approx(continuous.acceleration_gain(8, edges), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "size"), [(4, 1), pytest.param(8, 2, marks=pytest.mark.extended)]
)
def test_a2cid2_keeps_the_mean_and_the_bits_of_a_node(learners: int, size: int) -> None:
    """Through the optimizer, with momentum and gradients that are known beforehand.

    The mean of both models is that of the super learners' plain optimizers, to 1e-12. The models of super
    learners, and the second ones, are not all the same: there was something to keep.
    """
    result = run_learners(
        learners,
        TRAINING,
        env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(size), "HVD_ADPSGD_EXCHANGES_PER_STEP": "2"},
        timeout=200,
    ).checked()
    said = result.by_rank()
    print("seed", said[0]["seed"], result.stderr)
    assert len(said) == learners
    nodes: dict[int, set[tuple[str, ...]]] = {}
    for facts in said:
        nodes.setdefault(facts["super_rank"], set()).add(tuple(facts["digests"]))
        assert facts["mean_error"] < 1e-12
        assert facts["mean_model_error"] < 1e-12
        assert facts["apart"] > 1e-3
        assert facts["distance"] > 1e-3
    assert [len(bits) for bits in nodes.values()] == [1] * 4
    assert sum(facts["exchanges"] for facts in said) > 0
