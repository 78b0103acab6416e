"""How a learner changes over to new connections and engines, which include a joining super learner."""

import logging

from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.errors import AdpsgdError
from hvd_adpsgd.joining import reconnect
from hvd_adpsgd.joining.candidates import JoinOffer
from hvd_adpsgd.joining.decision import MOVE_S
from hvd_adpsgd.joining.reconnect import Gather, NewGroup
from hvd_adpsgd.launch.world import World, names_of
from hvd_adpsgd.lifecycle.shutdown import exit_state
from hvd_adpsgd.training.presence import live, renumber

log = logging.getLogger("hvd_adpsgd")

DOING = "admit"


def prepare(
    world: World,
    offer: JoinOffer,
    ranks: tuple[int, ...],
    senders: tuple[int, ...],
    gather: Gather,
    ends: float,
) -> tuple[NewGroup, list[Engine]] | None:
    """Make new connections and engines; None if that fails here, after as many gathers as on all learners."""
    new_group, engines = None, []
    try:
        names = names_of(offer.groups, offer.placements)
        new_group = reconnect.connect_anew(world, offer, ranks, senders, gather, ends)
        for averaging in live():
            make = averaging.engines.for_new_group
            engines.append(make(names, new_group.comms, new_group.members))
    except AdpsgdError as error:
        log.info("a joining super learner could not be connected: %s", error)
        for engine in engines:
            engine.stop()
            engine.release(keeps_memory=True)
        if new_group is not None:
            new_group.hub.close()
            new_group = None
    try:
        answers = gather.made(new_group is not None)
        if not all(answers[rank] for rank in ranks):
            raise reconnect.NotReconnectedError(
                "another learner could not make its connections or engines"
            )
    except AdpsgdError as error:
        log.info("a joining super learner could not be connected: %s", error)
        if new_group is not None:
            drop((new_group, engines))
        return None
    return (new_group, engines) if new_group is not None else None


def drop(prepared: tuple[NewGroup, list[Engine]] | None) -> None:
    if prepared is not None:
        for engine in prepared[1]:
            engine.stop()
            engine.release(keeps_memory=True)
        prepared[0].hub.close()


def switch(world: World, new_group: NewGroup, engines: list[Engine]) -> None:
    """Switch to the new connections and engines; close the old connections when all have switched."""
    old = exit_state.hub
    grown = new_group.adopt(world)
    for averaging, engine in zip(live(), engines, strict=True):
        averaging.move_to(grown, engine, MOVE_S)
    renumber()
    grown.collectives.gather(DOING, None)
    new_group.end_by(None)
    if old is not None:
        old.close()
