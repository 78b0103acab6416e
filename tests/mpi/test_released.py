"""An optimizer that nobody needs any longer gives back what it holds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import horovod_inside, run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "released.py"
MODEL_MIB = 8
WRAPS = 12  # of programs/released.py


@functools.cache
def launched() -> dict[str, list[dict[str, Any]]]:
    # a close, or a step, that waits for the other super learner would wait beyond the launch
    waits = dict.fromkeys(("HVD_ADPSGD_DEADLINE_S", "HVD_ADPSGD_LEAVE_DEADLINE_S"), "600")
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2", **waits}
    if not horovod_inside():  # or malloc keeps what a thread has freed of gradients
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    return run_learners(4, PROGRAM, env=env).checked().by_case()


def test_dropped_optimizers_give_back_thread_descriptors_and_memory() -> None:
    assert len(launched()["dropped"]) == 4
    for facts in launched()["dropped"]:
        before, after = facts["before"], facts["after"]
        assert len(after["threads"]) <= len(before["threads"]), facts
        assert after["descriptors"] <= before["descriptors"], facts
        # Communicators are freed when all learners meet in shutdown(): 1 to 2 MiB of each wrap kept.
        # A mirror or a slot that stayed would be a model each.
        assert after["mib"] - before["mib"] < WRAPS * MODEL_MIB / 2, facts


def test_close_gives_back_at_once_and_its_peers_train_on() -> None:
    assert len(launched()["closed"]) == 4
    for facts in launched()["closed"]:
        before, after = facts["before"], facts["after"]
        assert before["threads"].count("adpsgd-engine") == facts["leads"], facts
        assert "adpsgd-engine" not in after["threads"], facts
        assert after["descriptors"] < before["descriptors"], facts
        assert facts["error"] == "NotInitializedError", facts
        assert "optimizer.close()" in facts["text"]


def test_a_collection_on_any_thread_waits_for_nothing() -> None:
    """The engine stops later, in the next operation over all learners."""
    assert len(launched()["collected"]) == 4
    for facts in launched()["collected"]:
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


@pytest.mark.parametrize("holder", [pytest.param(0, marks=pytest.mark.extended), 1])
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

        kept_model = torch.nn.Linear(20, 10)
        kept = train(kept_model)  # an averaging that all hold, beside it
        acts = {"average_model": lambda: hvd.average_model(model), "averaging_paused": pause,
                "averaged": evaluate, "join": hvd.join, "admit": lambda: hvd.admit(kept_model, kept)}
        for name, act in acts.items():
            optimizer = train(model)
            if rank == holder:
                held.append(optimizer)
            del optimizer
            act()
            hvd.average_model(model)
            hvd.average_model(kept_model)
            told.append(max(hvd.consensus_distance(m) for m in (model, kept_model)))
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


@pytest.mark.parametrize("way", ["drop", "close"])
def test_join_refuses_models_that_differ_as_a_learner_has_dropped_the_optimizer(way: str) -> None:
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.errors import ModelMismatchError
        hvd.init()
        model = torch.nn.Linear(20, 10)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())

        def step():
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()

        step()
        if hvd.rank() == 1 and sys.argv[1] == "close":
            optimizer.close()
        elif hvd.rank() == 1:
            optimizer = None
        elif hvd.rank() == 0:
            step()
        try:
            hvd.join()
            refused = False
        except ModelMismatchError:
            refused = True
        say(rank=hvd.rank(), refused=refused)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    told = run_learners(4, program, args=[way], env=env).checked().by_rank()
    assert [facts["refused"] for facts in told] == [True, True, False, False]


def test_a_step_with_an_optimizer_that_another_learner_has_dropped_is_an_error(
    tmp_path: Path,
) -> None:
    """Also while that learner waits in an operation, and makes steps with a later optimizer."""
    program = """
        from pathlib import Path
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.errors import CollectiveMismatchError
        hvd.init()
        models = [torch.nn.Linear(20, 10) for _ in range(2)]
        first, second = (hvd.DistributedOptimizer(
            torch.optim.SGD(models[i].parameters(), lr=0.01),
            named_parameters=models[i].named_parameters(prefix=str(i))) for i in range(2))

        def step(i, optimizer):
            optimizer.zero_grad()
            models[i](torch.randn(4, 20)).square().mean().backward()
            optimizer.step()

        step(0, first)
        step(1, second)
        optimizers, rank = [first, second], hvd.rank()
        del first, second
        told = []
        if rank == 0:
            import gc
            del optimizers[0]
            gc.collect()
            try:
                hvd.allreduce(torch.ones(1))
            except CollectiveMismatchError:
                told.append("operation")
        else:
            for i in (1, 0) if rank == 1 else ():
                try:
                    step(i, optimizers[i])
                except CollectiveMismatchError:
                    told.append(i)
            if rank > 1:
                try:
                    hvd.allreduce(torch.ones(1))
                except CollectiveMismatchError:
                    told.append("operation")
        say(rank=rank, told=told)
        end = Path(sys.argv[1])
        end.touch() if rank == 1 else None
        while not end.exists():  # else learner 1 would see that the others have ended
            time.sleep(1e-3)
        os._exit(0)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    result = run_learners(4, program, args=[str(tmp_path / "end")], env=env)
    told = {facts["rank"]: facts["told"] for facts in result.said}
    other = ["operation"]
    assert told == {0: other, 1: [1, 0], 2: other, 3: other}, result.report()


def test_a_pause_that_one_learner_could_not_enter_is_an_error_of_all() -> None:
    """It tries again, which is another operation than that in which the others wait."""
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        from hvd_adpsgd.errors import CollectiveMismatchError, ModelMismatchError
        hvd.init()
        model = torch.nn.Linear(20, 10)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters())
        told = []
        if hvd.rank() == 1:
            values = model.weight.data
            model.weight.data = values.half()
        for _ in range(2):
            try:
                with hvd.averaging_paused():
                    told.append("entered")
                break
            except (CollectiveMismatchError, ModelMismatchError) as error:
                told.append(type(error).__name__)
                model.weight.data = values if hvd.rank() == 1 else model.weight.data
                if hvd.rank() != 1:
                    break
        say(rank=hvd.rank(), told=told)
    """
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    told = run_learners(4, program, env=env).checked().by_rank()
    other = ["CollectiveMismatchError"]
    mine = ["ModelMismatchError", "CollectiveMismatchError"]
    assert [facts["told"] for facts in told] == [other, mine, other, other]


def test_a_kept_loss_does_not_hold_the_hooks_of_a_former_optimizer() -> None:
    """It keeps the autograd nodes that they are on, which the next backward() uses again."""
    program = """
        import torch
        import hvd_adpsgd.torch as hvd

        hvd.init()
        torch.manual_seed(hvd.super_rank())
        model = torch.nn.Linear(5, 2)
        for phase in range(2):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters())
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 5)).square().mean()
                loss.backward()
                optimizer.step()
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        node = hvd.allgather(mine[None], process_set=hvd.super_learner)
        say(rank=hvd.rank(), same=bool((node == node[0]).all()))
    """
    result = run_learners(4, program, env={"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}).checked()
    assert [facts["same"] for facts in result.by_rank()] == [True] * 4
