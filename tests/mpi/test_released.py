"""An optimizer that nobody needs any longer gives back what it holds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "released.py"
MODEL_MIB = 4
WRAPS = 20  # of programs/released.py


@functools.cache
def said(case: str) -> list[dict[str, Any]]:
    everything = launched()
    return [facts for facts in everything if facts["case"] == case]


@functools.cache
def launched() -> list[dict[str, Any]]:
    # a close, or a step, that waits for the other super learner would wait beyond the launch
    waits = dict.fromkeys(("HVD_ADPSGD_DEADLINE_S", "HVD_ADPSGD_LEAVE_DEADLINE_S"), "600")
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", **waits}
    return run_learners(4, PROGRAM, env=env).checked().said


def test_dropped_optimizers_give_back_thread_descriptors_and_memory() -> None:
    assert len(said("dropped")) == 4
    for facts in said("dropped"):
        before, after = facts["before"], facts["after"]
        assert len(after["threads"]) <= len(before["threads"]), facts
        assert after["descriptors"] <= before["descriptors"], facts
        # Communicators are freed when all learners meet in shutdown(): 1 to 1.5 MiB of each wrap stays.
        # A mirror or a slot that stayed would be a model each.
        assert after["mib"] - before["mib"] < WRAPS * MODEL_MIB / 2, facts


def test_close_gives_back_at_once_and_its_peers_train_on() -> None:
    assert len(said("closed")) == 4
    for facts in said("closed"):
        before, after = facts["before"], facts["after"]
        assert before["threads"].count("adpsgd-engine") == facts["leads"], facts
        assert "adpsgd-engine" not in after["threads"], facts
        assert after["descriptors"] < before["descriptors"], facts
        assert facts["error"] == "NotInitializedError", facts
        assert "optimizer.close()" in facts["text"]


def test_a_collection_on_any_thread_waits_for_nothing() -> None:
    """The engine stops later, in the next operation over all learners."""
    assert len(said("collected")) == 4
    for facts in said("collected"):
        assert not facts["hangs"], facts
        assert "adpsgd-engine" not in facts["after"]["threads"], facts


def test_operations_of_all_agree_on_an_optimizer_that_the_script_has_dropped() -> None:
    """A reference cycle holds it until the garbage collector runs, here on learner 1 before the others."""
    program = """
        import gc
        import torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        gc.disable()
        model = torch.nn.Linear(20, 10)

        def train():
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4, 20)).square().mean().backward()
                optimizer.step()

        def mean():
            hvd.average_model(model)

        def pause():
            with hvd.averaging_paused():
                pass

        def evaluate():
            with hvd.averaged(model):
                pass

        for act in (mean, pause, evaluate, hvd.join):
            train()
            if hvd.rank() == 1:
                gc.collect()
            act()
        hvd.average_model(model)
        say(rank=hvd.rank(), spread=hvd.consensus_distance(model))
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    told = run_learners(4, program, env=env).checked().by_rank()
    assert [facts["spread"] for facts in told] == [0.0] * 4


@pytest.mark.parametrize("holder", [0, 1])
def test_operations_of_all_agree_on_an_optimizer_that_one_learner_still_holds(holder: int) -> None:
    """Its super learner stops averaging with it, as in a job in which all learners have dropped it."""
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.errors import NotInitializedError
        hvd.init()
        rank, holder = hvd.rank(), int(sys.argv[1])
        model = torch.nn.Linear(20, 10)
        held, told = [], []

        def train(model):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4, 20)).square().mean().backward()
                optimizer.step()
            return optimizer

        def pause():
            with hvd.averaging_paused():
                pass

        def evaluate():
            with hvd.averaged(model):
                mean = hvd.allgather(model.weight.detach()[None])
                assert (mean == mean[0]).all(), "the mean differs between learners"

        everybody = torch.nn.Linear(20, 10)
        stays = train(everybody)  # an averaging that all hold, beside it
        acts = {"average_model": lambda: hvd.average_model(model), "averaging_paused": pause,
                "averaged": evaluate, "join": hvd.join, "admit": lambda: hvd.admit(everybody, stays)}
        for name, act in acts.items():
            optimizer = train(model)
            if rank == holder:
                held.append(optimizer)
            del optimizer
            act()
            hvd.average_model(model)
            hvd.average_model(everybody)
            told.append(max(hvd.consensus_distance(m) for m in (model, everybody)))
        try:
            if rank == holder:
                held[-1].step()
        except NotInitializedError as error:
            assert "another learner dropped its optimizer" in str(error), error
        else:
            assert rank != holder, "the optimizer steps on alone"
        say(rank=rank, distances=told)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    told = run_learners(4, program, args=[str(holder)], env=env).checked().by_rank()
    assert [facts["distances"] for facts in told] == [[0.0] * 5] * 4
