"""`replace_failed`: a new super learner for a lost one, with the mean model, while the others train."""

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
from hvd_adpsgd.runtime.collectives import allgather_object, wait
from hvd_adpsgd.runtime.replacement import MergedComms, SpawnedReplacement
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
ATTEMPTS = (
    3  # joining learners that fail, after which nobody is started for a super learner any more
)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_recruits: dict[int, SpawnedReplacement] = {}  # started by this learner, by super_rank
_failures: dict[int, int] = {}  # by super_rank


def replace_failed(
    model: torch.nn.Module,
    optimizer: Optimizers,
    state: Any = None,
    *,
    patience_s: float = 120.0,
) -> Any:
    """Let new super learners take the places of lost ones; all learners call it, once in an epoch.

        epoch = hvd.replace_failed(model, optimizer, state=0)
        while epoch < epochs:
            train(...)
            epoch = hvd.replace_failed(model, optimizer, state=epoch + 1)

    The first call after a loss starts a super learner with the command line of this one, and returns at
    once; a later call, when it is ready, takes it in. It runs the script from the top, with the rank() of
    the lost one, and comes to its own first call of this function: there it gets the exact mean of the
    living models, the state of the optimizer of one of them, and `state`. What it did before in the way
    of operations over all learners (broadcast_parameters, ...) concerned itself alone.

    Waits for the slowest super learner, as average_model does, also if nobody has failed. Call it between
    steps. One super learner joins per call. If it cannot be started, or has failed meanwhile, the others go
    on (a line in the log tells why), and another one is tried, three times in all.

    Args:
        model: the same module on every learner. The models of the living stay as they are.
        optimizer: or several; those of the training.
        state: anything that can be pickled; what a joining learner must know, such as the epoch.
        patience_s: seconds from the start of a super learner until it must have come here.

    Returns:
        `state`; on a joining learner that of the others.

    Raises:
        PeerFailedError: if a learner of this super learner has failed, or, on a joining learner, all
            others.
        SystemExit: on a joining learner, with status 0, if the others have ended before it joined.
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
            _take_in(world, ready, model, optimizers, state)
    return state


# ---- on the living ------------------------------------------------------------------------------


def _survey(world: World, patience_s: float) -> tuple[int, int] | None:
    """Start whoever is missing. Returns (super_rank, its recruiter) of one that is ready."""
    mine = {number: recruit.state() for number, recruit in _recruits.items()}
    told = world.collectives.run(DOING, lambda comm: allgather_object(comm, mine))
    _require_whole(world)
    lost = replacement.failed_groups(world)
    known = {
        number: (state, rank)
        for rank, states in zip(world.collectives.ranks, told, strict=True)
        for number, state in states.items()
        if number in lost and state != "failed"
    }
    for number in [n for n, state in mine.items() if state == "failed"]:
        _give_up(number)
    for number in lost:
        if number not in known and world.rank == _starter(world):
            _start(world, number, patience_s)
    ready = [(number, rank) for number, (state, rank) in known.items() if state == "ready"]
    return min(ready) if ready else None


def _require_whole(world: World) -> None:
    missing = sorted(set(world.groups[world.super_rank]) - set(world.collectives.ranks))
    if missing:
        raise PeerFailedError(
            f"{DOING}: learners {missing} of this super learner {world.super_rank} have failed, and it "
            "cannot go on without them. The others start another one in its place."
        )


def _starter(world: World) -> int:
    """The first learner whose super learner is whole."""
    living = set(world.collectives.ranks)
    return min(group[0] for group in world.groups if living >= set(group))


def _start(world: World, number: int, patience_s: float) -> None:
    if _failures.get(number, 0) >= ATTEMPTS:
        return
    if not _recruits:
        world.teardown.at_shutdown(_dismiss)
    log.warning("super learner %d has failed; starting another one in its place.", number)
    _recruits[number] = SpawnedReplacement(world, number, _terms(), patience_s)


def _give_up(number: int) -> None:
    recruit = _recruits.pop(number)
    _failures[number] = _failures.get(number, 0) + 1
    log.error(
        "super learner %d was not replaced: %s. The others go on%s.",
        number,
        recruit.problem,
        "" if _failures[number] < ATTEMPTS else f"; no more after {ATTEMPTS} attempts",
    )


def _dismiss() -> None:
    """The job ends: who has not joined yet comes too late."""
    while _recruits:
        _recruits.popitem()[1].dismiss()


def _take_in(
    world: World,
    ready: tuple[int, int],
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: Any,
) -> None:
    """Meet the joining learner, and go on with it; or without it, if it does not come."""
    number, recruiter = ready
    recruit = _recruits.get(number) if world.rank == recruiter else None
    with averaging_paused():
        values = mean_model(model)  # over the living
        if not _meet(world, recruit, recruiter):
            if recruit is not None:
                recruit.problem = "it failed, or did not come, when all met"
                _give_up(number)
            return
        _failures.pop(number, None)
        if recruit is not None:
            del _recruits[number]
        made = _Inheritance(values, optimizers, state) if recruit is not None else None
        with contextlib.suppress(
            PeerFailedError
        ):  # the recruiter; the joining learner then ends, too
            broadcast_object(made and made.pack(), recruiter, DOING)
    del values, made
    _trim()
    if recruit is not None:
        log.warning("super learner %d has joined, with the mean of the others' models.", number)


def _trim() -> None:
    """Give free memory back: glibc keeps what the threads of each meeting have used."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _meet(world: World, recruit: SpawnedReplacement | None, recruiter: int) -> bool:
    """Whether all living are connected with the joining learner now; the same answer on all of them."""
    port = recruit.open(recruiter) if recruit is not None else None
    side = world.collectives.run(DOING, lambda comm: comm.Dup())
    if recruiter in world.collectives.ranks:
        root = world.collectives.ranks.index(recruiter)
        met = replacement.within(
            replacement.MEETING_S,
            lambda: _connected(side, world, port, root, accepts=True),
            _drop,
        )
    else:
        met = None
    if not all(world.collectives.run(DOING, lambda comm: allgather_object(comm, met is not None))):
        with contextlib.suppress(Exception):
            side.Revoke()
        if met is not None:
            _drop(met)
        return False
    assert met is not None
    if recruit is not None:
        recruit.come()
    world.teardown.owned.append(side)
    _go_on_with(world, *met)
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
    """Nothing came of it."""
    for engine in met[1]:
        engine.stop()
        engine.release()


def _go_on_with(world: World, joint: MergedComms, engines: list[Engine]) -> None:
    """Let go of the old engines and communicators. The engines are paused."""
    for averaging, engine in zip(live(), engines, strict=True):
        replace_engine(averaging, engine)
    joint.adopt(world)


def replace_engine(averaging: Averaging, engine: Engine) -> None:
    """Go on with another engine; between steps, paused. Numbers of exchanges begin anew."""
    averaging.engine.stop()
    averaging.record.events(averaging.engine)
    averaging.engine.release()
    averaging.engine = engine


# ---- on a joining learner ------------------------------------------------------------------------------


def _arrive(world: World, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Meet the others. Returns their state."""
    joining = replacement.this_newcomer()
    wait(world.inner.Ibarrier())
    port, recruiter = joining.ready(_terms())
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
    _go_on_with(world, *met)
    told = _Inheritance.unpack(broadcast_object(None, recruiter, DOING))
    told.give(model, optimizers)
    for averaging in live():
        resume(averaging)
    return told.state


def _terms() -> list[Any]:
    """What joining learners and living must agree on."""
    return [_terms_of(averaging) for averaging in live()]


def _terms_of(averaging: Averaging) -> tuple[str, list[str]]:
    return averaging.spec.strategy.spec(), described(averaging.spec.named)


class _Inheritance:
    """What a joining learner gets.

    Args:
        values: of the model: parameters, then buffers; means where they are floating-point numbers.
        optimizers: of the recruiter.
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
        """Tensors of any device, to be unpacked into host memory."""
        file = io.BytesIO()
        torch.save(self, file)
        return file.getvalue()

    @staticmethod
    def unpack(data: bytes) -> _Inheritance:
        made: _Inheritance = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
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
