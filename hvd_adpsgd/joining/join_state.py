"""The state that a joining super learner receives, and the settings that it must share with the job."""

import bisect
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_adpsgd.joining.join_parts import filled, mesh_of, outlined
from hvd_adpsgd.training import checkpoint
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.consistency import described
from hvd_adpsgd.training.optimizer_state import load_in_place
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.sharded import is_sharded


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

    DTensors are left out: see join_parts.
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
