"""The situations in which the schemes train, the times of the copies, and the goals."""

from __future__ import annotations

from dataclasses import dataclass

LEARNERS = 4
LONGER = 1.1  # runs last so many times the time T in which DDP sets the loss to reach
COPIES = 15  # up to T, at times that grow by one factor
FIRST = 1 / 32  # of T, the time of the first copy
KILLED = 1 / 3  # of T


@dataclass(frozen=True)
class Situation:
    """What disturbs the learners.

    Attributes:
        title: in the table and above a panel.
        slow: the last learner takes so many times as long for a step.
        rate: of the link of each learner, as tc writes it; None: all share one host.
        kills: whether the last learner is killed.
    """

    title: str
    slow: float = 1.0
    rate: str | None = None
    kills: bool = False


SITUATIONS = {
    "even": Situation("even learners"),
    "slow": Situation("one learner 5 times slower", slow=5.0),
    "1gbit": Situation("links of 1 Gb/s", rate="1gbit"),
    "100mbit": Situation("links of 100 Mb/s", rate="100mbit"),
    "killed": Situation("one learner killed at T/3", kills=True),
}
# H-ADPSGD's time to the loss that DDP has at T, as a part of T
GOALS = {"even": 1.1, "slow": 1 / 2, "1gbit": 1 / 3, "100mbit": 1 / 10}


def times(seconds: float) -> list[float]:
    """Return the seconds at which models are copied: from T/32 to T by equal factors, and at LONGER T."""
    factor = (1 / FIRST) ** (1 / (COPIES - 1))
    return [seconds * FIRST * factor**k for k in range(COPIES - 1)] + [seconds, LONGER * seconds]


def kill_s(situation: Situation, seconds: float) -> float | None:
    """Return the seconds after which the last learner is killed, if it is."""
    return KILLED * seconds if situation.kills else None
