"""AdamW and Muon with shared moments, 2 super learners of 2: mates stay equal, whatever is loaded."""

import copy
import functools
import json
import time
from typing import Any

import learner
import torch
from learner import digest, outcome, same_inside, say, wrap
from torch import nn

import hvd_adpsgd.torch as hvd

INPUTS = 9


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95))


def wrapped(cells: int = 8, **how: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(INPUTS, cells), nn.Tanh(), nn.Linear(cells, 1))
    return model, wrap(model, adamw, **how)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + hvd.rank())
        learner.step(model, optimizer, torch.randn(4, INPUTS))


def until_exchanged(model: nn.Module, optimizer: Any) -> int:
    """Train until both super learners have exchanged; the same number of steps inside a super learner."""
    steps = 0
    while not all(hvd.allgather_object(hvd.metrics()["exchanges"] > 0 or not hvd.is_leader())):
        train(model, optimizer, 5)
        steps += 5
    train(model, optimizer, 10)
    return steps


def held(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Parameters, and the optimizer's state."""
    state = [optimizer.state[p] for p in model.parameters()]
    moments = [its[name] for its in state for name in ("exp_avg", "exp_avg_sq")]
    return [*(p.detach() for p in model.parameters()), *moments]


def facts(case: str, model: nn.Module, optimizer: Any, **more: Any) -> None:
    tensors = held(model, optimizer)
    finite = all(bool(torch.isfinite(t).all()) for t in tensors)
    say(case=case, same=same_inside(tensors), finite=finite, **more)


def plain_state(steps: int) -> dict[str, Any]:
    """The state of torch's AdamW after some steps of a model of the same shape."""
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = adamw(model.parameters())
    for _ in range(steps):
        learner.step(model, optimizer, torch.randn(4, INPUTS))
    return optimizer.state_dict()


def hooks() -> None:
    """A step hook reads the second moment: its own, as after the step; and an error in it changes nothing."""
    model, optimizer = wrapped()
    seen: list[str] = []

    def look(*_: Any) -> None:
        seen.append(digest([optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]))

    optimizer.register_step_post_hook(look)
    until_exchanged(model, optimizer)
    after = digest([optimizer.state[p]["exp_avg_sq"] for p in model.parameters()])
    facts("hooks", model, optimizer, own=seen[-1] == after)
    optimizer.close()


def emptied() -> None:
    """The state from before the first step is loaded again; then the root's, which is empty, is broadcast."""
    model, optimizer = wrapped()
    first = copy.deepcopy(optimizer.state_dict())
    until_exchanged(model, optimizer)
    with hvd.averaging_paused():
        optimizer.load_state_dict(first)
    train(model, optimizer, 10)
    steps = {int(its["step"]) for its in optimizer.state.values()}
    facts("emptied", model, optimizer, steps=sorted(steps))
    optimizer.close()


def from_plain() -> None:
    """Learner 0 alone loads a checkpoint of plain AdamW, and all receive its state."""
    model, optimizer = wrapped()
    until_exchanged(model, optimizer)
    with hvd.averaging_paused():
        if hvd.rank() == 0:
            optimizer.load_state_dict(plain_state(50))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 10)
    steps = {int(its["step"]) for its in optimizer.state.values()}
    cross = same_inside(optimizer.state_dict()["averaging"]["rule"]["cross"])
    facts("from_plain", model, optimizer, steps=sorted(steps), cross=cross)
    optimizer.close()


def to_plain() -> None:
    """The state goes into plain AdamW, and back."""
    model, optimizer = wrapped()
    until_exchanged(model, optimizer)
    state = json.loads(json.dumps(sorted(optimizer.state_dict())))
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with hvd.averaging_paused():
        optimizer.load_state_dict(plain.state_dict())
    train(model, optimizer, 5)
    facts("to_plain", model, optimizer, keys=state)
    optimizer.close()


def joined() -> None:
    """A learner joins before its first step; its mate has trained."""
    model, optimizer = wrapped()
    train(model, optimizer, 0 if hvd.rank() == 1 else 5)
    hvd.join()
    train(model, optimizer, 10)
    facts("joined", model, optimizer)
    optimizer.close()


def periods() -> None:
    """A model of eight chunks: an exchange moves it, and two of the eight chunks of its moments."""
    model, optimizer = wrapped(cells=11_900)
    until_exchanged(model, optimizer)
    with hvd.averaging_paused():  # no exchange is half over
        metrics = hvd.metrics()
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    sent = metrics["bytes_sent"] + metrics["bytes_shared"]
    moved = sent / metrics["exchanges"] / nbytes if hvd.is_leader() else 0.0
    facts("periods", model, optimizer, moved=moved, leads=hvd.is_leader())
    optimizer.close()


def replaced_groups() -> None:
    """As Lightning's BackboneFinetuning does when it resumes: param_groups are replaced, then loaded."""
    model, _ = wrapped()
    head, backbone = list(model[2].parameters()), list(model[0].parameters())

    def of_head() -> Any:
        plain = adamw(head)
        return plain, hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())

    plain, optimizer = of_head()
    optimizer.add_param_group({"params": backbone, "lr": 0.005})
    train(model, optimizer, 5)
    state = optimizer.state_dict()
    optimizer.close()
    plain, optimizer = of_head()
    first = optimizer.param_groups[0]
    optimizer.param_groups = [{**first, "params": p} for p in (head, backbone)]
    with hvd.averaging_paused():
        optimizer.load_state_dict(state)
    rates = [group["lr"] for group in plain.param_groups]
    train(model, optimizer, 5)
    steps = {int(its["step"]) for its in optimizer.state.values()}
    facts("replaced_groups", model, optimizer, steps=sorted(steps), rates=rates)
    optimizer.close()


def refused() -> None:
    """Groups and states whose options forbid what the optimizer was wrapped with; training goes on."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = wrap(model, functools.partial(torch.optim.RMSprop, lr=0.01))
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["centered"] = True
    p, half = (nn.Parameter(torch.ones(2, dtype=t)) for t in (torch.float32, torch.bfloat16))
    errors = [
        outcome(lambda: optimizer.add_param_group({"params": [p], "centered": True})),
        outcome(lambda: optimizer.add_param_group({"params": [half]})),
        outcome(lambda: optimizer.load_state_dict(state)),
    ]
    train(model, optimizer, 3)
    same = same_inside(p.detach() for p in model.parameters())
    kinds = [error.get("error") for error in errors]
    say(case="refused", same=same, finite=True, errors=kinds, groups=len(optimizer.param_groups))
    optimizer.close()


def momentum() -> None:
    """Muon: exchanges average its momentum, and keep the mean; here its steps change nothing themselves."""
    torch.manual_seed(3)
    model = nn.Linear(INPUTS, 8, bias=False)
    optimizer = wrap(model, functools.partial(torch.optim.Muon, lr=0.01, weight_decay=0.0))
    train(model, optimizer, 3)
    with hvd.averaging_paused():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0].update(lr=0.0, momentum=1.0)
    first = gathered(model, optimizer)
    ends = time.monotonic() + learner.DEADLINE_S
    while (now := gathered(model, optimizer)).std(dim=0).max() > 1e-3 * first.std(dim=0).max():
        assert time.monotonic() < ends, (first, now)
        train(model, optimizer, 5)
    kept = bool(torch.allclose(now.mean(dim=0), first.mean(dim=0), atol=1e-6))
    tensors = [model.weight.detach(), optimizer.state[model.weight]["momentum_buffer"]]
    say(case="momentum", same=same_inside(tensors), finite=True, kept=kept)
    optimizer.close()


def gathered(model: Any, optimizer: Any) -> torch.Tensor:
    """The momentum of all learners."""
    with hvd.averaging_paused():
        mine = optimizer.state[model.weight]["momentum_buffer"]
        return torch.stack(hvd.allgather_object(mine.double()))


def main() -> None:
    hvd.init()
    cases = (
        momentum,
        hooks,
        emptied,
        from_plain,
        to_plain,
        joined,
        periods,
        replaced_groups,
        refused,
    )
    for case in cases:
        case()
    hvd.shutdown()


main()
