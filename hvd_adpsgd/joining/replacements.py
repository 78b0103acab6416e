"""Which failed super learners are replaced, and which learners start the replacements.

Pure functions of values that are equal on all learners, so all learners get the same result. The
learners of a replacement run on the failed super learner's host, in place of its learners, or as extra
learners on another host. If the network is
cut, the smaller side starts no replacements.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hvd_adpsgd.launch.world import Placement

Groups = Sequence[Sequence[int]]


def lost(groups: Groups, living: Collection[int]) -> list[int]:
    """Return the super_ranks of the super learners without a living learner."""
    return [i for i, group in enumerate(groups) if set(living).isdisjoint(group)]


def is_minority(
    placements: Sequence[Placement], groups: Groups, living: Collection[int], left: Collection[int]
) -> bool:
    """Return whether the living learners may be the smaller side of a cut network.

    The learners on the other side may still train, and replace the learners on this side. A cut passes
    between hosts, so a super learner that is lost on the host of a living learner has failed. Of two equal
    sides, the side with the lowest super_rank counts as the larger one.

    `left`: super_ranks of super learners that have left in order, so cannot be on the other side.
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
    """Return, by super_rank of a lost super learner, the rank of the learner that starts its replacement.

    A lost super learner for which no host has enough free slots is left out.

    Args:
        placements: placements of all learners, by rank.
        groups: ranks of the learners of each super learner, by super_rank.
        living: ranks of the learners that have not failed.
        awaited: by super_rank of replacements already started, the rank of the learner that started each.
        spare: number of learners that a host may run in addition to its original number.
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
