"""What a Horovod user expects beside training: the mean for a while, and to be told of barriers."""

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import learner
import torch
from learner import digest, generator, heard, outcome, retired, same_everywhere, say, wrap

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.collectives import usage
from hvd_adpsgd.config import Config
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.torch import elastic, mpi_ops


def expanded(module: torch.nn.Module) -> torch.nn.Module:
    """The module with a buffer that torch cannot write to."""
    module.register_buffer("scale", torch.ones(1).expand(5))
    return module


def network() -> torch.nn.Module:
    torch.manual_seed(1 + hvd.super_rank())
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(), torch.nn.Linear(16, 4)
    )


@contextmanager
def training(model: torch.nn.Module, averaging: str, lr: float = 0.05) -> Iterator[Any]:
    make = functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)
    with retired(wrap(model, make, averaging=averaging)) as optimizer:
        yield optimizer


def advance(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    learner.step(model, optimizer, torch.randn(6, 8, generator=generator(step, hvd.rank())))


def every(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def mean_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """By another way: everybody tells everything, in float64."""
    world = worlds.current()
    told = world.collectives.comm.allgather([t.detach().double() for t in tensors])
    leaders = [told[group[0]] for group in world.groups]
    return [sum(ts) / len(ts) for ts in zip(*leaders, strict=True)]


def error(tensors: list[torch.Tensor], means: list[torch.Tensor]) -> float:
    return max(float((t.double() - m).abs().max()) for t, m in zip(tensors, means, strict=True))


def averaged(where: str, averaging: str) -> None:
    """The mean inside, one's own afterwards; with a second model, nested, and left by an exception."""
    model, copy = network(), expanded(network())
    with training(model, averaging) as optimizer:
        for step in range(4):
            advance(model, optimizer, step)
        parameters = [*model.parameters(), *copy.parameters()]
        with hvd.averaging_paused():  # nothing is pending
            means, all_means = mean_of(parameters), mean_of([*parameters, model[1].running_var])
        own = [digest(every(model)), digest(every(copy))]
        facts: dict[str, Any] = {}
        try:
            with hvd.averaged(model, copy):
                facts["error"] = error(parameters, means)
                facts["same"] = same_everywhere(parameters)
                facts["buffers_own"] = digest(model.buffers()) != digest(network().buffers())
                hvd.allreduce(torch.ones(1), name="loss")
                with hvd.averaged(model, buffers=True):
                    facts["nested"] = error([*parameters, model[1].running_var], all_means)
                    model(torch.ones(6, 8))  # changes the buffers
                inner = error(parameters, means)
                facts["nested"] = max(facts["nested"], inner)
                if hvd.super_size() < hvd.size():  # else Horovod reduces nothing, and asks nobody
                    facts["backward"] = outcome(lambda: model(torch.ones(6, 8)).sum().backward())
                facts["refused"] = [
                    outcome(call).get("error")
                    for call in (optimizer.step, lambda: hvd.average_model(model))
                ]
                model.double().float()  # replaces the memory of every parameter
                raise KeyError("on purpose")
        except KeyError:
            pass
        facts["back"] = [digest(every(model)), digest(every(copy))] == own
        advance(model, optimizer, 4)
    say(case=f"{where}/averaged/{averaging}", **facts)


def of_the_run(where: str) -> None:
    """Super learner 0 waits at the block while the others exchange with it: the mean is as it was."""
    model = network()
    means = mean_of(list(model.parameters()))
    with training(model, "random_pairs", lr=0.0) as optimizer:  # exchanges alone change the models
        engine = optimizer._averaging.engine
        for step in range(3 if hvd.super_rank() == 0 else 20):
            advance(model, optimizer, step)
            if engine.loop is not None and hvd.super_rank():
                engine.loop.wait_finished(step, 5.0)
        own = digest(model.parameters())
        with hvd.averaged(model):
            found = error(list(model.parameters()), means)
            same = same_everywhere(model.parameters())
        back = digest(model.parameters()) == own
        advance(model, optimizer, 20)  # exchanges go on
    say(case=f"{where}/of the run", error=found, same=same, back=back)


def undisturbed() -> None:
    """Training in step, with and without looking at the mean between its steps, ends alike."""
    ends = []
    for looks in (False, True):
        model = network()
        torch.manual_seed(7 + hvd.rank())  # of dropout
        with training(model, "periodic_averaging:period=2") as optimizer:
            for step in range(7):
                advance(model, optimizer, step)
                if looks:
                    with hvd.averaged(model, buffers=True):
                        model.eval()
                        model(torch.ones(2, 8))
                        model.train()
            momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
            grads = [p.grad for p in model.parameters()]
            state = [*every(model), *momentum, *grads, torch.get_rng_state()]
            ends.append(digest(state) + str([p.requires_grad for p in model.parameters()]))
    say(case="undisturbed", alike=ends[0] == ends[1])


def not_finite(policy: str) -> None:
    last = hvd.super_size() - 1
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan") if hvd.super_rank() == last else 3.0)
    before, inside = digest(model.parameters()), []

    def look() -> None:
        with hvd.averaged(model):
            inside.append(float(model.weight.detach()[0, 0]))

    told = outcome(look)
    kept = digest(model.parameters()) == before
    say(case=f"not finite/{policy}", kept=kept, inside=inside, **told)


def synchronous() -> None:
    """A metric in every step: one warning. In the super learner, or seldom: none."""
    model = network()
    with training(model, "random_pairs") as optimizer, heard(logging.WARNING) as warned:
        for mode in ("seldom", "inner", "every"):
            warned.clear()
            usage.tally = usage._Tally()
            before = hvd.metrics()
            for step in range(2 * usage.WINDOW):
                advance(model, optimizer, step)
                loss = torch.ones(1)
                if mode == "inner":
                    hvd.allreduce(loss, name="loss", process_set=hvd.super_learner)
                elif mode == "every" or step % 10 == 9:
                    hvd.allreduce(loss, name="loss")
            after = hvd.metrics()
            say(
                case=f"synchronous/{mode}",
                told=[line for line in warned if "operations over all learners in" in line],
                count=after["global_operations"] - before["global_operations"],
                seconds=after["global_operations_s"] - before["global_operations_s"],
            )


def names() -> None:
    """What Horovod's modules have beside what horovod.torch shows."""
    say(
        case="names",
        homogeneous=mpi_ops.is_homogeneous(),
        powers=[mpi_ops.num_rank_is_power_2(n) for n in (3, 4)],
        gpu=mpi_ops.gpu_available("torch"),
        average=mpi_ops.handle_average_backwards_compatibility(None, True) == hvd.Average,
        modules=[elastic.state.__name__, elastic.sampler.__name__],
        functions=[elastic.init is hvd.init, elastic.shutdown is hvd.shutdown],
        timeline=os.environ.get("HOROVOD_TIMELINE"),
    )


def main() -> None:
    torch.set_num_threads(1)
    for k, policy in ((2, "raise"), (1, "skip")):
        hvd.init(config=Config(super_learner_size=k, nonfinite=policy))
        for averaging in ("random_pairs", "delay_by_one"):
            averaged(f"{hvd.super_size()}x{k}", averaging)
        of_the_run(f"{hvd.super_size()}x{k}")
        not_finite(policy)
        if k == 2:
            undisturbed()
            synchronous()
            names()
        hvd.shutdown()
        os.environ.pop("HOROVOD_TIMELINE", None)


if __name__ == "__main__":
    main()
