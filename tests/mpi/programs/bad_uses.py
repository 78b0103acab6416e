"""Every wrong use in turn; says what each learner got. Two super learners of two learners.

Ends with one learner per super learner, where no gradient is averaged before step().
"""

import copy
import functools
import inspect
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from learner import DEADLINE_S, heard, outcome, retired, same_inside, say, sgd, wrap
from torch import nn

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.collectives import usage
from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.peers import PeerState
from hvd_adpsgd.engine.turns import LOOKS
from hvd_adpsgd.errors import UnsupportedOptimizerError
from hvd_adpsgd.inner import backend
from hvd_adpsgd.training import drift
from tests.options import another


def with_names(model: Any) -> None:
    hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model)


def linear() -> nn.Module:
    torch.manual_seed(0)  # cases have drawn other numbers on some learners
    return nn.Linear(3, 2)


@contextmanager
def training(model: nn.Module, **how: Any) -> Iterator[Any]:
    """A wrapped optimizer that has made two good steps."""
    with retired(wrap(model, **how)) as optimizer:
        for _ in range(2):
            step(model, optimizer)
        yield optimizer


def step(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(1, 3, device=model.weight.device)).sum() * factor).backward()  # type: ignore
    optimizer.step()


def other_names() -> None:
    model = linear()
    named = [(f"{name}{'x' * (hvd.rank() == 3)}", p) for name, p in model.named_parameters()]
    hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=named)


def other_frozen() -> None:
    model = linear()
    model.bias.requires_grad_(hvd.rank() != 3)  # type: ignore[operator, union-attr]
    wrap(model)


WRAPPED: dict[str, Any] = {
    "other_shapes": lambda: wrap(nn.Linear(3, 2 + (hvd.rank() == 2))),
    "other_shapes_inside": lambda: wrap(nn.Linear(3, 2 + (hvd.rank() == 1))),
    "other_dtypes": lambda: wrap(linear().to(torch.float64 if hvd.rank() == 1 else torch.float32)),
    "other_count": lambda: wrap(nn.Linear(3, 2, bias=hvd.rank() != 3)),
    "other_strategies": lambda: wrap(linear(), averaging=hvd.RandomPairs(seed=hvd.super_rank())),
    "other_wires": lambda: wrap(linear(), wire_dtype="float16" if hvd.super_rank() else None),
    "complex_numbers": lambda: wrap(linear().to(torch.complex64)),
    "complex_numbers_on_one": lambda: wrap(
        linear().to(torch.complex64 if hvd.rank() == 1 else torch.float32)
    ),
    "lbfgs": lambda: wrap(linear(), torch.optim.LBFGS),
    "lbfgs_on_one": lambda: wrap(linear(), torch.optim.LBFGS if hvd.rank() == 2 else sgd),
    "part_of_the_learners": lambda: wrap(linear(), process_set=hvd.ProcessSet([0])),
    "value_on_one": lambda: wrap(linear(), exchanges_per_step=-1 if hvd.rank() == 3 else 1),
    "a_model_for_names": lambda: with_names(linear()),
    "modules_for_names": lambda: with_names(nn.Sequential(linear())),
    "a_list_to_reduce": lambda: hvd.allreduce([1.0, 2.0]),  # type: ignore[arg-type]
    "average_other_models": lambda: hvd.average_model(nn.Linear(3, 2 + (hvd.rank() == 1))),
    "number_of_buffers": lambda: wrap(linear(), buffers=3),
    "wire_alone": lambda: wrap(linear(), wire_dtype="auto"),
    "copy": lambda: copied(copy.copy),
    "deepcopy": lambda: copied(copy.deepcopy),
    "pickle": lambda: copied(pickle.dumps),
}


# Each argument of DistributedOptimizer, as another one is on learner 3; options have any other value.
OTHER: dict[str, Any] = {
    "optimizer": lambda model, named: torch.optim.Adam(model.parameters()),
    "named_parameters": lambda model, named: None,
    "compression": hvd.Compression.fp16,
    "backward_passes_per_step": 2,
    "op": hvd.Sum,
    "gradient_predivide_factor": 2.0,
    "num_groups": 1,
    "groups": lambda model, named: [[p for _, p in named]],
    "sparse_as_dense": True,
    "averaging": "fixed_ring",
    "wire_dtype": "bfloat16",
    "buffers": lambda model, named: nn.BatchNorm1d(1),
    "average_gradients": False,
}


def other_arguments() -> None:
    """A new argument fails here until it is compared."""
    walked = set(inspect.signature(hvd.DistributedOptimizer).parameters) - set(OTHER)
    options = {name: another(name) for name in walked & vars(Config()).keys()}
    assert walked - set(options) == {"process_set"}, "all learners, or hvd.super_learner: alike"
    for name, other in {**OTHER, **options}.items():
        model = linear()
        named = list(model.named_parameters())
        arguments = {"optimizer": sgd(model.parameters()), "named_parameters": named}
        if hvd.rank() == 3:
            arguments[name] = other(model, named) if inspect.isfunction(other) else other
        found = outcome(functools.partial(hvd.DistributedOptimizer, **arguments))
        say(case=f"argument {name}", **found)


def other_sets(both: Any, rest: Any) -> None:
    """With one super learner: learner 1 is in the set of learner 0, and passes another one."""
    wrap(linear(), process_set=both if hvd.rank() < 2 else rest)
    wrap(linear(), process_set=both if hvd.rank() == 0 else rest)


def twice() -> None:
    model = linear()
    with retired(wrap(model)) as optimizer:
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def shared_memory() -> None:
    model = linear()
    model.other = nn.Parameter(model.weight.detach()[0])  # type: ignore[index, operator]
    wrap(model)


def init_with_other_options() -> None:
    hvd.init(config=Config.from_environment())  # says what is so already
    hvd.init(config=Config(deadline_s=3.5))


def synchronous_beside_another() -> None:
    with retired(wrap(linear())):
        wrap(linear(), averaging=hvd.Synchronous())


def synchronous_beside_another_on_some() -> None:
    with retired(wrap(linear())) as optimizer:
        if hvd.rank() == 0:
            optimizer.close()
        wrap(linear(), averaging=hvd.Synchronous())


def other_moments() -> None:
    """Two classes of one name: moments of the one are shared, the other has a step() of its own."""

    class Mine(torch.optim.AdamW):
        pass

    if hvd.rank() == 1:
        Mine.step = lambda self, closure=None: None  # type: ignore[method-assign]
    wrap(linear(), Mine)


def gone_to_nan(case: str, **how: Any) -> None:
    model = linear()
    with training(model, **how) as optimizer:
        if hvd.super_rank() == 0:
            step(model, optimizer, float("nan"))
        for _ in range(10):
            step(model, optimizer)
        say(case=case, finite=all(torch.isfinite(p).all() for p in model.parameters()) * 1)


def not_finite() -> None:
    gone_to_nan("not_finite")


def not_finite_in_turn() -> None:
    """With small shares steps look at a part of the model each: at all of it within LOOKS."""
    gone_to_nan("not_finite_in_turn", exchange_share=1 / 16)


def moved() -> None:
    model = linear()
    with training(model) as optimizer:
        weight = nn.Parameter(model.weight.detach().to("meta"))  # type: ignore[operator]
        torch.utils.swap_tensors(model.weight, weight)
        optimizer.step()


def ddp_after_wrapping() -> None:
    """As trainer frameworks do that find a process group. No real one: making it imports the compiler."""
    model = linear()
    found = mock.patch.object(torch.distributed, "is_initialized", return_value=True)
    with retired(wrap(model)) as optimizer, found:
        kind = nn.parallel.DistributedDataParallel
        ddp = kind.__new__(kind)
        nn.Module.__init__(ddp)
        ddp.module = model
        step(model, optimizer)


def state_loaded_before_the_step() -> None:
    """The gradients of a backward pass are dropped, and training goes on."""
    model = linear()
    hvd.broadcast_parameters(model.state_dict(), 0)
    with training(model) as optimizer:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            step(model, optimizer)
        same = same_inside(model.parameters())
        say(case="after a load", same=same)


def some_wrapped_again() -> None:
    """A parameter has one owner: the earlier optimizer is retired, which is logged at once."""
    model = linear()
    with heard() as logged, training(model) as first:
        again = sgd([model.weight])
        for plain in (again, sgd(model.parameters())):
            hvd.DistributedOptimizer(plain).close()  # type: ignore[attr-defined]
        say(case="logged at wrapping", logged=logged)
        first.step()


def reshaped() -> None:
    model = linear()
    with training(model) as optimizer:
        optimizer.zero_grad()
        model.bias.data = torch.zeros(4)  # type: ignore[union-attr]
        optimizer.step()


def unfrozen() -> None:
    model = linear()
    model.bias.requires_grad_(False)  # type: ignore[operator, union-attr]
    with training(model) as optimizer:
        model.bias.requires_grad_(True)  # type: ignore[operator, union-attr]
        step(model, optimizer)


def swapped() -> None:
    model = linear()
    with training(model) as optimizer:
        model.bias = nn.Parameter(torch.zeros(2))
        optimizer.param_groups[0]["params"][1] = model.bias
        step(model, optimizer)


class Halves(nn.Module):
    """The loss uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().sum()


def backward(model: nn.Module, optimizer: Any, times: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(times):
        model(torch.full((1, 3), 1.0 + hvd.rank())).sum().backward()


def clipped_too_early() -> None:
    model = Halves()
    with retired(wrap(model)) as optimizer:
        backward(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def clipped_too_early_on_one() -> None:
    """One learner of each super learner uses a half of the model in one step."""
    model, x = Halves(), torch.ones(1, 3)
    with retired(wrap(model)) as optimizer:
        try:
            loss = model(x * (1 + hvd.rank()))
            (loss if hvd.rank() % 2 else loss + model.unused(x).sum()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        finally:
            for _ in range(2):
                optimizer.zero_grad()
                (model(x * (1 + hvd.rank())) + model.unused(x).sum()).backward()
                optimizer.step()
            say(case="after one has clipped", same=same_inside(model.parameters()))


def forgotten_broadcast() -> None:
    model = linear()
    model.weight.data.add_(hvd.rank())  # type: ignore[operator, union-attr]
    with retired(wrap(model)) as optimizer:
        for _ in range(3):
            step(model, optimizer)


def disturbed_for_a_gradient() -> None:
    """As SAM and weight noise do, before the first step, too."""
    model = linear()
    with retired(wrap(model)) as optimizer:
        for _ in range(4):
            optimizer.zero_grad()
            model.weight.data.add_(1.0 + hvd.rank())  # type: ignore[operator, union-attr]
            model(torch.ones(1, 3)).sum().backward()
            model.weight.data.sub_(1.0 + hvd.rank())  # type: ignore[operator, union-attr]
            optimizer.step()


def broadcast_after_a_step() -> None:
    model = linear()
    model.weight.data.add_(hvd.rank())  # type: ignore[operator, union-attr]
    with retired(wrap(model)) as optimizer:
        step(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), 0)
        for _ in range(3):
            step(model, optimizer)


def started_apart() -> None:
    """Super learners, each with one model of its own; with a broadcast after wrapping none is."""
    found = []
    for broadcasts in (False, True):
        drift._has_stepped[:] = [False]  # as in a script that begins
        usage.tally.kinds.clear()
        model = linear()
        model.weight.data.add_(hvd.super_rank())  # type: ignore[operator, union-attr]
        with heard() as logged, retired(wrap(model)) as optimizer:
            if broadcasts:
                hvd.broadcast_parameters(model.state_dict(), 3)
            for _ in range(2):
                step(model, optimizer)
        found.append(sum("super learners start from different models" in text for text in logged))
    say(case="started apart", found=found)


def fewer_steps_on_one() -> None:
    """Learner 1 calls an operation while its mate waits for its gradients; then it makes that step."""
    model = linear()
    with retired(wrap(model)) as optimizer:
        try:
            for _ in range(2 if hvd.rank() == 1 else 3):
                step(model, optimizer)
            hvd.allreduce(torch.ones(1))
        finally:
            hvd.barrier()  # the one that has raised is over on all
            if hvd.rank() == 1:
                step(model, optimizer)
            elif hvd.rank() == 0:
                optimizer.step()  # its gradients are with Horovod
            total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
            say(case="after as many steps", total=total, same=same_inside(model.parameters()))


def closed_on_one() -> None:
    """Horovod keeps what it has got of the other learner: the names are used nowhere else."""
    model = linear()
    named = [(f"closed.{name}", p) for name, p in model.named_parameters()]
    optimizer: Any = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=named)
    step(model, optimizer)
    if hvd.rank() % 2:
        optimizer.close()
        return
    with retired(optimizer):
        step(model, optimizer)


def scaled_too_early() -> None:
    model, scaler = Halves(), torch.amp.GradScaler("cpu", init_scale=2.0)
    with retired(wrap(model)) as optimizer:
        scaler.scale(torch.zeros(1))
        backward(model, optimizer)
        scaler.step(optimizer)


def stepped_too_early() -> None:
    model = Halves()
    with retired(wrap(model)) as optimizer:
        backward(model, optimizer)
        with optimizer.skip_synchronize():
            optimizer.step()


def changed_by_a_hook() -> None:
    """That is registered after those of the optimizer."""
    model = linear()
    with retired(wrap(model)) as optimizer:

        def late(*_: Any) -> None:
            model.weight.grad.mul_(0.5)  # type: ignore[operator, union-attr]

        model.weight.register_post_accumulate_grad_hook(late)
        backward(model, optimizer)


def adasum_of_a_script() -> None:
    wrap(linear(), op=hvd.Adasum, average_gradients=False)


def clipped_with_adasum() -> None:
    model = linear()
    with retired(wrap(model, op=hvd.Adasum)) as optimizer:
        backward(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def averaged_in_adasum() -> None:
    model = linear()
    with retired(wrap(model, op=hvd.Adasum)) as optimizer:
        backward(model, optimizer)
        hvd.average_model_async(model)


def wrong_timeout() -> None:
    wrong: Any = "soon"
    hvd.average_model_async(linear(), timeout=wrong)


def accumulated() -> None:
    model = linear()
    with retired(wrap(model)) as optimizer:
        backward(model, optimizer, times=2)


def accumulated_too_often() -> None:
    """The third backward pass adds to the mean of two."""
    model = linear()
    with retired(wrap(model, backward_passes_per_step=2)) as optimizer:
        backward(model, optimizer, times=3)
        optimizer.step()


def set_by_hand(model: nn.Module) -> None:
    loss = model(torch.full((1, 3), 1.0 + hvd.rank())).sum()
    parameters = list(model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = grad


def replaced() -> None:
    """Averaged gradients, by other ones, on one learner of each super learner."""
    model = linear()
    with retired(wrap(model)) as optimizer:
        for _ in range(2):
            backward(model, optimizer)
            if hvd.super_learner.rank() == 1:
                set_by_hand(model)
            optimizer.step()


def dropped_and_set() -> None:
    """optimizer.zero_grad() is the cure: said of a model that has used it."""
    model = linear()
    hvd.broadcast_parameters(model.state_dict(), 0)
    with retired(wrap(model)) as optimizer:
        for _ in range(2):
            backward(model, optimizer)
            optimizer.zero_grad()
            set_by_hand(model)
            optimizer.step()
        say(case="dropped and set", same=same_inside(model.parameters()))
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            model.zero_grad()
            set_by_hand(model)
            optimizer.step()


def synchronized_and_replaced() -> None:
    model = linear()
    with retired(wrap(model)) as optimizer:
        for _ in range(2):
            backward(model, optimizer)
            optimizer.synchronize()
            set_by_hand(model)
            with optimizer.skip_synchronize():
                optimizer.step()


def clipped_while_accumulated() -> None:
    """An epoch of an odd number of batches. The cure is synchronize()."""
    model = linear()
    hvd.broadcast_parameters(model.state_dict(), 0)
    with retired(wrap(model, backward_passes_per_step=2)) as optimizer:
        backward(model, optimizer)
        optimizer.synchronize()  # type: ignore[attr-defined]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        say(case="clipped after it", same=same_inside(model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        try:
            optimizer.step()
        finally:
            kept = all(map(torch.equal, before, model.parameters()))
            optimizer.zero_grad()  # training continues
            step(model, optimizer)
            say(case="clipped and refused", kept=kept)


def scaled_while_accumulated() -> None:
    """One learner of each super learner overflows: its scaler leaves out step()."""
    model, scaler = linear(), torch.amp.GradScaler("cpu", init_scale=2.0)
    with retired(wrap(model, backward_passes_per_step=2)) as optimizer:
        optimizer.zero_grad()
        factor = float("inf") if hvd.super_learner.rank() == 1 else 1.0
        scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def frozen_later() -> None:
    """Frozen after wrapping: gradients may be clipped, and the frozen ones are not waited for."""
    model = Halves()
    hvd.broadcast_parameters(model.state_dict(), 0)
    with retired(wrap(model)) as optimizer:
        model.unused.requires_grad_(False)
        kept = [p.detach().clone() for p in model.unused.parameters()]
        for _ in range(2):
            backward(model, optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        facts = {"kept": all(map(torch.equal, kept, model.unused.parameters()))}
        say(case="frozen and clipped", same=same_inside(model.parameters()), **facts)
        model.unused.requires_grad_(True)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


def plain_one_stepped() -> None:
    """By a script or GradScaler; it is an optimizer again once the wrapped one is closed or dropped."""
    model, scaler = linear(), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(1))
    plain = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for _ in range(2):
        with retired(hvd.DistributedOptimizer(plain)) as optimizer:
            before = [p.detach().clone() for p in model.parameters()]
            model(torch.ones(1, 3)).sum().backward()
            found = [
                outcome(lambda: plain.step(lambda: 0.0)).get("error"),
                outcome(lambda: scaler.step(plain)).get("error"),
            ]
            kept = all(map(torch.equal, before, model.parameters()))
            optimizer.step()
            scheduler.step()
            last = outcome(plain.step)
        plain.step()
    hooks = plain._optimizer_step_pre_hooks, plain._optimizer_step_post_hooks
    say(
        case="plain one stepped",
        found=found,
        kept=kept,
        hooks=[len(h) for h in hooks],
        rate=plain.param_groups[0]["lr"],
    )
    raise UnsupportedOptimizerError(last["text"])


def is_left_alone(optimizer: Any) -> bool:
    """Whether no other super learner averages with this one any more."""
    states = optimizer._averaging.engine.loop.peers()
    others = [state for peer, state in enumerate(states) if peer != hvd.super_rank()]
    return all(state >= PeerState.LEFT for state in others)


def other_group_elsewhere() -> None:
    """Found when super learners next exchange; each notices by itself, so nobody waits.

    Who notices ends its averaging here; the last one may find all others gone.
    """
    model = linear()
    with training(model) as optimizer:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + hvd.rank()))]})
        ends = time.monotonic() + DEADLINE_S
        while not is_left_alone(optimizer):
            assert time.monotonic() < ends
            step(model, optimizer)


def copied(how: Any) -> None:
    with training(linear()) as optimizer:
        how(optimizer)


def other_group_inside() -> None:
    with training(linear()) as optimizer:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + hvd.rank() % 2))]})


# Those with one learner per super learner, and those after all others or inside another case.
ALONE = ("moved", "reshaped", "other_group_elsewhere")
SEPARATE = (*ALONE, "linear", "other_arguments", "closed_on_one")
CASES = {
    name: function
    for name, function in list(globals().items())
    if inspect.isfunction(function)
    and function.__module__ == __name__
    and not inspect.signature(function).parameters
    and name not in SEPARATE
}


def skip(case: str = "skip", share: float = 1.0, steps: int = 6) -> None:
    """Super learner 0 trains on alone while its model is not finite; super learner 1 stays whole."""
    model = linear()
    with training(model, exchange_share=share) as optimizer:
        if hvd.super_rank() == 0:
            good = [p.detach().clone() for p in model.parameters()]
            step(model, optimizer, float("inf"))
            for _ in range(steps - 1):
                step(model, optimizer)
            with torch.no_grad():
                for p, kept in zip(model.parameters(), good, strict=True):
                    p.copy_(kept)
        for _ in range(10):
            step(model, optimizer)
        numbers = hvd.metrics()
        hvd.average_model(model)
        say(
            case=case,
            finite=all(bool(torch.isfinite(p).all()) for p in model.parameters()),
            same=same_inside(model.parameters()),
            nonfinite_steps=numbers["nonfinite_steps"],
        )


def wrapped_again(model: nn.Module) -> None:
    """The cure of the errors above: the model's next optimizers, one after a shutdown, one not."""
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizers = []
    for _ in range(2):
        optimizers.append(wrap(model))
        for _ in range(3):
            step(model, optimizers[-1])
    say(
        case="wrapped_again",
        same=same_inside(model.parameters()),
        retired=outcome(lambda: step(model, optimizers[0])).get("error"),
    )
    optimizers[-1]._averaging.stop()


def main() -> None:
    before = outcome(lambda: wrap(linear()))
    hvd.init()
    say(case="before_init", **before)
    for name, case in {**CASES, **WRAPPED}.items():
        say(case=name, **outcome(case))
    other_arguments()
    say(case="closed_on_one", **outcome(closed_on_one))
    model = linear()
    optimizer = wrap(model)
    step(model, optimizer)
    hvd.shutdown()
    hvd.init(config=Config(super_learner_size=2, nonfinite="skip"))
    say(case="after_shutdown", **outcome(lambda: step(model, optimizer)))
    say(case="synchronize_after_shutdown", **outcome(optimizer.synchronize))
    group = {"params": [nn.Parameter(torch.zeros(2))]}
    say(case="group_after_shutdown", **outcome(lambda: optimizer.add_param_group(group)))
    wrapped_again(model)
    skip()
    skip("skip in turn", 1 / 16, 3 * LOOKS)
    hvd.shutdown()
    hvd.init(config=Config(super_learner_size=1))
    for name in ALONE:
        say(case=name, **outcome(globals()[name]))
    hvd.shutdown()
    if backend() == "horovod":
        sets: Any = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
        hvd.init(process_sets=sets, config=Config(super_learner_size=4))
        say(case="other_sets", **outcome(functools.partial(other_sets, *sets)))
        hvd.shutdown()
    inner = Config(inner="torch" if backend() == "horovod" else "horovod")
    other_backend = outcome(lambda: hvd.init(config=inner))
    hvd.init(config=Config(super_learner_size=2, timeline="/nowhere/at/all.json"))
    say(case="inner", **other_backend)
    say(case="no_timeline", **outcome(lambda: wrap(linear())))


if __name__ == "__main__":
    main()
