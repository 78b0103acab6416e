"""What a script holds of its optimizer, on 2 learners: over two super learners, and with one (plain Horovod).

Schedulers of every kind, made before and after each call, against plain torch; then what else is held.
"""

import copy
import gc
import types
import warnings
from typing import Any

import torch
from learner import outcome, retired, say

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config
from tests.schedulers import MAKE, optimizers, rates, trace

CALLS = ("wrap", "broadcast", "load", "load the plain one")


def wrap(plain: Any, **how: Any) -> Any:
    named = [
        (f"{i}.{j}", p)
        for i, group in enumerate(plain.param_groups)
        for j, p in enumerate(group["params"])
    ]
    return hvd.DistributedOptimizer(plain, named_parameters=named, **how)


def followed(plain: Any, made_after: int, of_wrapped: bool, distributed: bool) -> list[Any]:
    """The rates of all steps; schedulers are made after that many of the calls."""
    optimizer, schedulers, found = plain, [], []
    for done in range(len(CALLS) + 1):
        if done == made_after:
            on = optimizer if of_wrapped else plain
            schedulers = [make(on) for make in MAKE.values()]
        if done:  # from plain Horovod's first step on, as torch warns of schedulers that step first
            found += [trace(optimizer, schedulers, step) for step in range(2)]
        call = CALLS[done] if done < len(CALLS) else ""
        if call == "wrap" and distributed:
            optimizer = wrap(plain)
        if call == "broadcast" and distributed:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if call.startswith("load"):
            loads = plain if call.endswith("one") else optimizer
            loads.load_state_dict(copy.deepcopy(loads.state_dict()))
    if distributed:
        optimizer.close()
    return found


def schedules(where: str) -> None:
    for made_after in range(len(CALLS) + 1):
        for of_wrapped in (False, True)[: 1 + (made_after > 0)]:
            plains = zip(optimizers(), optimizers(), strict=True)
            for (name, mine), (_, expected) in plains:
                with warnings.catch_warnings(record=True) as warned:
                    found = followed(mine, made_after, of_wrapped, True)
                told = [
                    str(one.message) for one in warned if "optimizer.step()" in str(one.message)
                ]
                same = found == followed(expected, made_after, of_wrapped, False)
                case = f"{where}/{made_after} {'wrapped' if of_wrapped else 'plain'} {name}"
                say(case=case, same=same, told=told)


def sgd(**options: Any) -> Any:
    p = torch.nn.Parameter(torch.ones(3))
    return torch.optim.SGD([p], **{"lr": 0.1, "momentum": 0.5, **options})


def step(optimizer: Any, value: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, value)
    optimizer.step()


def root_counts(where: str) -> None:
    """The root has another rate, and a state: all have them, in the objects that they hold."""
    rank = hvd.rank()
    for momentum in (0.0, 0.5):
        plain = sgd(lr=0.1 if rank == 0 else 0.3, momentum=momentum)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
        step(plain, 1.0 + rank)
        with retired(wrap(plain)) as w:
            group, held = w.param_groups[0], dict(plain.state[group_of(w)])
            hvd.broadcast_optimizer_state(w, root_rank=0)
            kept = w.param_groups[0] is group is plain.param_groups[0] and w.state is plain.state
            now = w.state[group_of(w)]
            kept = kept and all(now[k] is v for k, v in held.items() if v is not None)
            buffers = [v.tolist() for v in now.values() if v is not None]
            step(w)
            scheduler.step()
            say(case=f"{where}/root {momentum}", kept=kept, rate=group["lr"], buffers=buffers)


def group_of(optimizer: Any) -> torch.nn.Parameter:
    first: torch.nn.Parameter = optimizer.param_groups[0]["params"][0]
    return first


class Demanding(torch.optim.SGD):
    """Its constructor needs an argument, and keeps it."""

    def __init__(self, params: Any, *, limit: float):
        super().__init__(params, lr=0.1)
        self.limit = limit


class Around(torch.optim.Optimizer):
    """Around another one, as Lookahead is; without torch's constructor."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base, self.defaults = base, base.defaults
        self.param_groups, self.state = base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def carried(where: str) -> None:
    """What the plain optimizer has when it is wrapped."""
    facts: dict[str, Any] = {}
    plain = sgd()
    step(plain, 3.0)
    called: list[str] = []
    removed = plain.register_step_pre_hook(lambda *_: called.append("removed"))
    plain.register_step_pre_hook(lambda *_: called.append("pre"))
    plain.register_step_post_hook(lambda *_: called.append("post"))
    plain.register_state_dict_post_hook(lambda o, state: {**state, "more": 1})
    plain.limit = 5
    with retired(wrap(plain)) as w:
        facts["buffer"] = w.state[group_of(w)]["momentum_buffer"].tolist()
        facts["limit"] = w.limit  # type: ignore[attr-defined]
        facts["more"] = w.state_dict()["more"]
        removed.remove()
        w.load_state_dict(w.state_dict())  # torch looks for the hooks of the class again
        step(w)
        facts["called"] = called
    adagrad = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(1))], initial_accumulator_value=7)
    with retired(wrap(adagrad)) as w:
        facts["sum"] = float(w.state[group_of(w)]["sum"])
    with retired(wrap(Demanding([torch.nn.Parameter(torch.ones(1))], limit=2.5))) as w:
        step(w)
        facts["demanding"] = w.limit  # type: ignore[attr-defined]
    with retired(wrap(Around(sgd(lr=1.0, momentum=0.0)))) as w:
        step(w, 0.25)
        facts["around"] = group_of(w).tolist()
    say(case=f"{where}/carried", **facts)


def derived(where: str) -> None:
    """Lightning derives from the wrapped class; its object shares the attributes of the wrapped one."""
    with retired(wrap(sgd())) as w:
        kind = type("Derived", (type(w), torch.optim.SGD), {})
        other = kind.__new__(kind)
        vars(other).update(vars(w))
        other.load_state_dict(other.state_dict())
        step(other)
        other.zero_grad(set_to_none=False)
        group = {"params": [torch.nn.Parameter(torch.ones(2))]}
        w.add_param_group(group)
        say(case=f"{where}/derived", grad=group_of(w).grad.tolist(), groups=len(rates(w)))


def backward_then_load(where: str) -> None:
    """Gradients wait for a step; a state is loaded; zero_grad and the next step go on."""
    plain = sgd(lr=1.0, momentum=0.0)
    p = group_of(plain)
    with retired(wrap(plain)) as w:
        for factor in (1.0, 2.0, 3.0):
            (p * factor * (1 + hvd.rank())).sum().backward()
            if factor < 3:
                w.load_state_dict(w.state_dict())
                w.zero_grad()
        w.step()
        say(case=f"{where}/backward then load", moved=(1 - p.detach()).tolist())


def grown(where: str) -> None:
    """A group is added; then a list of groups, with one more parameter, is set before a load."""
    plain = sgd(lr=1.0, momentum=0.0)
    first, second, third = group_of(plain), *(torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with retired(wrap(plain)) as w:
        w.add_param_group({"params": [second]})
        w.param_groups = [{**g} for g in w.param_groups]
        w.param_groups[1]["params"] = [second, third]
        w.load_state_dict(w.state_dict())
        (torch.stack([first, second, third]) * (1 + hvd.rank())).sum().backward()
        w.step()
        moved = [(1 - p.detach()).tolist()[0] for p in (first, second, third)]
        say(case=f"{where}/grown", moved=moved, shared=plain.param_groups is w.param_groups)


def refused(where: str) -> None:
    def patched() -> None:
        plain = sgd()
        plain.step = types.MethodType(lambda self, closure=None: None, plain)
        wrap(plain)

    def taken() -> None:
        plain = sgd()
        plain._alone = None
        wrap(plain)

    say(case=f"{where}/patched", **outcome(patched))
    say(case=f"{where}/taken", **outcome(taken))


def main() -> None:
    torch.set_num_threads(1)
    for k in (1, 2):
        hvd.init(config=Config(super_learner_size=k, log_level="error"))
        where = "plain" if k == 2 else "2x1"
        parts = (schedules, root_counts, carried, derived, backward_then_load, grown, refused)
        for part in parts:
            part(where)
            gc.collect()
        hvd.shutdown()


if __name__ == "__main__":
    main()
