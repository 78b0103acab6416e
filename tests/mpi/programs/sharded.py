"""Models of which each learner holds a part (fully_shard): means, checkpoints, refusals, a learner that ends.

Arguments: a folder for the checkpoint; then the cases to run.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from inner import outcome
from learner import say
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.training import async_mean

ROUND, ROUNDS = 5, 400
BREATHER_S = (
    0.1  # of a round, in which a joining super learner has this machine's cores for its imports
)
NEW = "HVD_ADPSGD_JOIN" in os.environ
DEVICE = torch.get_default_device().type


class Block(torch.nn.Module):
    """Attention and a small perceptron; sizes that do not divide evenly."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 17), torch.nn.Linear(17, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


def transformer(dtype: torch.dtype = torch.float64, seed: int = 0, **how: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(12, 1)).to(dtype)
    for block in model[:2]:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


def perceptron(bias: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(12, 18, bias=bias), torch.nn.ReLU(), torch.nn.Linear(18, 12, bias=bias)
    return torch.nn.Sequential(*layers)


def tensor_parallel(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh(DEVICE, (hvd.super_learner.size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def parts(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().cpu().double().flatten() for t in tensors])


def mean_of_counterparts(values: torch.Tensor) -> torch.Tensor:
    """The mean over super learners of what learners with this inner rank give."""
    world = worlds.current()
    told = hvd.allgather_object((world.inner_rank, values.tolist()))
    mine = [
        torch.tensor(its, dtype=torch.float64, device="cpu")
        for rank, its in told
        if rank == world.inner_rank
    ]
    return torch.stack(mine).mean(0)


class Steps:
    """Trains a model, and adds up what its optimizer itself has changed on this learner."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.start = flat(parts(model)).clone()
        self.own = torch.zeros_like(self.start)
        named = list(model.named_parameters())
        self.optimizer: Any = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        self.optimizer.register_step_pre_hook(self.before)
        self.optimizer.register_step_post_hook(self.after)
        # with tensor parallelism the learners of a super learner have the same data
        seed = hvd.rank() if isinstance(model, FSDPModule) else 100 + hvd.super_rank()
        self.data = torch.Generator().manual_seed(seed)
        self.dtype = next(model.parameters()).dtype

    def before(self, *_: Any) -> None:
        self._held = flat(parts(self.model)).clone()

    def after(self, *_: Any) -> None:
        self.own += flat(parts(self.model)) - self._held

    def backward(self) -> torch.Tensor:
        x = torch.randn(3, 4, 12, generator=self.data, dtype=torch.float64).to(self.dtype)
        loss = (self.model(x) - x.sum(2, keepdim=True)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, passes: int = 1) -> None:
        self.optimizer.zero_grad()
        for i in range(passes):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(i == passes - 1)
            self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def until_corrected(self, passes: int = 1) -> None:
        """Make steps until exchanges have changed the part of every learner that has one."""
        for _ in range(ROUNDS):
            for _ in range(ROUND):
                self.step(passes)
            moved = flat(parts(self.model)) - self.start - self.own
            if all(hvd.allgather_object(not moved.numel() or bool(moved.abs().max() > 1e-6))):
                return
        raise AssertionError(f"no exchange in {ROUND * ROUNDS} steps")

    def error(self) -> float:
        """How far the mean model is from what local updates alone make of it."""
        with hvd.averaged(self.model):
            found = flat(parts(self.model)).clone()
        return float((found - mean_of_counterparts(self.start + self.own)).abs().max())


def law(
    optimizer: str,
    dtype: str = "float64",
    passes: int = 1,
    model: torch.nn.Module | None = None,
    **how: Any,
) -> dict[str, Any]:
    model = model or transformer(getattr(torch, dtype), **how)
    steps = Steps(model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01))
    steps.until_corrected(passes)
    error, held = steps.error(), engine_nbytes(steps.optimizer)
    steps.optimizer.close()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    own = sum(p.numel() * p.element_size() for p in parts(model))
    return {"error": error, "held": held, "whole": whole, "own": own}


def engine_nbytes(optimizer: Any) -> int:
    layout = optimizer._averaging.engine.memory.own.layout
    return sum(part.nbytes for part in layout.parts)


def means() -> dict[str, Any]:
    """The means against those that are computed from what all learners gather."""
    world = worlds.current()
    model = transformer(seed=1 + world.super_rank)
    expected = mean_of_counterparts(flat(parts(model)))
    mine = float((flat(parts(model)) - expected).square().sum())
    squares = [0.0] * world.super_size
    for rank, square in hvd.allgather_object((world.super_rank, mine)):
        squares[rank] += square
    distance = (sum(squares) / len(squares)) ** 0.5
    found = hvd.consensus_distance(model)
    hvd.average_model(model)
    error = float((flat(parts(model)) - expected).abs().max())
    after = hvd.consensus_distance(model)
    other = transformer(seed=5 + world.super_rank)
    root = world.groups[-1][0]
    held = hvd.allgather_object((hvd.rank(), flat(parts(other)).tolist()))
    hvd.broadcast_parameters(other.state_dict(), root_rank=root)
    from_root = dict(held)[world.groups[-1][world.inner_rank]]
    return {
        "distance": abs(found - distance),
        "error": error,
        "after": after,
        "broadcast": flat(parts(other)).tolist() == from_root,
    }


def mean_without_waiting() -> dict[str, Any]:
    """Each part of the mean on super learner 0 against what its counterparts have contributed."""
    made: dict[int, list[float]] = {}
    original = async_mean.contributions

    def contributions(wants: Any) -> Any:
        if (copies := original(wants)) is not None:
            made[copies[0]] = flat([torch.from_numpy(array) for array in copies[1]]).tolist()
        return copies

    async_mean.contributions = contributions
    model = transformer()
    steps = Steps(model, torch.optim.SGD(model.parameters(), lr=0.05))
    steps.step()
    handle = hvd.average_model_async(model) if hvd.super_rank() == 0 else None
    while not all(hvd.allgather_object(handle is None or hvd.poll(handle))):
        steps.step()
    async_mean.contributions = original
    inner_rank = worlds.current().inner_rank
    given = hvd.allgather_object((inner_rank, hvd.super_rank(), made))
    steps.optimizer.close()
    if handle is None:
        return {"error": 0.0, "models": 2}
    of = {super_rank: its for inner, super_rank, its in given if inner == inner_rank}
    expected = torch.tensor(
        [of[rank][step] for rank, step in handle.steps.items()], dtype=torch.float64
    )
    state = hvd.synchronize(handle)
    found = flat([state[name].to_local() for name, _ in model.named_parameters()])
    assert not torch.equal(expected[0], expected[-1]), "of equal models"
    return {"error": float((found - expected.mean(0)).abs().max()), "models": len(handle.steps)}


def checkpoint(folder: str) -> dict[str, Any]:
    """The mean model and the optimizer's state, saved by super learner 0 without gathering."""
    model = transformer(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = Steps(model, optimizer)
    steps.until_corrected()
    with hvd.averaged(model):
        if hvd.super_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": steps.optimizer.state_dict()}
            dcp.save(state, checkpoint_id=folder, process_group=hvd.super_learner_group())
        mean = whole(model)
    steps.optimizer.close()
    return {"mean": mean}


def resume(folder: str) -> dict[str, Any]:
    """Load it with other super learners, and train on."""
    model = transformer(torch.float32, seed=7)
    steps = Steps(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    steps.step()  # makes the state, into which the checkpoint is read
    with hvd.averaging_paused():
        state = {"model": model.state_dict(), "optimizer": steps.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=hvd.super_learner_group())
        model.load_state_dict(state["model"])
        steps.optimizer.load_state_dict(state["optimizer"])
    loaded, rate = whole(model), steps.optimizer.param_groups[0]["lr"]
    steps.start, steps.own = flat(parts(model)).clone(), torch.zeros_like(steps.own)
    steps.until_corrected()
    error = steps.error()
    steps.optimizer.close()
    return {"mean": loaded, "rate": rate, "error": error}


def whole(model: torch.nn.Module) -> list[float]:
    with torch.no_grad():
        tensors = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
        return flat(tensors).tolist()


def evaluated(**how: Any) -> dict[str, Any]:
    """Forward passes without backward, after which fully_shard leaves whole tensors in the model."""
    model = transformer(**how)
    steps = Steps(model, torch.optim.SGD(model.parameters(), lr=0.01))
    steps.until_corrected()
    x = torch.ones(2, 3, 12, dtype=torch.float64)
    found: dict[str, Any] = {}
    with torch.no_grad():
        model(x)
        with hvd.averaged(model):
            mean = model(x)
        after = model(x)
    own = flat(parts_after(model)).clone()
    steps.step()
    found["law"] = steps.error()
    with torch.no_grad():
        model(x)
    before = mean_parts(model)
    with torch.no_grad():
        model(x)
    hvd.average_model(model)
    found["mean"] = float((flat(parts(model)) - before).abs().max())
    found["outputs"] = [
        flat([mean]).tolist() == its for its in hvd.allgather_object(flat([mean]).tolist())
    ]
    found["differs"] = bool((mean - after).abs().max() > 0)
    found["kept"] = own.numel() == steps.start.numel()
    steps.optimizer.close()
    return found


def parts_after(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parts of a model after a forward pass."""
    hvd.consensus_distance(model)
    return parts(model)


def states() -> dict[str, Any]:
    """broadcast_optimizer_state: learners get the parts of their counterparts in the root's super learner."""
    world = worlds.current()
    model = transformer(seed=world.super_rank)
    steps = Steps(model, torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + world.super_rank)))
    for _ in range(2):
        steps.step()
    root = world.groups[-1][0]

    def held() -> list[float]:
        state = steps.optimizer.state
        tensors = [
            state[p][name].to_local()
            for p in model.parameters()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        return flat(tensors).tolist()

    with hvd.averaging_paused():
        told = dict(hvd.allgather_object((hvd.rank(), held())))
        hvd.broadcast_optimizer_state(steps.optimizer, root_rank=root)
        same = held() == told[world.groups[-1][world.inner_rank]]
    rate = steps.optimizer.param_groups[0]["lr"]
    steps.step()
    steps.optimizer.close()
    return {"same": same, "rate": rate}


def added() -> dict[str, Any]:
    model, more = transformer(), torch.nn.Linear(3, 3)
    sharded = Steps(model, torch.optim.SGD(model.parameters(), lr=0.01)).optimizer
    plain = hvd.DistributedOptimizer(torch.optim.SGD(more.parameters(), lr=0.01))
    others = [*transformer().parameters()]
    found = {
        "plain": outcome(
            lambda: sharded.add_param_group({"params": torch.nn.Linear(2, 2).parameters()})
        ),
        "sharded": outcome(lambda: plain.add_param_group({"params": others})),
        "reduced": outcome(lambda: hvd.allreduce(others[0])),
        "same": outcome(lambda: sharded.add_param_group({"params": others})),
    }
    sharded.close()
    plain.close()
    return found


def one_super_learner() -> dict[str, Any]:
    """Plain training: nothing is averaged between super learners, and broadcasts leave parts as they are."""
    model = transformer()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    before = flat(parts(model)).tolist()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with hvd.averaged(model):
        same = flat(parts(model)).tolist() == before
    return {"same": same, **late(fully_shard)}


def late(cut: Callable[[torch.nn.Module], object]) -> dict[str, Any]:
    """The optimizer is wrapped, and its model cut after that."""
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    cut(model)
    model(torch.ones(3, 12)).square().mean().backward()
    error = outcome(optimizer.step)
    optimizer.close()
    return {"error": error}


def nonfinite() -> dict[str, Any]:
    """One learner's part becomes NaN: all learners of its super learner say so in the next step."""
    model = transformer()
    steps = Steps(model, torch.optim.SGD(model.parameters(), lr=0.01))
    steps.step()

    def spoil(*_: Any) -> None:
        if hvd.rank() == hvd.size() - 1:
            parts(model)[0].fill_(float("nan"))

    steps.optimizer.register_step_post_hook(spoil)
    # what is on a GPU is known one step later
    errors = [outcome(steps.step) for _ in range(2 if DEVICE == "cpu" else 3)]
    steps.optimizer.close()
    return {"errors": errors}


def joined() -> dict[str, Any]:
    """The last learner is killed; another super learner comes in its place, with the mean and the moments."""
    model = transformer()
    steps = Steps(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    found: dict[str, Any] = {"new": NEW}
    if NEW:
        found["epoch"] = hvd.admit(model, steps.optimizer, state=-1)
    epoch, victim = found.get("epoch", 0), hvd.size() - 1
    while not (NEW or "after" in found):
        for _ in range(ROUND):
            steps.step()
        if epoch == 1 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(BREATHER_S)
        before, failed = mean_parts(model), bool(hvd.failed_ranks())
        epoch = hvd.admit(model, steps.optimizer, state=epoch + 1)
        if failed and not hvd.failed_ranks():
            found["after"] = float((mean_parts(model) - before).abs().max())
    if NEW:
        mean_parts(model)
    state = [steps.optimizer.state[p] for p in model.parameters()]
    for name in ("exp_avg", "exp_avg_sq"):
        values = flat([its[name].to_local() for its in state])
        found[name] = (
            values.abs().sum().item(),
            float((mean_of_counterparts(values) - values).abs().max()),
        )
    steps.start, steps.own = flat(parts(model)).clone(), torch.zeros_like(steps.own)
    steps.until_corrected()
    return {**found, "error": steps.error(), "failed": list(hvd.failed_ranks())}


def mean_parts(model: torch.nn.Module) -> torch.Tensor:
    with hvd.averaged(model):
        return flat(parts(model)).clone()


def refusals() -> dict[str, Any]:
    size = hvd.super_learner.size()
    mesh, square = init_device_mesh(DEVICE, (size,)), init_device_mesh(DEVICE, (size, 1))
    turned = range(size) if hvd.super_rank() else range(size - 1, -1, -1)
    alone = torch.distributed.new_group(
        [torch.distributed.get_rank()], use_local_synchronization=True
    )

    def wrap(model: torch.nn.Module, **how: Any) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return outcome(lambda: hvd.DistributedOptimizer(optimizer, **how))

    def ignoring() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        fully_shard(model, ignored_params=set(model[1].parameters()))
        return model

    def with_placement(mesh: DeviceMesh, *placements: Any) -> torch.nn.Module:
        model = torch.nn.Linear(4, 4, bias=False)
        weight = distribute_tensor(model.weight.detach(), mesh, placements)
        model.weight = torch.nn.Parameter(weight)
        assert isinstance(model.weight, DTensor)
        return model

    return {
        "mixed": wrap(ignoring()),
        "replicated": wrap(with_placement(mesh, Replicate())),
        "HSDP": wrap(with_placement(square, Replicate(), Shard(0))),
        "two dimensions": wrap(with_placement(square, Shard(0), Shard(1))),
        "tensor parallel": wrap(tensor_parallel(perceptron(bias=True))),
        "order": wrap(with_placement(DeviceMesh(DEVICE, list(turned)), Shard(0))),
        "DTensor": wrap(
            torch.nn.Linear(2, 2), buffers=with_placement(mesh, Shard(0)).named_parameters()
        ),
        "elsewhere": wrap(with_placement(DeviceMesh.from_group(alone, DEVICE), Shard(0))),
        "rounds": wrap(transformer(), averaging="delay_by_one"),
        "buffers": wrap(transformer(), buffers=torch.nn.BatchNorm1d(3)),
        "twice": wrap(transformer(), average_gradients=True),
    }


def lost() -> dict[str, Any]:
    """The last learner is killed: its super learner ends, the others train on."""
    model = transformer()
    steps = Steps(model, torch.optim.SGD(model.parameters(), lr=0.01))
    steps.step()
    if hvd.rank() == hvd.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if hvd.super_rank() == hvd.super_size() - 1:
        try:
            while True:
                steps.step()
        except (AdpsgdError, RuntimeError) as error:
            say(rank=hvd.rank(), case="lost", error=f"{type(error).__name__}: {error}")
            raise
    while not all(hvd.allgather_object(bool(hvd.failed_ranks()))):  # learners make equal steps
        steps.step()
    steps.step()
    return {"error": "", "failed": list(hvd.failed_ranks())}


def main() -> None:
    hvd.init()
    folder, *chosen = sys.argv[1:]
    hvd.super_learner_group()
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "SGD": lambda: law("SGD"),
        "AdamW": lambda: law("AdamW"),
        "accumulation": lambda: law("AdamW", passes=3, reshard_after_forward=False),
        "mixed precision": lambda: law(
            "AdamW",
            "float32",
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
        ),
        "offload": lambda: law("AdamW", offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "tensor parallel": lambda: law("AdamW", model=tensor_parallel(perceptron().double())),
        "late fully_shard": lambda: late(fully_shard),
        "late tensor parallel": lambda: late(tensor_parallel),
        "means": means,
        "mean without waiting": mean_without_waiting,
        "refusals": refusals,
        "checkpoint": lambda: checkpoint(folder),
        "nonfinite": nonfinite,
        "evaluated": evaluated,
        "states": states,
        "added": added,
        "one super learner": one_super_learner,
        "lost": lost,
        "resume": lambda: resume(folder),
        "joined": joined,
    }
    for name in chosen:
        say(rank=hvd.rank(), case=name, **cases[name]())


if __name__ == "__main__":
    main()
