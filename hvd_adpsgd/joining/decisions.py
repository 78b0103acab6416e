"""State machines that decide, in each process, whether a joining super learner is admitted to a running job.

They send no messages and read no clock: joining/admission.py drives them in a real job,
simulation/admission.pyx in a simulated one. Members are the processes of the job that average already. Either
all members switch to new engines, which include the joining super learner, or all keep their old engines.

    a member                                            the joining super learner
    begins    every member knows the same member list   offered   it is asked to make its engine
    votes     whether its new engine was made           let_in    all members switch
    goes_over all voted yes, and no member was lost     received  it has the model, and trains
"""

from collections.abc import Collection
from enum import Enum, auto

# Longest time that an engine takes to leave when all members switch to new ones. Nothing of it is pending and
# its peers leave too, so that an answer to its departure matters to nobody: the last one would wait in vain.
MOVE_S = 0.5


class MemberStage(Enum):
    """Stages of a member of the job during an admission: what the member waits for."""

    RESTS = auto()  # its engine is paused, and the member waits for the member list
    # waits for its new engine; the member that talks with the joining super learner waits for the engine of
    # that super learner, too
    MAKES = auto()
    VOTED = auto()  # waits for the votes of all members
    OVER = auto()  # the member has switched to the new engine, or keeps the old one


class JoinerStage(Enum):
    """Stages of a joining super learner during its admission: what the super learner waits for."""

    WAITS = auto()  # waits until a member offers to admit it
    MAKES = auto()  # waits for its own engine, and for the members' decision
    # all members have switched to the new engines; the joining super learner waits for their mean model
    IN = auto()
    TRAINS = auto()  # has the members' mean model, and trains
    OUT = auto()  # has given up joining


class Member:
    """State machine of one member of the job while a joining super learner is admitted.

    Attributes:
        stage: see MemberStage.
        members: ranks of the members that are to switch together; empty until `begins`.
    """

    def __init__(self) -> None:
        self.stage = MemberStage.RESTS
        self.members: frozenset[int] = frozenset()

    def begins(self, members: Collection[int]) -> None:
        """Store the member list: this member now makes an engine for members and joining super learner."""
        self._move(MemberStage.RESTS, MemberStage.MAKES)
        self.members = frozenset(members)

    def votes(self, made: bool) -> bool:
        """Move to stage VOTED; return this member's vote on the admission.

        Args:
            made: whether this member's new engine was made; on the member that talks with the joining super
                learner, whether the engine of the joining one was made too.
        """
        self._move(MemberStage.MAKES, MemberStage.VOTED)
        return made

    def goes_over(self, all_made: bool, members: Collection[int]) -> bool:
        """Whether this member switches to the new engine; the decision is equal on all members.

        Args:
            all_made: whether every vote was yes.
            members: ranks of the members that have voted. If one is missing, nobody switches, because the new
                engines would wait for the lost member.
        """
        self._move(MemberStage.VOTED, MemberStage.OVER)
        return all_made and frozenset(members) == self.members

    def _move(self, before: MemberStage, after: MemberStage) -> None:
        if self.stage is not before:
            raise RuntimeError(f"a member is in stage {self.stage.name}, expected {before.name}")
        self.stage = after


class Joiner:
    """State machine of the joining super learner while it is admitted.

    Attributes:
        stage: see JoinerStage.
    """

    def __init__(self) -> None:
        self.stage = JoinerStage.WAITS

    @property
    def is_out(self) -> bool:
        """Whether the joining super learner has given up; this is final."""
        return self.stage is JoinerStage.OUT

    def offered(self) -> None:
        """Record that a member has asked the joining super learner to make its engine."""
        self._move(JoinerStage.WAITS, JoinerStage.MAKES)

    def let_in(self) -> None:
        """Record that all members switch to new engines, which include the joining super learner."""
        self._move(JoinerStage.MAKES, JoinerStage.IN)

    def received(self) -> None:
        """Record that the joining super learner has received the members' mean model, and trains."""
        self._move(JoinerStage.IN, JoinerStage.TRAINS)

    def times_out(self) -> None:
        """Give up joining at the caller's time limit, unless the members have admitted this super learner."""
        if self.stage in (JoinerStage.WAITS, JoinerStage.MAKES):
            self.stage = JoinerStage.OUT

    def is_abandoned(self) -> None:
        """Give up joining, unless it trains already: the member that admits it or sends the model is lost."""
        if self.stage is not JoinerStage.TRAINS:
            self.stage = JoinerStage.OUT

    def _move(self, before: JoinerStage, after: JoinerStage) -> None:
        if self.is_out:
            return
        if self.stage is not before:
            raise RuntimeError(f"a joiner is in stage {self.stage.name}, expected {before.name}")
        self.stage = after
