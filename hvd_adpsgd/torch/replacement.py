"""`replace_failed`: a new super learner, with the mean model, replaces a failed one during training."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
from collections.abc import Sequence
from typing import Any

import torch

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.engine.failures import ulfm_enabled
from hvd_adpsgd.errors import PeerFailedError
from hvd_adpsgd.runtime import replacement
from hvd_adpsgd.runtime import world as worlds
from hvd_adpsgd.runtime.collectives import wait
from hvd_adpsgd.runtime.replacement import MergedComms, SpawnedReplacement, failed_groups
from hvd_adpsgd.runtime.world import World
from hvd_adpsgd.torch import checkpoint
from hvd_adpsgd.torch.averaging import Averaging, live
from hvd_adpsgd.torch.collectives import broadcast_object
from hvd_adpsgd.torch.consistency import described
from hvd_adpsgd.torch.membership import on_failure
from hvd_adpsgd.torch.model_average import mean_model
from hvd_adpsgd.torch.pausing import averaging_paused, resume

__all__ = ["replace_failed"]

log = logging.getLogger("hvd_adpsgd")

DOING = "replace_failed"
ATTEMPTS = 3  # failed starts, after which a super learner is not replaced

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_spawned: dict[int, SpawnedReplacement] = {}  # started by this learner, by super_rank
_failures: dict[int, int] = {}  # by super_rank


def replace_failed(
    model: torch.nn.Module,
    optimizer: Optimizers,
    state: Any = None,
    *,
    patience_s: float = 120.0,
) -> Any:
    """Replace failed super learners by new ones; all learners call this, once per epoch.

        epoch = hvd.replace_failed(model, optimizer, state=0)
        while epoch < epochs:
            train(...)
            epoch = hvd.replace_failed(model, optimizer, state=epoch + 1)

    The first call after a failure starts a super learner with the command line of this one, and returns
    at once. It joins in the first later call that finds it ready. The new super learner runs the script
    from the top, with the ranks of the failed one, up to its own first call of this function. That call
    returns `state` and sets the exact mean of the surviving models and the optimizer state of one of them.
    Before it, operations over all learners (broadcast_parameters, ...) run in the new super learner alone.

    Waits for the slowest super learner, as average_model does, also without a failure. Call it between
    steps. One super learner joins per call. If it cannot be started or fails before it joins, training
    continues, the log states the reason, and another one is started: three attempts in all.

    Args:
        model: the same module on every learner. The surviving models are not changed.
        optimizer: the wrapped optimizer, or several.
        state: a picklable value for a joining learner, such as the epoch.
        patience_s: seconds from the start of a super learner until it must call this function.

    Returns:
        `state`; on a joining learner that of the surviving learners.

    Raises:
        PeerFailedError: if a learner of this super learner has failed, or, on a joining learner, all
            surviving learners.
        SystemExit: on a joining learner, with status 0, if the job ends before it joins.
    """
    world = worlds.current()
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if world.collectives.joining:
        return _arrive(world, model, optimizers)
    if world.super_size == 1 or not ulfm_enabled():
        return state
    with on_failure("continue"):
        ready = _survey(world, patience_s)
        if ready is not None:
            _admit(world, ready, model, optimizers, state)
    return state


# ---- on surviving learners ----------------------------------------------------------------------


def _survey(world: World, patience_s: float) -> tuple[int, int] | None:
    """Start missing super learners. Returns (super_rank, rank of its starter) of one that is ready."""
    mine = {number: spawned.state() for number, spawned in _spawned.items()}
    told = world.collectives.gather(DOING, mine)
    require_whole(world)
    failed = failed_groups(world)
    known = {
        number: (state, rank)
        for rank, states in zip(world.collectives.ranks, told, strict=True)
        for number, state in states.items()
        if number in failed and state != "failed"
    }
    for number in [n for n, state in mine.items() if state == "failed"]:
        _give_up(number)
    for number in failed:
        if number not in known and world.rank == _starter(world):
            _start(world, number, patience_s)
    ready = [(number, rank) for number, (state, rank) in known.items() if state == "ready"]
    return min(ready) if ready else None


def require_whole(world: World) -> None:
    missing = sorted(set(world.groups[world.super_rank]) - set(world.collectives.ranks))
    if missing:
        raise PeerFailedError(
            f"{DOING}: learners {missing} of this super learner {world.super_rank} have failed, and it "
            "cannot continue without them. Its peers start another one in its place."
        )


def _starter(world: World) -> int:
    """The lowest rank whose super learner is complete."""
    living = set(world.collectives.ranks)
    return min(group[0] for group in world.groups if living >= set(group))


def _start(world: World, number: int, patience_s: float) -> None:
    if _failures.get(number, 0) >= ATTEMPTS:
        return
    if not _spawned:
        world.teardown.at_shutdown(_dismiss)
    log.warning("super learner %d is gone; starting another one in its place.", number)
    _spawned[number] = SpawnedReplacement(world, number, terms(), patience_s)


def _give_up(number: int) -> None:
    spawned = _spawned.pop(number)
    _failures[number] = _failures.get(number, 0) + 1
    log.error(
        "super learner %d was not replaced: %s. The others go on%s.",
        number,
        spawned.problem,
        "" if _failures[number] < ATTEMPTS else f"; no more after {ATTEMPTS} attempts",
    )


def _dismiss() -> None:
    """Tell joining learners to exit; called in shutdown()."""
    while _spawned:
        _spawned.popitem()[1].dismiss()


def _admit(
    world: World,
    ready: tuple[int, int],
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: Any,
) -> None:
    """Merge with the joining learner and send it the state; continue without it if it fails."""
    number, starter = ready
    spawned = _spawned.get(number) if world.rank == starter else None
    with averaging_paused():
        values = mean_model(model)  # over surviving learners
        if not _meet(world, spawned, starter):
            if spawned is not None:
                spawned.problem = "it failed, or did not come, when all met"
                _give_up(number)
            return
        _failures.pop(number, None)
        if spawned is not None:
            del _spawned[number]
        made = JoinState(values, optimizers, state) if spawned is not None else None
        with contextlib.suppress(PeerFailedError):  # of the starter; the joining learner exits too
            broadcast_object(made and made.pack(), starter, DOING)
    del values, made
    trim()
    if spawned is not None:
        log.warning("super learner %d has joined, with the mean of the others' models.", number)


def trim() -> None:
    """Return free memory to the system: glibc keeps what the threads of each merge have used."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _meet(world: World, spawned: SpawnedReplacement | None, starter: int) -> bool:
    """Whether all surviving learners have merged with the joining one; the same answer on all."""
    port = spawned.open(starter) if spawned is not None else None
    ranks, sides = world.collectives.ranks, replacement.Side(world)
    if starter in ranks:
        met = replacement.within(
            replacement.MEETING_S,
            lambda: _connected(sides.make(), world, port, ranks.index(starter), accepts=True),
            _drop,
        )
    else:
        met = None
    # all agree before one adopts: alone, a learner would wait on communicators that its peers have dropped
    if (
        not all(world.collectives.gather(DOING, met is not None))
        or world.collectives.ranks != ranks
    ):
        sides.revoke()
        if met is not None:
            _drop(met)
        return False
    assert met is not None
    if spawned is not None:
        spawned.come()
    world.teardown.owned.append(sides.comm)
    _switch_to(world, *met)
    return True


def _connected(
    side: Any, world: World, port: str | None, root: int, accepts: bool
) -> tuple[MergedComms, list[Engine]]:
    """The new communicators, and engines that use them."""
    joint = replacement.connect(side, world, port, root, accepts)
    engines: list[Engine] = []
    try:
        for averaging in live():
            engines.append(averaging.make_engine(joint.outer, joint.members))
    except Exception:
        _drop((joint, engines))
        raise
    return joint, engines


def _drop(met: tuple[MergedComms, list[Engine]]) -> None:
    """Stop engines that are not needed: the merge has failed."""
    for engine in met[1]:
        engine.stop()
        engine.release()


def _switch_to(world: World, joint: MergedComms, engines: list[Engine]) -> None:
    """Replace the old engines and communicators. The engines are paused."""
    for averaging, engine in zip(live(), engines, strict=True):
        replace_engine(averaging, engine)
    joint.adopt(world)


def replace_engine(averaging: Averaging, engine: Engine) -> None:
    """Replace the engine, between steps, paused. Exchange counters restart at 0."""
    averaging.engine.stop()  # before `events`, which misses what the thread adds later; `release` frees them
    averaging.record.events(averaging.engine)
    averaging.engine.release()
    averaging.engine = engine


# ---- on a joining learner ------------------------------------------------------------------------------


def _arrive(world: World, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Join the surviving learners. Returns their state."""
    joining = replacement.this_newcomer()
    wait(world.inner.Ibarrier())
    port, starter = joining.ready(terms())
    side = world.collectives.comm.Dup()
    met = replacement.within(
        2 * replacement.MEETING_S, lambda: _connected(side, world, port, 0, accepts=False), _drop
    )
    if met is None:
        raise PeerFailedError(
            f"super learner {world.super_rank} was to join, but the others did not meet it within "
            f"{2 * replacement.MEETING_S:g} s. They go on, and start another one."
        )
    joining.await_come()
    world.teardown.owned.append(side)
    _switch_to(world, *met)
    told = JoinState.unpack(broadcast_object(None, starter, DOING))
    told.give(model, optimizers)
    for averaging in live():
        resume(averaging)
    return told.state


def terms() -> list[Any]:
    """What joining and surviving learners must agree on."""
    return [_terms_of(averaging) for averaging in live()]


def _terms_of(averaging: Averaging) -> tuple[str, list[str]]:
    return averaging.spec.strategy.spec(), described(averaging.spec.named)


class JoinState:
    """What a joining learner receives.

    Args:
        values: of the model: parameters, then buffers; means where they are floating-point numbers.
        optimizers: of the starter.
        state: the user's.
    """

    def __init__(
        self, values: list[torch.Tensor], optimizers: list[torch.optim.Optimizer], state: Any
    ):
        self.values = values
        self.optimizers = [optimizer.state_dict() for optimizer in optimizers]
        self.memories = [(averaging.step, checkpoint.state(averaging)) for averaging in live()]
        self.state = state

    def pack(self) -> bytes:
        """Serialize tensors of any device; `unpack` puts them into host memory."""
        file = io.BytesIO()
        torch.save(self, file)
        return file.getvalue()

    @staticmethod
    def unpack(data: bytes) -> JoinState:
        made: JoinState = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return made

    @torch.no_grad()
    def give(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Overwrite model, optimizers and averagings."""
        tensors = [*model.parameters(), *model.buffers()]
        for tensor, value in zip(tensors, self.values, strict=True):
            tensor.data.copy_(value)
        for optimizer, saved in zip(optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(saved)
        for averaging, (step, state) in zip(live(), self.memories, strict=True):
            if state and not averaging.rule.own:
                checkpoint.load_state(averaging, state)
            averaging.step = step
