"""Share and bits of the exchanges of simulated engines, chosen as leaders do with `exchange_share="auto"`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from hvd_adpsgd.config import Config
from hvd_adpsgd.strategies.share_control import ShareControl, Spent

if TYPE_CHECKING:
    from hvd_adpsgd_lab.simulation.job import Job

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
        config: the options, with exchange_share="auto".
        chunks: chunks of the model.
        chunk_s: how long an engine works on one, s.

    Attributes:
        choices: all choices so far.
    """

    def __init__(self, config: Config, chunks: int, chunk_s: float):
        self._config, self._chunks, self._chunk_s = config, chunks, chunk_s
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
                self._config.max_overhead,
                self._config.exchanges_per_step,
                chooses_bits=self._config.chooses_bits,
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
        if self._config.chooses_bits:
            job.loop_of(i).use_format(control.wire_format.code)
        if control.decisions > made:
            self.choices.append(
                Choice(
                    job.now_s, i, share, control.wire_format.bits, control.overhead, control.demand
                )
            )
