"""Share and bits of the exchanges of simulated engines, chosen as leaders do with `exchange_share="auto"`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hvd_adpsgd.strategies.share_control import ShareControl, Spent

if TYPE_CHECKING:
    from hvd_adpsgd_lab.simulation.job import Job

__all__ = ["Choice", "Steering"]

_STEPS = 8  # between two looks


class Choice(NamedTuple):
    """What one engine has chosen: when, which share and bits, and what it had measured (see ShareControl)."""

    at_s: float
    engine: int
    share: float
    bits: int
    overhead: float
    demand: float


class Steering:
    """Chooses the share of each engine of a job, every few steps of its trainer; see `Job.steer`.

    The cost of averaging is the time of the engines: simulated trainers lose none to them.

    Args:
        bound: largest cost, as a part of the time of steps.
        due: exchanges per step.
        chunks: chunks of the model.
        chunk_s: how long an engine works on one, s.
        chooses_bits: whether bits are chosen, too.

    Attributes:
        choices: all choices so far.
    """

    def __init__(
        self, bound: float, due: float, chunks: int, chunk_s: float, chooses_bits: bool = False
    ):
        self._bound, self._due, self._chunks, self._chunk_s = bound, due, chunks, chunk_s
        self._chooses_bits = chooses_bits
        self._controls: dict[int, ShareControl] = {}
        self._steps: Counter[int] = Counter()
        self.choices: list[Choice] = []

    def __call__(self, job: Job, i: int) -> None:
        """Look at engine `i` after an offer of its model."""
        self._steps[i] += 1
        if self._steps[i] % _STEPS:
            return
        if i not in self._controls:
            self._controls[i] = ShareControl(
                self._bound, self._due, chooses_bits=self._chooses_bits
            )
        control = self._controls[i]
        made, c = control.decisions, job.loop_of(i).counters()
        share = control.decide(
            Spent(
                self._steps[i],
                job.now_s,
                c["chunks"] * self._chunk_s,
                c["busy_s"],
                c["link_s"],
                c["exchanges_active"] + c["exchanges_passive"],
                c["chunks"] / self._chunks,
                c["compared"],
                c["square"],
            )
        )
        job.loop_of(i).move_share(share)
        if self._chooses_bits:
            job.loop_of(i).use_bits(control.bits)
        if control.decisions > made:
            self.choices.append(
                Choice(job.now_s, i, share, control.bits, control.overhead, control.demand)
            )
