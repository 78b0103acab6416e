"""The decision whether a joining super learner is admitted, which is the same on all members.

Members are the processes of the job that average already. Either all of them switch to new engines, which
include the joining super learner, or all keep their old ones. joining/admission.py decides so in a real job,
simulation/admission.pyx in a simulated one.
"""

from collections.abc import Collection

# Longest time that an engine takes to leave when all members switch to new ones. Nothing of it is pending and
# its peers leave too, so that an answer to its departure matters to nobody: the last one would wait in vain.
MOVE_S = 0.5


def all_switch(all_made: bool, voted: Collection[int], asked: Collection[int]) -> bool:
    """Whether all members switch to the new engines.

    Args:
        all_made: whether every vote was yes: the new engine was made.
        voted: ranks of the members that have voted.
        asked: ranks of the members that were to vote. If one is missing, none switches, because the new
            engines would wait for the lost member.
    """
    return all_made and set(voted) == set(asked)
