"""The state that a joining super learner receives, and the settings that it must share with the job.

Of a model of which each learner holds a part (DTensors), each learner of the joining super learner receives
the mean of its counterparts' parts of the parameters and of averaged moments, and one counterpart's part of
the optimizer's state. No learner sends or holds other parts.
"""

import bisect
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training import checkpoint
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import described
from hvd_adpsgd.training.means import Entry, means_of_models
from hvd_adpsgd.training.optimizer_state import load_in_place
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.sharded import is_sharded, local


def terms(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return the settings that joining and surviving learners must have in common, each as a phrase.

    Args:
        optimizers: those that hvd.admit is given, whose states `JoinState` holds.
    """
    settings = [term for averaging in live() for term in _terms_of(averaging)]
    return [f"{len(optimizers)} optimizer(s) given to hvd.admit", *settings]


def _terms_of(averaging: Averaging) -> list[str]:
    """Return strategy, shards, arguments and tensors (added ones too) of an Averaging, each as a phrase."""
    _, *added = averaging.tensors.specs
    shards = "a model that is not cut"
    if averaging.tensors.shards > 1:
        shards = (
            f"a model in {averaging.tensors.shards} shards, which needs so many learners in a super learner "
            "(HVD_ADPSGD_SHARD)"
        )
    return [
        f"with {averaging.spec.strategy.spec()}",
        shards,
        *(f"with {argument}" for argument in averaging.spec.arguments),
        *_layout(averaging),
        *described(averaging.spec.named),
        *(str(spec) for specs in added for spec in specs),
    ]


def _layout(averaging: Averaging) -> Iterator[str]:
    """Yield the place of each parameter in the optimizer's param_groups: states are loaded by place."""
    known = averaging.tensors.parameters
    pairs = (*zip(known.names, known.given, strict=True), *averaging.spec.trained)
    names = {id(tensor): name for name, tensor in pairs}
    optimizer = averaging.optimizer()
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for j, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), "a frozen one")
            yield f"{name} as parameter {j} of param_group {i}"
        yield f"{len(group['params'])} parameters in param_group {i}"


def shares(model: torch.nn.Module, givers: int) -> list[list[int]]:
    """Return, by sender, the places in [*parameters, *buffers] that it sends, about equal in bytes.

    DTensors are left out: see exchange_parts.
    """
    tensors = [*model.parameters(), *model.buffers()]
    places = [i for i, tensor in enumerate(tensors) if not is_sharded(tensor)]
    nbytes = [tensors[i].numel() * tensors[i].element_size() for i in places]
    middles = [end - own / 2 for end, own in zip(itertools.accumulate(nbytes), nbytes, strict=True)]
    ends = [bisect.bisect(middles, sum(nbytes) * (i + 1) / givers) for i in range(givers)]
    return [places[a:b] for a, b in itertools.pairwise([0, *ends])]


def pack(value: Any) -> bytes:
    """Serialize a value with tensors of any device; `unpack` loads these tensors into host memory."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(data: bytes) -> Any:
    """Return the value that `pack` serialized. Unpickles: only for data from an authenticated connection."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


class JoinState:
    """What a joining learner receives besides the model: optimizer and averaging states, the user's state.

    Args:
        optimizers: the optimizers of the learner that sends this state.
        state: the `state` that the user passed to hvd.admit, packed.
        moments: by Averaging, the means of `UpdateRule.moments`.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        state: bytes,
        moments: list[list[torch.Tensor]],
    ):
        self.moments = moments
        plain = [_without_averaging(optimizer.state_dict()) for optimizer in optimizers]
        self.optimizers = [outlined(state) for state in plain]
        self.memories = [(a.step, outlined(checkpoint.state(a))) for a in live()]
        self.state = state

    @torch.no_grad()
    def give(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Load this object's states into `optimizers` and their Averaging; the model is loaded before."""
        for averaging in live():
            # else load_state warns of pending corrections from exchanges; a new engine has none
            averaging.step = 0
            averaging.rule.received = True
        for optimizer, saved in zip(optimizers, self.optimizers, strict=True):
            load_in_place(optimizer, filled(saved, mesh_of(optimizer)))
        for averaging, moments in zip(live(), self.moments, strict=True):
            whole = [moment for moment in averaging.rule.moments() if not is_sharded(moment)]
            for mine, mean in zip(whole, moments, strict=True):
                mine.copy_(mean)
        mesh = mesh_of(*optimizers)
        for averaging, (step, state) in zip(live(), self.memories, strict=True):
            if state and not averaging.rule.own:
                checkpoint.load_state(averaging, filled(state, mesh))
            averaging.step = step
            averaging.rule.received = False


def _without_averaging(state: dict[str, Any]) -> dict[str, Any]:
    """Return a wrapped optimizer's state without entry "averaging", which `JoinState.memories` holds."""
    return {key: value for key, value in state.items() if key != "averaging"}


class Outline(NamedTuple):
    """A DTensor without its values, in a message to a learner that holds another mesh.

    Attributes:
        shape, dtype, placements: those of the DTensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...]


def outlined(value: Any) -> Any:
    """Return a nested value of dicts and lists with an Outline in the place of each DTensor."""
    if isinstance(value, dict):
        return {key: outlined(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Outline):
        return type(value)(outlined(each) for each in value)
    if isinstance(value, torch.Tensor) and is_sharded(value):
        its: Any = value
        return Outline(tuple(its.shape), its.dtype, tuple(its.placements))
    return value


def filled(value: Any, mesh: Any) -> Any:
    """Return a nested value with zeros on `mesh` in the place of each Outline."""
    if isinstance(value, Outline):
        # takes long; where there are DTensors it is imported
        from torch.distributed.tensor import zeros

        shape, dtype, placements = value
        return zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    if isinstance(value, dict):
        return {key: filled(each, mesh) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(filled(each, mesh) for each in value)
    return value


def mesh_of(*optimizers: torch.optim.Optimizer) -> Any:
    """Return the mesh over which the optimizers' parameters are sharded; None if they are not."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    cut: list[Any] = [p for group in groups for p in group["params"] if is_sharded(p)]
    return cut[0].device_mesh if cut else None


def has_parts(model: torch.nn.Module) -> bool:
    """Whether a model has DTensors."""
    return any(is_sharded(tensor) for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def exchange_parts(
    world: World, model: torch.nn.Module, averagings: Sequence[Averaging], source: int, joins: int
) -> None:
    """Give the joining super learner's learners their parts; all learners call it while averaging pauses.

    Does nothing for a model that is not sharded. `source` and `joins` are super_ranks; `world` includes the
    joining super learner. The order of `averagings` is the same on all learners.
    """
    named = [tensor for tensor in (*model.parameters(), *model.buffers()) if is_sharded(tensor)]
    moments = [m for averaging in averagings for m in averaging.rule.moments() if is_sharded(m)]
    averaged = {id(m) for m in moments}
    states = [t for a in averagings for t in _state(a) if id(t) not in averaged]
    here, doing = world.super_rank, "admit"
    _receive_parts(world, doing, [*named, *moments], float(here != joins), joins)
    _receive_parts(world, doing, states, float(here == source), joins)


def _receive_parts(
    world: World, doing: str, tensors: list[torch.Tensor], weight: float, joins: int
) -> None:
    if not tensors:
        return
    is_new = world.super_rank == joins
    wanted = [is_new] * len(tensors)
    entries = [Entry("a part of the optimizer's state", tensor) for tensor in tensors]
    means, _ = means_of_models(world, doing, entries, weight, wanted=wanted)
    for tensor, mean in zip(tensors, means, strict=False):
        assert mean is not None
        local(tensor).copy_(mean)


def _state(averaging: Averaging) -> list[torch.Tensor]:
    """Return the DTensors of an optimizer's state and of the update rule, in one order on all learners."""
    optimizer = averaging.optimizer()
    assert optimizer is not None, "`held` keeps the optimizers"
    found = state_of(optimizer)
    for _, tensors in sorted(averaging.rule.tensors().items()):
        found += tensors
    return [each for each in found if is_sharded(each)]


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state, in one order on all learners."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            its = optimizer.state.get(parameter, {})
            found += [its[key] for key in sorted(its)]
    return [each for each in found if isinstance(each, torch.Tensor)]
