"""Which failed super learners are replaced, and which learners start the replacements.

Pure functions of what all learners know alike. A replacement takes the slots of the failed super learner on
its host, or spare slots of another host; the smaller side of a cut network starts none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hvd_adpsgd.launch.world import Placement

__all__ = ["is_minority", "lost", "starters"]

Groups = Sequence[Sequence[int]]


def lost(groups: Groups, living: Collection[int]) -> list[int]:
    """The super learners without a living learner."""
    return [i for i, group in enumerate(groups) if set(living).isdisjoint(group)]


def is_minority(
    placements: Sequence[Placement], groups: Groups, living: Collection[int], left: Collection[int]
) -> bool:
    """Whether these may be the smaller side of a cut network: the others may train on, and replace them.

    A cut passes between hosts, so a super learner that is lost on the host of a living learner has failed. Of
    two equal sides that with the lowest super learner is the larger one.

    Args:
        placements: by rank.
        groups: ranks by super learner.
        living: ranks.
        left: super learners that have left: these have ended.
    """
    hosts = {placements[rank].host for rank in living}
    gone = [i for i in lost(groups, living) if i not in left]
    unseen = [i for i in gone if placements[groups[i][0]].host not in hosts]
    whole = [i for i, group in enumerate(groups) if set(living).issuperset(group)]
    return not whole or (len(whole), -min(whole)) < (len(unseen), -min(unseen, default=0))


def starters(
    placements: Sequence[Placement],
    groups: Groups,
    living: Collection[int],
    awaited: Mapping[int, int],
    spare: int = 0,
) -> dict[int, int]:
    """By lost super learner the rank that starts its replacement: one that is missing does not fit anywhere.

    Args:
        placements: by rank.
        groups: ranks by super learner.
        living: ranks.
        awaited: super learners that are started already, and the ranks that have started them.
        spare: learners that a host may run beyond its own.
    """
    leaders = [group[0] for group in groups if set(living).issuperset(group)]
    load = Counter(placements[rank].host for rank in living)
    for i, rank in awaited.items():
        load[placements[rank].host] += len(groups[i])
    found = {}
    for i in lost(groups, living):
        if i in awaited:
            continue
        host = placements[groups[i][0]].host
        there = [rank for rank in leaders if placements[rank].host == host]
        for rank in there or leaders:
            at = placements[rank]
            if load[at.host] + len(groups[i]) <= at.local_size + spare:
                load[at.host] += len(groups[i])
                found[i] = rank
                break
    return found
