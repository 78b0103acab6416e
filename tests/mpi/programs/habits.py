"""What scripts do beside the straight path, on 4 learners: skipped steps, states loaded in mid-run.

Arguments: the schemes in step with which steps are skipped.
The gradient of learner r in step k is known (`gradient`), so that of the mean of all is, too.
"""

import functools
import logging
import sys
import time
import warnings
from contextlib import contextmanager
from typing import Any

import torch
from learner import SEED, digest, heard, outcome, retired, same_inside, say, wrap
from mpi4py import MPI

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine import step_rounds
from hvd_adpsgd.launch import world as worlds

SIZE = 70_001  # more than one chunk of 64 KiB
LR = 0.25
HEARD = heard()
TOLD = HEARD.__enter__()  # until the end of the program


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.sin(1 + 3 * step + 5 * rank + 0.37 * torch.arange(SIZE, dtype=torch.float64))


def mean_gradient(ranks: list[int], step: int) -> torch.Tensor:
    return torch.stack([gradient(rank, step) for rank in ranks]).mean(dim=0)


def vector(value: float = 0.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((SIZE,), value, dtype=torch.float64))


def module(p: torch.nn.Parameter) -> torch.nn.ParameterList:
    return torch.nn.ParameterList([p])


@contextmanager
def training(spec: str, parameters: Any, **how: Any) -> Any:
    model = torch.nn.ParameterList(parameters)
    make = functools.partial(torch.optim.SGD, lr=LR)
    with retired(wrap(model, make, averaging=spec, **how)) as optimizer:
        yield optimizer


def backward(p: torch.nn.Parameter, step: int) -> None:
    (p * gradient(hvd.rank(), step)).sum().backward()


def advance(p: torch.nn.Parameter, step: int, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(p, step)
    optimizer.step()


def skipped(where: str) -> None:
    """Super learner 0 skips some steps as GradScaler does, also before all wait for each other."""
    for spec in sys.argv[1:]:
        p = vector()
        with training(spec, [p]) as optimizer:
            expected = torch.zeros(SIZE, dtype=torch.float64)
            for step in range(12):
                optimizer.zero_grad()
                backward(p, step)
                optimizer.synchronize()
                if step == 9:  # a norm of all gradients, for instance; its step still comes
                    hvd.allreduce(torch.ones(1), name=f"between.{spec}")
                out = [0] if step in (2, 3, 7, 11) else []
                if hvd.super_rank() not in out:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                for i, group in enumerate(worlds.current().groups):
                    if i not in out:
                        expected -= LR * mean_gradient(list(group), step) / hvd.super_size()
                if step == 7:  # the others are in a round, or past it
                    hvd.allreduce(torch.ones(1), name=f"epoch.{spec}")
            same = same_inside([p])
            hvd.average_model(module(p))
            rounds = optimizer._averaging.step
        error = float((p.detach() - expected).abs().max())
        say(case=f"{where}/skipped/{spec}", error=error, rounds=rounds, same=same)


def skipped_late(where: str) -> None:
    """Gradients that are used one step late cannot be skipped."""
    p = vector()
    with training("delayed_gradients", [p]) as optimizer:

        def skip() -> None:
            for step in range(2):
                optimizer.zero_grad()
                backward(p, step)
                optimizer.synchronize()
            hvd.allreduce(torch.ones(1), name="late")

        say(case=f"{where}/skipped late", **outcome(skip))


def evaluated_twice(where: str) -> None:
    """A closure that is called twice, and a second synchronize(), are one step."""
    for how in ("closure", "synchronize"):
        p = vector()
        with training("periodic_averaging:period=2", [p]) as optimizer:
            apart = []
            for step in range(4):
                optimizer.zero_grad()
                if how == "closure":

                    def closure(p: Any = p, step: int = step, optimizer: Any = optimizer) -> None:
                        for _ in range(2):
                            optimizer.zero_grad()
                            backward(p, step)
                            optimizer.synchronize()

                    with optimizer.skip_synchronize():
                        optimizer.step(closure)
                else:
                    backward(p, step)
                    optimizer.synchronize()
                    optimizer.synchronize()
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")  # nothing is averaged again
                        optimizer.step()
                apart.append(len(set(worlds.current().collectives.comm.allgather(digest([p])))) > 1)
        say(case=f"{where}/twice/{how}", apart=apart)


class Told(logging.Handler):
    """Tells the first leader of this one's warning that it waits."""

    def emit(self, record: logging.LogRecord) -> None:
        if hvd.is_leader() and "has waited" in record.getMessage():
            MPI.COMM_WORLD.send(None, worlds.current().groups[0][0], tag=hvd.super_size())


def until_told() -> None:
    """Wait, 60 s at most, until all other leaders have warned."""
    ends = time.monotonic() + 60
    for leader, *_ in worlds.current().groups[1:]:
        while not MPI.COMM_WORLD.iprobe(leader, tag=hvd.super_size()):
            assert time.monotonic() < ends, f"learner {leader} has not said that it waits"
            time.sleep(0.01)
        MPI.COMM_WORLD.recv(None, leader, tag=hvd.super_size())


def waited_for(where: str) -> None:
    """The first leader is late until the others have said that they wait."""
    step_rounds._PATIENCE_S, patience = 0.5, step_rounds._PATIENCE_S
    log, teller, steps, p = logging.getLogger("hvd_adpsgd"), Told(), [], vector()
    log.addHandler(teller)
    with training("delay_by_one", [p]) as optimizer:
        for step in range(4):  # the third needs the round after the second
            if step == 2 and hvd.rank() == 0:
                until_told()
                time.sleep(0.5)  # in which a second line of the same wait would come
            TOLD.clear()
            began = time.monotonic()
            advance(p, step, optimizer)
            steps.append({"told": list(TOLD), "took": time.monotonic() - began})
    log.removeHandler(teller)
    step_rounds._PATIENCE_S = patience
    say(case=f"{where}/waited", steps=steps)


def nested(where: str) -> None:
    """The inner end of a pause does not set the engine going."""
    p = vector()
    with training("random_pairs", [p]) as optimizer:
        advance(p, 0, optimizer)
        paused = []
        with hvd.averaging_paused():
            with hvd.averaging_paused():
                pass
            paused.append(optimizer._averaging.engine.view().get("paused"))
            hvd.average_model(module(p))
            paused.append(optimizer._averaging.engine.view().get("paused"))
        paused.append(optimizer._averaging.engine.view().get("paused"))
    say(case=f"{where}/nested", paused=paused if hvd.is_leader() else [True, True, False])


def not_finite(where: str, n: int) -> None:
    """average_model when the last super learner has diverged, and when all have."""
    for diverged in ([n - 1], list(range(n))):
        p = vector(float("nan") if hvd.super_rank() in diverged else 1.0 + hvd.super_rank())
        before = digest([p])
        told = outcome(lambda p=p: hvd.average_model(module(p)))
        say(
            case=f"{where}/nan/{len(diverged)}",
            kept=digest([p]) == before,
            value=float(p.detach()[0]),
            **told,
        )
    p = vector(float("nan") if hvd.super_rank() == n - 1 else 1.0)
    before, mine = digest([p]), float(hvd.super_rank() == n - 1)
    told = outcome(lambda: hvd.average_model(module(p), weight=mine))
    say(case=f"{where}/nan/weighted", kept=digest([p]) == before, **told)


def odd_buffers(where: str, n: int) -> None:
    """Infinite and unequal ones, caches, and elements whose sum is beyond their dtype's range."""
    me = hvd.super_rank()
    first, last = me == 0, me == n - 1
    kept = {
        "mask": torch.full((3, 3), -torch.inf).triu(1),
        f"shape_{where}": torch.full((2 + hvd.rank(),), 1.0 * me),
        "frozen": torch.tensor([torch.inf, 1.0]),
        "cache": torch.tensor([1.0 + me]),
    }
    some = {f"observed_{where}": torch.tensor([torch.inf if first else 1.0 + me])}
    huge = {
        str(dtype): torch.full((SIZE,), torch.finfo(dtype).max * (1 if last else -1), dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    }
    model = torch.nn.Linear(2, 1)
    model.weight.data.fill_(float(me))
    model.register_parameter("frozen", torch.nn.Parameter(kept["frozen"], requires_grad=False))
    for name, buffer in {**kept, **some, **huge}.items():
        if name != "frozen":
            model.register_buffer(name.replace(".", ""), buffer, persistent=name != "cache")
    before, means = [digest([each]) for each in kept.values()], {}

    def look(what: str) -> None:
        means[what] = [
            float(model.weight[0, 0]),
            *(float(t[0]) for t in (*some.values(), *huge.values())),
        ]
        means[what].append([digest([each]) for each in kept.values()] == before)

    TOLD.clear()
    with hvd.averaged(model, buffers=True):
        look("averaged")
    with hvd.averaged(model):
        look("without buffers")
    distance = hvd.consensus_distance(model)
    hvd.average_model(model, buffers=False)
    look("average_model without buffers")
    hvd.average_model(model)
    look("average_model")
    say(case=f"{where}/odd", means=means, told=list(TOLD), distance=str(distance))


def buffers(where: str) -> None:
    """They get the plain mean, whatever the scheme does to what is trained."""
    for spec in ("periodic_averaging:period=2,block_momentum=0.9,nesterov=1", "noloco:period=2"):
        p, variance = vector(), torch.zeros(3)
        with training(spec, [p], buffers=[("variance", variance)]) as optimizer:
            seen = []
            for step in range(8):
                variance.fill_(1.0 / (1 + step) + hvd.super_rank())
                advance(p, step, optimizer)
                seen.append(variance.tolist())
        say(case=f"{where}/buffers/{spec}", seen=seen)


def frozen(where: str) -> None:
    """What is frozen in mid-run is averaged on, and stays then: no momentum carries it further."""
    specs = (
        "periodic_averaging:period=2,block_momentum=0.9",
        "periodic_averaging:period=2,block_momentum=0.9,nesterov=1",
        "noloco:period=1,rate=1,momentum=0.9",
        "delayed_gradients",
    )
    for spec in specs:
        p, q = vector(), vector()
        with training(spec, [p, q]) as optimizer:
            moved = []
            for step in range(16):
                if step == 4:
                    q.requires_grad_(False)
                    q.grad = None
                before = digest([q])
                optimizer.zero_grad()
                backward(p, step)
                if q.requires_grad:
                    backward(q, step)
                optimizer.step()
                moved.append(digest([q]) != before)
        say(case=f"{where}/frozen/{spec}", moved=moved)


def loaded(where: str, kept: dict[str, Any]) -> None:
    """States that are of no use here: the scheme starts anew with the model loaded."""
    states = {"another scheme": {"strategy": "fixed_ring", "step": 3, "rule": {}}, "plain": None}
    states |= {f"{place} {spec}": state for (place, spec), state in kept.items()}
    states |= {f"older {name}": older(state) for name, state in states.items() if "4x1" in name}
    for spec in ("noloco:period=50", "periodic_averaging:period=50,block_momentum=0.5"):
        for name, state in {**states, **damaged(spec)}.items():
            p = vector()
            with training(spec, [p]) as optimizer:
                for step in range(3):
                    advance(p, step, optimizer)
                TOLD.clear()
                whole = optimizer.state_dict()
                whole.pop("averaging")
                if state is not None:
                    whole["averaging"] = state
                with hvd.averaging_paused(), torch.no_grad():
                    p.fill_(5.0)
                    optimizer.load_state_dict(whole)
                with optimizer._averaging.stepping(optimizer.param_groups):
                    held = optimizer._averaging.rule.tensors()
            means = {key: float(value[0].mean()) for key, value in held.items()}
            say(case=f"{where}/loaded/{spec}/{name}", told=list(TOLD), held=means)


def damaged(spec: str) -> dict[str, Any]:
    """What may become of a state in a file."""
    held = ("slow", "momentum", "global", "start", "delta")
    return {
        "damaged step": {"strategy": spec, "step": -5, "rule": {}},
        "damaged keys": {"strategy": spec, "step": 3},
        "damaged shapes": {"strategy": spec, "step": 3, "rule": {key: [] for key in held}},
        "damaged kind": [1, 2],
    }


def older(state: dict[str, Any]) -> dict[str, Any]:
    """As it was written before there was warm_up."""
    return {**state, "strategy": state["strategy"].replace(",warm_up=0", "")}


def keep(where: str, kept: dict[str, Any]) -> None:
    """The states of this super learner after rounds."""
    for spec in ("noloco:period=50", "periodic_averaging:period=50,block_momentum=0.5"):
        p = vector()
        with training(spec, [p]) as optimizer:
            for step in range(51):
                advance(p, step, optimizer)
            with hvd.averaging_paused():
                kept[where, spec] = optimizer.state_dict()["averaging"]


def outside(where: str) -> None:
    """A state loaded while exchanges may be on their way."""
    p = vector()
    with training("random_pairs", [p]) as optimizer:
        state = optimizer.state_dict()
        told = []
        for step in range(2):
            TOLD.clear()
            optimizer.load_state_dict(state)
            told.append(list(TOLD))
            advance(p, step, optimizer)
        TOLD.clear()
        with hvd.averaging_paused():
            optimizer.load_state_dict(state)
        told.append(list(TOLD))
    say(case=f"{where}/outside", told=told)


def main() -> None:
    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    for k in (1, 2):
        hvd.init(config=Config(super_learner_size=k, chunk_kib=64))
        where, n = f"{hvd.super_size()}x{k}", hvd.super_size()
        skipped(where)
        evaluated_twice(where)
        waited_for(where)
        nested(where)
        not_finite(f"{where}/raise", n)
        odd_buffers(where, n)
        buffers(where)
        frozen(where)
        keep(where, kept)
        loaded(where, kept)
        outside(where)
        skipped_late(where)  # the last: it leaves a step half made
        hvd.shutdown()
        hvd.init(config=Config(super_learner_size=k, nonfinite="skip"))
        not_finite(f"{where}/skip", n)
        hvd.shutdown()


if __name__ == "__main__":
    print("seed", SEED, file=sys.stderr)
    main()
