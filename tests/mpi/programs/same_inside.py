"""Trains one small model after another; after every step the learners of a super learner compare their bits.

Arguments: names of the cases to run, all without any. Says for each: steps, whether the super learner's
learners were identical after every one, and what the case found out besides.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from learner import (
    DEADLINE_S,
    generator,
    pauses,
    retired,
    same_inside,
    say,
    until_all,
    wait_exchanged,
)
from torch import nn

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.inner import backend
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training.reports import metrics_of

STEPS = 12
NEAR = 0.6  # super learners begin at a distance of 1
Facts = dict[str, Any]


class Case:
    """A model, its optimizer, and what happens in each step.

    Attributes:
        model: initialised differently on each super learner, alike in the super learner.
        facts: what is said besides.
    """

    def __init__(self, model: nn.Module, make: Callable[[Any], Any], **how: Any):
        self.model = model
        self.facts: Facts = {}
        self.named = list(model.named_parameters())
        self.optimizer = hvd.DistributedOptimizer(
            make([p for _, p in self.named]), named_parameters=self.named, **how
        )
        with torch.no_grad():  # super learners begin far apart, learners of one alike
            for p in model.parameters():
                p.add_(hvd.super_rank())

    def inputs(self, step: int, *size: int) -> torch.Tensor:
        return torch.randn(*(size or (6, 5)), generator=generator(step, hvd.rank()))

    def loss(self, step: int) -> torch.Tensor:
        return self.model(self.inputs(step)).square().mean()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()

    def settled(self) -> bool:
        """Whether STEPS steps are enough. The same on all learners."""
        return True

    def averaged(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def net(width: int = 7) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


def optimizer_case(name: str) -> Case:
    case = Case(net(), OPTIMIZERS[name])
    kind = type(OPTIMIZERS[name]([nn.Parameter(torch.zeros(1))]))
    case.facts["is_instance"] = isinstance(case.optimizer, kind)
    return case


class Closure(Case):
    def __init__(self) -> None:
        super().__init__(net(), sgd)

    def step(self, step: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        self.facts["returns_loss"] = loss.item() > 0


class Accumulate(Case):
    """backward_passes_per_step=3."""

    def __init__(self) -> None:
        super().__init__(net(), sgd, backward_passes_per_step=3)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for part in range(3):
            self.loss(3 * step + part).backward()
        self.optimizer.step()


class Clip(Case):
    def __init__(self) -> None:
        super().__init__(net(), sgd)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(step).backward()
        self.optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.facts["clipped"] = self.facts.get("clipped", False) or norm.item() > 0.5
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


class Changed(Case):
    """Gradients are unscaled, clipped, counted and dropped after backward(), without synchronize()."""

    SCALE = 8.0

    def __init__(self, **how: Any) -> None:
        super().__init__(net(), sgd, **how)
        self.facts.update(as_by_hand=True, apart=False)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        by_hand = self.by_hand(step)
        (self.SCALE * self.loss(step)).backward()
        mine = [p.grad for p in self.model.parameters()]
        norm = self.change(mine)
        self.facts["apart"] |= len(set(worlds.current().inner.allgather(norm))) > 1
        self.change(by_hand)
        pairs = zip(mine, by_hand, strict=True)
        self.facts["as_by_hand"] &= all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in pairs
        )
        self.optimizer.step()

    def change(self, grads: list[torch.Tensor]) -> float:
        """What scripts do to gradients; returns their norm."""
        for grad in grads:
            grad.data.div_(self.SCALE)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item()
        for grad in grads:
            grad.mul_(min(1.0, 0.1 / norm))
        grads[-1][grads[-1].abs() < grads[-1].abs().mean()] = 0.0
        return norm

    def by_hand(self, step: int) -> list[torch.Tensor]:
        """The mean gradient of the super learner."""
        model, total = copy.deepcopy(self.model), None
        for rank in worlds.current().groups[hvd.super_rank()]:
            x = torch.randn(6, 5, generator=generator(step, rank))
            loss = self.SCALE * model(x).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        assert total is not None
        return [g / hvd.super_learner.size() for g in total]


class Rebound(Changed):
    """Averaged gradients are replaced by what each learner computes of them."""

    def change(self, grads: list[torch.Tensor]) -> float:
        norm = super().change(grads)
        for p in self.model.parameters():
            p.grad = p.grad.clone() if p.grad is not None else None
        return norm


class Checkpointed(Changed):
    """Activation checkpointing with nested backward passes."""

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step).requires_grad_()
        for layer in self.model:  # type: ignore[attr-defined]
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


class ChangedParts(Changed):
    """backward_passes_per_step=2, and a loss of two halves, each with its own backward pass."""

    def __init__(self) -> None:
        super().__init__(backward_passes_per_step=2)

    def loss(self, step: int) -> torch.Tensor:
        a, b = super().loss(step) * torch.tensor([0.25, 0.75])
        (self.SCALE * a).backward(retain_graph=True)
        return b


class NaiveScaler(Case):
    """GradScaler as in torch's tutorials; in some steps gradients of some super learners are infinite."""

    def __init__(self) -> None:
        super().__init__(net(), sgd)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        self.facts["skipped"] = 0

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        infinite = step % 4 == hvd.super_rank() and hvd.super_learner.rank() == 0
        loss = self.loss(step) * (float("inf") if infinite else 1.0)
        self.scaler.scale(loss).backward()
        self.step_scaled()
        before = self.scaler.get_scale()
        self.scaler.update()
        self.facts["skipped"] += self.scaler.get_scale() < before

    def step_scaled(self) -> None:
        """No synchronize(), no unscale_()."""
        self.scaler.step(self.optimizer)


class Scaled(NaiveScaler):
    """GradScaler as Horovod has it, with clipping."""

    def step_scaled(self) -> None:
        """Gradients are averaged, unscaled and clipped first."""
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)


class Hooks(Case):
    """The user's step hooks run once per step; LR schedulers find nothing to warn of."""

    def __init__(self) -> None:
        super().__init__(net(), sgd)
        self.facts.update(before=0, after=0)
        self.optimizer.register_step_pre_hook(lambda *_: self.count("before"))
        self.optimizer.register_step_post_hook(lambda *_: self.count("after"))
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(self.optimizer, 2),
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.9**epoch),
        ]

    def count(self, which: str) -> None:
        self.facts[which] += 1

    def step(self, step: int) -> None:
        super().step(step)
        for scheduler in self.schedulers:
            scheduler.step()
        self.facts["lr"] = self.optimizer.param_groups[0]["lr"]


class Dynamic(Case):
    """In each step each learner leaves out some layers, not the same as the others do.

    One whose gradients are complete meets one that lacks some in an operation between backward() and step().
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.ModuleList([nn.Linear(5, 5) for _ in range(4)]), sgd)

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        for i, layer in enumerate(self.model):  # type: ignore[arg-type]
            whole = step % 4 == hvd.rank()
            if whole or ((step + hvd.rank() + i) % 3 and (step != 5 or i < 2)):
                x = torch.tanh(layer(x))
        return x.square().mean() if x.requires_grad else self.model[0](x).square().mean()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        where = [hvd.super_learner, hvd.global_process_set][step // 4 % 2]
        hvd.allreduce(loss.detach(), name=f"loss.{step}", process_set=where)
        torch.amp.GradScaler("cpu", enabled=False).step(self.optimizer)


class Growing(Case):
    """add_param_group while exchanges go on, on all learners, in the same steps."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(net(), sgd)
        self.extra = [nn.Parameter(torch.full((11, 5), 0.1 * i)) for i in range(2)]
        self.extra.append(nn.Parameter(torch.tensor(0.5)))

    def loss(self, step: int) -> torch.Tensor:
        loss = super().loss(step)
        for p in self.extra[: len(self.optimizer.param_groups) - 1]:
            loss = loss + (p - hvd.rank()).square().sum()
        return loss

    def step(self, step: int) -> None:
        if step in (3, 5, 8):
            added = self.extra[len(self.optimizer.param_groups) - 1]
            self.optimizer.add_param_group({"params": [added], "lr": 0.05})
        self.facts["groups"] = len(self.optimizer.param_groups)
        super().step(step)


class Loaded(Case):
    """A checkpoint is taken and loaded again in mid-course."""

    def __init__(self) -> None:
        super().__init__(net(), lambda p: torch.optim.Adam(p, lr=0.01))

    def step(self, step: int) -> None:
        if step == 6:
            state = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer.load_state_dict(state)
            self.facts["kept"] = len(self.optimizer.state) == len(self.named)
            self.facts["keys"] = sorted(state)
        super().step(step)


class Mixed(nn.Module):
    """Every kind of parameter in one model."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.wide = nn.Parameter(torch.randn(9, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.strided = nn.Parameter(torch.randn(6, 5).t())
        self.sliced = nn.Parameter(torch.randn(4, 8)[:, ::2])
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.brain = nn.Parameter(torch.randn(17).bfloat16())
        self.narrow = nn.Parameter(torch.randn(8).half()) if half else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.new_ones(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        h = self.tied(torch.tanh(self.first(x))) @ self.strided * self.scalar + self.empty.sum()
        out = h.sum() + self.wide.square().sum() + self.conv(image).square().sum()
        out = out + self.sliced.square().sum() + self.brain.float().square().sum()
        return out if self.narrow is None else out + self.narrow.float().square().sum()


class Mixture(Case):
    def __init__(self, make: Any = sgd, **how: Any) -> None:
        super().__init__(Mixed(half=True), make, **how)
        self.frozen = self.model.frozen.clone()  # type: ignore[operator, union-attr]

    def loss(self, step: int) -> torch.Tensor:
        return self.model(self.inputs(step)).abs() * 0.01

    def step(self, step: int) -> None:
        super().step(step)
        self.facts["frozen_kept"] = torch.equal(self.model.frozen, self.frozen)  # type: ignore
        trained = [p.detach().float() for p in self.averaged() if p.requires_grad and p.numel()]
        models = hvd.allgather_object([p.mean().item() for p in trained])
        self.facts["spread"] = (torch.tensor(models[0]) - torch.tensor(models[-1])).abs().tolist()

    def settled(self) -> bool:
        return max(self.facts["spread"]) < NEAR


class Embedding(Case):
    """Sparse gradients."""

    def __init__(self, **how: Any) -> None:
        torch.manual_seed(3)
        model = nn.Embedding(13, 4, sparse=True)
        super().__init__(model, lambda p: torch.optim.SGD(p, lr=0.1), **how)

    def loss(self, step: int) -> torch.Tensor:
        words = torch.randint(13, (5,), generator=generator(step, hvd.rank()))
        return self.model(words).square().sum()


class Normalized(Case):
    """BatchNorm statistics of different super learners, fed different data, come together.

    After STEPS steps batches change them no more: then exchanges alone do, if these average them.
    """

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        self.averages = name == "buffers"
        super().__init__(model, sgd, buffers=model if self.averages else None)

    def step(self, step: int) -> None:
        super().step(step)
        means = hvd.allgather_object(self.model[1].running_mean.tolist())
        self.facts["spread"] = (torch.tensor(means[0]) - torch.tensor(means[-1])).norm().item()
        if step == STEPS - 1:
            self.model.eval()
            self.facts["frozen"] = self.facts["spread"]
            self.met = self.exchanges()

    def settled(self) -> bool:
        if self.averages:
            return self.facts["spread"] < 0.1 * self.facts["frozen"]
        return self.exchanges() >= self.met + 2

    def exchanges(self) -> int:
        numbers = metrics_of(self.optimizer._averaging)  # type: ignore[attr-defined]
        return max(hvd.allgather_object(numbers.get("exchanges") or 0))

    def inputs(self, step: int, *size: int) -> torch.Tensor:
        return super().inputs(step, *size) + 10 * hvd.super_rank()


def wrapped(**how: Any) -> Callable[[], Case]:
    return lambda: Case(net(), sgd, **how)


def list_of_groups() -> Case:
    model = net()
    groups = [[model[0].weight, model[0].bias], [model[2].weight]]
    return Case(model, sgd, groups=groups)


CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: optimizer_case(name)) for name in OPTIMIZERS},
    "closure": Closure,
    "accumulate": Accumulate,
    "clip": Clip,
    "changed": Changed,
    "changed_in_groups": lambda: Changed(groups=2),
    "changed_parts": ChangedParts,
    "rebound": Rebound,
    "checkpointed": Checkpointed,
    "naive_scaler": NaiveScaler,
    "hooks": Hooks,
    "scaled": Scaled,
    "dynamic": Dynamic,
    "growing": Growing,
    "loaded": Loaded,
    "mixture": Mixture,
    "mixture_fp16": lambda: Mixture(compression=hvd.Compression.fp16),
    "mixture_adam": lambda: Mixture(lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3, foreach=True)),
    "fp16": wrapped(compression=hvd.Compression.fp16),
    "groups": wrapped(groups=2),
    "list_of_groups": list_of_groups,
    "predivided": wrapped(gradient_predivide_factor=2.0),
    "sum": wrapped(op=hvd.Sum),
    **({"adasum": wrapped(op=hvd.Adasum)} if backend() == "horovod" else {}),
    "inner_set": lambda: Case(net(), sgd, process_set=hvd.super_learner),
    "fixed_ring": wrapped(averaging="fixed_ring", exchanges_per_step=3),
    "wire16": wrapped(wire_dtype="bfloat16"),
    "sparse": Embedding,
    "sparse_as_dense": lambda: Embedding(sparse_as_dense=True),
    "buffers": lambda: Normalized("buffers"),
    "no_buffers": lambda: Normalized("no_buffers"),
}


def main() -> None:
    hvd.init()
    pause = pauses()
    for name in sys.argv[1:] or list(CASES):
        case = CASES[name]()
        with retired(case.optimizer), warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            same = list(train(case, pause))
            wait_exchanged(case.optimizer)
        finite = all(torch.isfinite(p).all() for p in case.averaged())
        said = [str(w.message) for w in heard if "lr_scheduler" in str(w.message)]
        numbers = metrics_of(case.optimizer._averaging)  # type: ignore[attr-defined]
        say(
            case=name,
            same=same,
            finite=bool(finite),
            warned=said,
            exchanges=numbers.get("exchanges"),
            distance=numbers.get("consensus_distance"),
            **case.facts,
        )


def train(case: Case, pause: Iterator[None]) -> Iterator[bool]:
    for step in until_all(case.settled, STEPS, every=1):
        next(pause)
        case.step(step)
        yield same_inside(case.averaged())
        if step == STEPS // 2:  # on a busy machine the other super learner may not have begun
            engine = case.optimizer._averaging.engine  # type: ignore[attr-defined]
            idle = engine.loop is None or engine.memory.own.layout.nchunks == 0
            assert idle or engine.loop.wait_finished(1, DEADLINE_S)


if __name__ == "__main__":
    main()
