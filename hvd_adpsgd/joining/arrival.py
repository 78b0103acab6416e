"""hvd.admit on a joining super learner, which has made ready and waits for the job's learners."""

import time
from typing import Any

import torch

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.errors import AdpsgdError, PeerFailedError
from hvd_adpsgd.joining import joining, reconnect
from hvd_adpsgd.joining.candidates import JoinOffer, open_own_listener
from hvd_adpsgd.joining.change_over import drop, prepare, switch
from hvd_adpsgd.joining.join_parts import exchange_parts, has_parts
from hvd_adpsgd.joining.join_state import JoinState, shares, terms, unpack
from hvd_adpsgd.joining.reconnect import RECONNECT_S, NewGroup
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.launch.world import World
from hvd_adpsgd.training.pause import resume
from hvd_adpsgd.training.presence import live


def arrive(world: World, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Join the running job, on a joining learner; return the state of its learners, as packed by admit."""
    candidate = joining.this_learner()
    for averaging in live():
        averaging.engines.make_memory_ahead()
    candidate.tell(terms(optimizers))
    prepared = None
    while prepared is None:
        offer, ranks, senders = candidate.ready(world)
        prepared = _met_as_candidate(world, candidate, offer, ranks, senders)
    switch(world, *prepared)
    new_group = prepared[0]
    told = _receive(new_group, model)
    told.give(optimizers)
    if has_parts(model):
        world = worlds.current()
        exchange_parts(world, model, live(), world.super_rank_of(senders[0]), world.super_rank)
    for averaging in live():
        resume(averaging)
    joining.watch_job(worlds.current())
    open_own_listener(worlds.current(), new_group.hub.address, candidate.secret)
    return unpack(told.state)


def _met_as_candidate(
    world: World,
    candidate: joining.JoiningLearner,
    offer: JoinOffer,
    ranks: tuple[int, ...],
    senders: tuple[int, ...],
) -> tuple[NewGroup, list[Engine]] | None:
    """Return the new connections and engines; None if the job puts this super learner off.

    Raises:
        PeerFailedError: if the job goes on without this super learner.
    """
    ends = time.monotonic() + 2 * RECONNECT_S  # later than the other learners, which give up first
    conversation = candidate.conversation
    gather = reconnect.CandidatesGather(world, len(offer.placements), conversation, ends)
    prepared = prepare(world, offer, ranks, senders, gather, ends)
    verdict = candidate.verdict(world)
    if verdict is True and prepared is not None:
        return prepared
    drop(prepared)
    if isinstance(verdict, AdpsgdError):
        raise verdict
    if verdict is not False:
        raise PeerFailedError(
            f"super learner {world.super_rank} was to join, but the others did not connect to it: one of "
            f"them failed, or did not come within {RECONNECT_S:g} s. They continue training."
        )
    return None


@torch.no_grad()
def _receive(new_group: NewGroup, model: torch.nn.Module) -> JoinState:
    """Overwrite the model with the parts that the senders send; return the first sender's JoinState."""
    tensors, told = [*model.parameters(), *model.buffers()], []
    for transfer, share in zip(
        new_group.transfers, shares(model, len(new_group.transfers)), strict=True
    ):
        assert transfer is not None
        state, values = reconnect.receive(transfer)
        told.append(state)
        for i, value in zip(share, values, strict=True):
            if tensors[i].shape == value.shape:  # a cache may have another one on each learner
                tensors[i].data.copy_(torch.from_numpy(value))
    made: JoinState = unpack(told[0])
    return made
