"""What must hold before a step: the optimizer averages, its tensors were wrapped, a quorum lives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hvd_adpsgd.errors import NotInitializedError, QuorumLostError, WorldError
from hvd_adpsgd.lifecycle import preemption
from hvd_adpsgd.training.consistency import require_known
from hvd_adpsgd.training.supported import require_no_ddp

if TYPE_CHECKING:
    from hvd_adpsgd.training.averaging import Averaging

__all__ = ["StepChecks"]


class StepChecks:
    """The checks of one optimizer.

    Args:
        averaging: of the optimizer.
    """

    def __init__(self, averaging: Averaging):
        self._averaging = averaging
        self._alone_in_model = (
            False  # no DistributedDataParallel averages it: known at the first step
        )

    def running(self, also_before_joining: bool = False) -> None:
        """Raise NotInitializedError or WorldError if this optimizer makes no step now.

        Args:
            also_before_joining: a super learner that has not joined yet may do this.
        """
        preemption.block_if_leaving()
        averaging = self._averaging
        if averaging.stopped:
            raise NotInitializedError(
                f"this optimizer averages no longer: {averaging.stopped} after it was wrapped. Use an "
                "optimizer that was wrapped after that."
            )
        if averaging.holds_mean:
            raise WorldError(
                "the parameters hold the mean of all super learners inside `with hvd.averaged(...)`, and "
                "get their own values back after it. Leave the block before backward(), step(), "
                "average_model or averaging_paused."
            )
        if averaging.mates.is_away:
            raise WorldError(
                "join() was not completed on this learner, because it raised: its super learner counts it as "
                "without data, and does not wait for it. Save the model, and start the job again."
            )
        if averaging.world.collectives.joining and not also_before_joining:
            raise NotInitializedError(
                "this super learner has not joined the job yet: call hvd.admit(model, optimizer) before "
                "the first step."
            )

    def before_step(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise if tensors or the engine do not allow a step.

        Args:
            groups: the optimizer's param_groups.
        """
        self.running()
        averaging = self._averaging
        averaging.engine.check()
        require_known(averaging.trained, groups)
        if (
            not self._alone_in_model
        ):  # frameworks put DDP around the model after the optimizer is wrapped
            require_no_ddp({p for group in groups for p in group["params"]})
            self._alone_in_model = True
        if averaging.world.inner_size == 1:  # with several learners before_gradient() has done it
            averaging.tensors.parameters.check()

    def note_quorum(self) -> None:
        """Note a lost quorum for all learners of the super learner, before a gradient is submitted."""
        if self._is_minority:
            self._averaging.mates.loses_quorum()

    @property
    def _is_minority(self) -> bool:
        averaging = self._averaging
        return averaging.spec.config.quorum is not None and averaging.world.membership.is_minority

    def quorum(self) -> None:
        """On all learners of the super learner alike, after the step's all-reduce.

        Raises:
            QuorumLostError: with HVD_ADPSGD_QUORUM=majority, if this super learner is in a minority.
        """
        averaging = self._averaging
        alone = averaging.world.inner_size == 1
        if self._is_minority if alone else averaging.mates.lack_quorum:
            raise QuorumLostError(
                f"step {averaging.step}, super learner {averaging.world.super_rank}: half or more of the "
                "super learners have failed, or a cut network hides them, and HVD_ADPSGD_QUORUM is majority. "
                "The model is that before this step: save a checkpoint and exit. Start the job again from "
                "the newest one."
            )
