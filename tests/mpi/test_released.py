"""An optimizer that nobody needs any longer gives back what it holds."""

import functools
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.launcher import Result, horovod_inside, run_learners

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

PAIRS = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
PROGRAM = Path(__file__).with_name("programs") / "released.py"
MODEL_MIB = 8
WRAPS = 12  # of programs/released.py


@functools.cache
def launched() -> dict[str, list[dict[str, Any]]]:
    # a close, or a step, that waits for the other super learner would wait beyond the launch
    waits = dict.fromkeys(("HVD_ADPSGD_DEADLINE_S", "HVD_ADPSGD_LEAVE_DEADLINE_S"), "600")
    env = {**PAIRS, **waits}
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


TRAINING = """
    import gc
    import torch
    import hvd_adpsgd.torch as hvd
    from tests.mpi.programs import learner
    from tests.mpi.programs.learner import outcome

    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(0)  # nothing is broadcast
    model = torch.nn.Linear(20, 10)

    def step(model, optimizer):
        learner.step(model, optimizer, torch.randn(4, 20))

    def train(model):
        optimizer = learner.wrap(model)
        for _ in range(5):
            step(model, optimizer)
        return optimizer

    def pause():
        with hvd.averaging_paused():
            pass

    def evaluate():
        with hvd.averaged(model):
            mean = hvd.allgather(model.weight.detach()[None])
            assert (mean == mean[0]).all(), "the mean differs between learners"

    def error_of(call):
        return outcome(call).get("error")
"""


def run(program: str, *args: str) -> Result:
    return run_learners(4, dedent(TRAINING) + dedent(program), args=args, env=PAIRS)


def test_operations_of_all_agree_on_an_optimizer_that_the_script_has_dropped() -> None:
    """A reference cycle holds it until the garbage collector runs, on learner 1 before the others."""
    program = """
        def mean():
            hvd.average_model(model)

        gc.disable()
        for act in (mean, pause, evaluate, hvd.join):
            cycle = [train(model)]
            cycle.append(cycle)
            del cycle
            if rank == 1:
                gc.collect()
            act()
        mean()
        say(rank=rank, spread=hvd.consensus_distance(model))
    """
    result = run(program).checked()
    assert [facts["spread"] for facts in result.by_rank()] == [0.0] * 4
    assert "another learner has dropped" not in result.stderr, result.report()


@pytest.mark.parametrize("holder", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_operations_of_all_agree_on_an_optimizer_that_one_learner_still_holds(holder: int) -> None:
    """Its super learner stops averaging with it, as in a job in which all learners have dropped it."""
    program = """
        holder, held, distances = int(sys.argv[1]), [], []
        kept_model = torch.nn.Linear(20, 10)
        kept = train(kept_model)  # an averaging that all hold, beside it
        acts = [lambda: hvd.average_model(model), pause, evaluate, hvd.join]
        for act in [*acts, lambda: hvd.admit(kept_model, kept)]:
            optimizer = train(model)
            if rank == holder:
                held.append(optimizer)
            del optimizer
            act()
            hvd.average_model(model)
            hvd.average_model(kept_model)
            distances.append(max(hvd.consensus_distance(m) for m in (model, kept_model)))
        say(rank=rank, distances=distances, **outcome(held[-1].step) if held else {})
    """
    for rank, facts in enumerate(run(program, str(holder)).checked().by_rank()):
        assert facts["distances"] == [0.0] * 5
        assert (facts.get("error") == "NotInitializedError") == (rank == holder), (
            "it steps on alone"
        )
        assert rank != holder or "another learner dropped its optimizer" in facts["text"]


@pytest.mark.parametrize("way", ["drop", "close"])
def test_join_refuses_models_that_differ_as_a_learner_has_dropped_the_optimizer(way: str) -> None:
    program = """
        optimizer = learner.wrap(model)
        step(model, optimizer)
        if rank == 1 and sys.argv[1] == "close":
            optimizer.close()
        elif rank == 1:
            optimizer = None
        elif rank == 0:
            step(model, optimizer)
        say(rank=rank, error=error_of(hvd.join))
    """
    errors = [facts["error"] for facts in run(program, way).checked().by_rank()]
    assert errors == ["ModelMismatchError"] * 2 + [None] * 2


def test_a_step_with_an_optimizer_that_another_learner_has_dropped_is_an_error(
    tmp_path: Path,
) -> None:
    """Also while that learner waits in an operation, and makes steps with a later optimizer."""
    program = """
        from pathlib import Path
        models = torch.nn.ModuleList(torch.nn.Linear(20, 10) for _ in range(2))
        optimizers = [hvd.DistributedOptimizer(
            torch.optim.SGD(models[i].parameters(), lr=0.01),
            named_parameters=models[i].named_parameters(prefix=str(i))) for i in range(2)]
        for i in range(2):
            step(models[i], optimizers[i])
        if rank == 0:
            del optimizers[0]
            gc.collect()
        if rank == 1:
            errors = [error_of(lambda: step(models[i], optimizers[i])) for i in (1, 0)]
        else:
            errors = [error_of(lambda: hvd.allreduce(torch.ones(1)))]
        say(rank=rank, errors=errors)
        end = Path(sys.argv[1])
        end.touch() if rank == 1 else None
        while not end.exists():  # else learner 1 would see that the others have ended
            time.sleep(1e-3)
        os._exit(0)
    """
    result = run(program, str(tmp_path / "end"))
    for rank, facts in enumerate(result.by_rank()):
        assert facts["errors"] == ["CollectiveMismatchError"] * (1 + (rank == 1)), result.report()


def test_a_pause_that_one_learner_could_not_enter_is_an_error_of_all() -> None:
    """It tries again, which is another operation than that in which the others wait."""
    program = """
        optimizer, values = learner.wrap(model), model.weight.data
        if rank == 1:
            model.weight.data = values.half()
        errors = [error_of(pause)]
        if rank == 1:
            model.weight.data = values
            errors.append(error_of(pause))
        say(rank=rank, errors=errors)
    """
    found = [facts["errors"] for facts in run(program).checked().by_rank()]
    other = ["CollectiveMismatchError"]
    assert found == [other, ["ModelMismatchError", *other], other, other]


def test_a_kept_loss_does_not_hold_the_hooks_of_a_former_optimizer() -> None:
    """It keeps the autograd nodes that they are on, which the next backward() uses again."""
    program = """
        torch.manual_seed(1 + rank)
        for phase in range(2):
            optimizer = learner.wrap(model)
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 20)).square().mean()
                loss.backward()
                optimizer.step()
        say(rank=rank, same=learner.same_inside(model.parameters()))
    """
    assert [facts["same"] for facts in run(program).checked().by_rank()] == [True] * 4
