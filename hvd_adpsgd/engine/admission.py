"""Whether a joining super learner is let in: the decisions of each process, without messages and time.

All members of a job go over to engines that they share with the joining super learner, or all keep what they
have. torch/admission.py asks these classes in a job, simulation/admission.pyx in a simulated one.

    a member                                          the joining super learner
    begins    all members are known, alike on all     offered   it is to make its engine
    votes     whether its new engine is made          let_in    all members go over
    goes_over all have voted yes, none was lost       received  it has the model, and trains
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

__all__ = ["Joiner", "JoinerStage", "Member", "MemberStage"]


class MemberStage(Enum):
    """What a member waits for."""

    RESTS = auto()  # the members: its engine is at rest
    MAKES = auto()  # its new engine, and on one of the members that of the joining super learner
    VOTED = auto()  # the votes of all
    OVER = auto()  # nothing: it has gone over, or keeps the old engine


class JoinerStage(Enum):
    """What the joining super learner waits for."""

    WAITS = auto()  # the offer
    MAKES = auto()  # its engine, and to be let in
    IN = auto()  # the model: all members have gone over
    TRAINS = auto()  # nothing
    OUT = auto()  # nothing: it has given up


class Member:
    """A member of the job, in one admission.

    Attributes:
        stage: see MemberStage.
        members: those that are to go over together; empty until `begins`.
    """

    def __init__(self) -> None:
        self.stage = MemberStage.RESTS
        self.members: frozenset[int] = frozenset()

    def begins(self, members: Collection[int]) -> None:
        """The members are known: it makes an engine for them and the joining super learner."""
        self._move(MemberStage.RESTS, MemberStage.MAKES)
        self.members = frozenset(members)

    def votes(self, made: bool) -> bool:
        """Its vote.

        Args:
            made: its engine is, and on the member that talks with the joining super learner the one there.
        """
        self._move(MemberStage.MAKES, MemberStage.VOTED)
        return made

    def goes_over(self, all_made: bool, members: Collection[int]) -> bool:
        """Whether it goes over to the new engine, alike on all members.

        Args:
            all_made: whether every vote was yes.
            members: that have voted. If one was lost meanwhile, the new engines would wait for it.
        """
        self._move(MemberStage.VOTED, MemberStage.OVER)
        return all_made and frozenset(members) == self.members

    def _move(self, before: MemberStage, after: MemberStage) -> None:
        if self.stage is not before:
            raise RuntimeError(f"a member is in stage {self.stage.name}, expected {before.name}")
        self.stage = after


class Joiner:
    """The joining super learner, in one admission.

    Attributes:
        stage: see JoinerStage.
    """

    def __init__(self) -> None:
        self.stage = JoinerStage.WAITS

    @property
    def is_out(self) -> bool:
        """Whether it has given up; it does not change its mind."""
        return self.stage is JoinerStage.OUT

    def offered(self) -> None:
        """A member asks it to make its engine."""
        self._move(JoinerStage.WAITS, JoinerStage.MAKES)

    def let_in(self) -> None:
        """All members go over."""
        self._move(JoinerStage.MAKES, JoinerStage.IN)

    def received(self) -> None:
        """It has the members' mean model."""
        self._move(JoinerStage.IN, JoinerStage.TRAINS)

    def times_out(self) -> None:
        """Nobody has let it in for so long that no member will."""
        if self.stage in (JoinerStage.WAITS, JoinerStage.MAKES):
            self.stage = JoinerStage.OUT

    def is_abandoned(self) -> None:
        """The member that it talks with, or receives the model from, is lost."""
        if self.stage is not JoinerStage.TRAINS:
            self.stage = JoinerStage.OUT

    def _move(self, before: JoinerStage, after: JoinerStage) -> None:
        if self.is_out:
            return
        if self.stage is not before:
            raise RuntimeError(f"a joiner is in stage {self.stage.name}, expected {before.name}")
        self.stage = after
