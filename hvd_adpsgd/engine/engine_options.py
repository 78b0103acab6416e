"""The options of one engine, which follow from Config and plan, also of simulated engines."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_adpsgd.config import Config
from hvd_adpsgd.formats import OWN, first_format
from hvd_adpsgd.strategies.plan import Plan


@dataclass(frozen=True)
class EngineOptions:
    """The options that `Loop` reads once.

    Attributes:
        weight, offered_only: Plan.weight; whether peers get the model as offered, without newer corrections.
        rate: exchanges per step.
        wire_format: code of the format of chunks in messages (hvd_adpsgd.formats).
        chooses_format: whether `Loop.use_format` may change it.
        deadline_s, leave_deadline_s, report_s: the options of these names.
        chunk_nbytes: largest size of a chunk.
        share: share of the model that an exchange moves, until `Loop.move_share`.
        aims: a random half of the windows are where the models differ most (windows.pxi).
        prefer_fast: probability with which the fastest of the next peers is asked.
        timeline: whether events are recorded.
    """

    weight: float
    rate: float = 1.0
    chunk_nbytes: int = 8
    offered_only: bool = False
    wire_format: int = OWN.code
    chooses_format: bool = False
    deadline_s: float = Config.deadline_s
    leave_deadline_s: float = Config.leave_deadline_s
    report_s: float = 0.0
    share: float = 1.0
    aims: bool = False
    prefer_fast: float = 0.0
    timeline: bool = False

    @classmethod
    def of(cls, config: Config, plan: Plan) -> EngineOptions:
        """Return the options of an engine that carries out `plan`."""
        return cls(
            weight=plan.weight,
            rate=config.exchanges_per_step,
            chunk_nbytes=config.chunk_kib * 1024,
            # rounds of pairs average the models as offered, as the mixing matrix demands
            offered_only=plan.in_pairs,
            wire_format=first_format(config.wire_dtype).code,
            chooses_format=config.chooses_bits,
            deadline_s=config.deadline_s,
            leave_deadline_s=config.leave_deadline_s,
            report_s=config.report_s,
            share=config.first_share,
            aims=config.first_share < 1,
            prefer_fast=plan.prefer_fast,
            timeline=config.timeline is not None,
        )
