"""State machines that decide, in each process, whether a joining super learner is admitted to a running job.

They send no messages and read no clock: torch/admission.py drives them in a real job,
simulation/admission.pyx in a simulated one. Members are the processes of the job that average already. Either
all members switch to new engines, which include the joining super learner, or all keep their old engines.

    a member                                            the joining super learner
    begins    every member knows the same member list   offered   it is asked to make its engine
    votes     whether its new engine was made           let_in    all members switch
    goes_over all voted yes, and no member was lost     received  it has the model, and trains
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

__all__ = ["Joiner", "JoinerStage", "Member", "MemberStage"]


class MemberStage(Enum):
    """What a member of the job waits for during an admission."""

    RESTS = auto()  # the member list; its engine is paused
    MAKES = (
        auto()
    )  # its new engine; the member that talks with the joining super learner, for both engines
    VOTED = auto()  # the votes of all members
    OVER = auto()  # nothing: it has switched to the new engine, or keeps the old one


class JoinerStage(Enum):
    """What the joining super learner waits for during an admission."""

    WAITS = auto()  # a member's offer
    MAKES = auto()  # its own engine, and the members' decision
    IN = auto()  # the members' mean model: all members have switched to the new engines
    TRAINS = auto()  # nothing: it has the model
    OUT = auto()  # nothing: it has given up joining


class Member:
    """State machine of one member of the job during one admission.

    Attributes:
        stage: see MemberStage.
        members: ranks of the members that are to switch together; empty until `begins`.
    """

    def __init__(self) -> None:
        self.stage = MemberStage.RESTS
        self.members: frozenset[int] = frozenset()

    def begins(self, members: Collection[int]) -> None:
        """Note the member list: this member now makes an engine for these and the joining super learner."""
        self._move(MemberStage.RESTS, MemberStage.MAKES)
        self.members = frozenset(members)

    def votes(self, made: bool) -> bool:
        """Note that this member votes on the admission, and return its vote.

        Args:
            made: whether this member's new engine was made; on the member that talks with the joining super
                learner, whether that one's engine was made too.
        """
        self._move(MemberStage.MAKES, MemberStage.VOTED)
        return made

    def goes_over(self, all_made: bool, members: Collection[int]) -> bool:
        """Whether this member switches to the new engine; all members decide the same.

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
    """State machine of the joining super learner during one admission.

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
        """Note that a member has asked the joining super learner to make its engine."""
        self._move(JoinerStage.WAITS, JoinerStage.MAKES)

    def let_in(self) -> None:
        """Note that all members switch to the new engines."""
        self._move(JoinerStage.MAKES, JoinerStage.IN)

    def received(self) -> None:
        """Note that the members' mean model has been received: the joining super learner trains."""
        self._move(JoinerStage.IN, JoinerStage.TRAINS)

    def times_out(self) -> None:
        """Give up, unless admitted already: after the caller's time limit no member admits it any more."""
        if self.stage in (JoinerStage.WAITS, JoinerStage.MAKES):
            self.stage = JoinerStage.OUT

    def is_abandoned(self) -> None:
        """Give up, unless it trains already: its contact, or the member that sends the model, is lost."""
        if self.stage is not JoinerStage.TRAINS:
            self.stage = JoinerStage.OUT

    def _move(self, before: JoinerStage, after: JoinerStage) -> None:
        if self.is_out:
            return
        if self.stage is not before:
            raise RuntimeError(f"a joiner is in stage {self.stage.name}, expected {before.name}")
        self.stage = after
