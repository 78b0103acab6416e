"""Gradient averaging in a super learner of a job of several: waits, and errors before anything is applied.

If all gradients are submitted, backward() waits for their averages at its end, as with DDP: so a script that
changes gradients before step() (clip, unscale, log, zero) handles the same values on all learners. If a
gradient is missing then (unused parameters, several backward passes), synchronize() or step() waits instead.
"""

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.amp import grad_scaler

from hvd_adpsgd.errors import AdpsgdError, GradientOrderError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.launch.torch_group import abort_group, has_aborted
from hvd_adpsgd.polling import polls
from hvd_adpsgd.training.averaging import Averaging
from hvd_adpsgd.training.gradients import REQUIRES_GRAD, bits_of
from hvd_adpsgd.training.presence import live
from hvd_adpsgd.training.reducer import Group, Reducer, lay_out_gradients
from hvd_adpsgd.training.super_learner import SuperLearner
from hvd_adpsgd.training.supported import ddp_of

# in the first steps, and then in each of so many, learners compare gradients that the script averages
_COMPARED_FIRST, _COMPARED_EVERY = 4, 64


class AveragingReducer(Reducer):
    """Averages the gradients of an optimizer whose models super learners average.

    Attributes:
        averaging: the optimizer's, set before `start`.
    """

    averaging: Averaging

    def _submit(self, group: Group) -> None:
        """Submit a group; after the last one, let backward() wait for the averages at its end."""
        self._before_gradient(group.parameters)
        with self.averaging.super_learner.reducing():
            super()._submit(group)
        is_last = self.gradients.submit(group.parameters, self.trained)
        # else submit_missing() has submitted the gradient of a frozen parameter
        in_backward = any(map(REQUIRES_GRAD, group.parameters))
        if is_last and in_backward and torch._C._current_graph_task_id() != -1:  # in backward()
            self.averaging.super_learner.mates.submitted()
            # autograd runs the callback in the thread of the last gradient, on a GPU not the caller's thread
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _before_gradient(self, parameters: tuple[torch.Tensor, ...]) -> None:
        """Call Averaging.before_gradient; if that raises at a step's first gradient, begin anew."""
        try:
            self._require_no_accumulation(parameters)
            self.averaging.before_gradient(len(parameters), len(self.trained))
        except AdpsgdError:
            if not self._submitted:  # no all-reduce of another gradient is running
                self._reset()
                self.gradients.forget()
            raise

    def _after_backward(self) -> None:
        """Average gradients at the end of backward(), unless a learner lacks some and waits for this one."""
        if not self._submitted:  # a hook has called step() or synchronize()
            return
        averaging = self.averaging
        others = [other.super_learner.mates for other in live() if other is not averaging]
        if averaging.super_learner.mates.all_submit(others, self.is_reduced):
            self._average(by_backward=True)

    def synchronize(self) -> None:
        """Wait until the gradients are averaged; average them if backward() has not."""
        gradients = self.gradients
        by_backward = gradients.averaged and gradients.by_backward and not gradients.is_pending
        if by_backward or not self.averaging.spec.averages_gradients:
            self.averaging.require_running()
            # as in Horovod, backward() may now add gradients to the averaged ones
            gradients.by_backward = False
            self.is_synchronized = True
            return
        self._average()

    def before_step(self) -> None:
        """Average, in step(), gradients that are not averaged; inside skip_synchronize() raise instead."""
        gradients, averaging = self.gradients, self.averaging
        if not averaging.spec.averages_gradients:
            self._meet_for_step()
            return
        is_pending = gradients.is_pending
        if is_pending and not self.synchronizes:
            raise GradientOrderError(
                f"step {averaging.step}: step() inside optimizer.skip_synchronize(), and gradients are not "
                "averaged: each learner would use its own. Call optimizer.synchronize() before it."
            )
        if self.synchronizes and (is_pending or not gradients.averaged):
            self._average(unscaled=is_pending and _is_called_by_scaler())
        if averaging.world.inner_size > 1:
            replaced = gradients.replaced(self._reduced())
            averaging.super_learner.mates.steps_with(bits_of(replaced))
        gradients.release()
        self.is_synchronized = False

    def before_zero_grad(self) -> None:
        if self.gradients.is_pending and self.averaging is not None:  # it is None for Adasum alone
            self.averaging.super_learner.require_whole()
        super().before_zero_grad()
        self.gradients.release()

    def drop(self) -> None:
        if self._submitted:
            with self.averaging.reducing(len(self.trained) if self.is_submitted else 0):
                super().drop()
        else:
            super().drop()
        self.gradients.forget()

    def _average(self, by_backward: bool = False, unscaled: bool = False) -> None:
        """Submit missing gradients, and wait until all are averaged.

        Args:
            by_backward: whether this is called at the end of backward().
            unscaled: whether GradScaler has changed the gradients since they were submitted.

        Raises:
            GradientOrderError: if the script has changed gradients between backward() and this call.
                All-reduces that are running end first.
        """
        gradients, averaging = self.gradients, self.averaging
        mates = averaging.super_learner.mates
        self._require_no_accumulation([*gradients.submitted(), *gradients.accumulating()])
        changed = gradients.changed()
        if unscaled:
            changed = gradients.submitted() + gradients.accumulating()
        if changed and not gradients.submitted():  # no all-reduce is running
            accumulated = gradients.accumulating()
            self.drop()
            self._refuse_early(changed, accumulated)
        missing = gradients.missing(self.trained) if changed else []
        again = not gradients.is_pending and gradients.is_same(
            in_place=averaging.world.inner_size == 1
        )
        gradients.release()
        lay_out_gradients(changed)  # the all-reduce needs a gradient tensor to overwrite
        if changed:
            mates.refuses()
        self.submit_missing()
        # backward() has waited for the other learners
        are_averaged = None if by_backward else self.is_reduced
        with averaging.reducing(len(self.trained), again, are_averaged):
            self.finish()
        refusing = mates.refusing()
        differ = mates.differ()
        if refusing or differ:
            gradients.forget()
        if differ:
            self._refuse_replaced()
        if changed:
            self._refuse_changed(changed, missing, by_backward)
        if refusing:
            self._refuse_with(refusing[0])
        gradients.average(self._reduced(), by_backward)

    def _reduced(self) -> Iterable[torch.Tensor]:
        """Return the parameters whose averaged gradients are checked later for changes; () if none are.

        The checks detect gradients that the script has replaced, in a super learner of several learners, and
        a repeated synchronize() with a strategy in step.
        """
        if self.averaging.world.inner_size == 1 and self.averaging.plan.in_step is None:
            return ()
        return self.trained or self.names

    def _require_no_accumulation(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise GradientOrderError if backward() has added new gradients to averaged ones before step()."""
        added = self.gradients.accumulated(parameters)
        if added:
            raise GradientOrderError(
                f"step {self.averaging.step}: the gradient of {self.first_by_name(added)} was computed more "
                f"than backward_passes_per_step={self.passes} times before step(), and added "
                "to one that is averaged. Increase backward_passes_per_step to accumulate gradients, or call "
                "optimizer.zero_grad() before backward() if a step is skipped."
            )

    def _meet_for_step(self) -> None:
        """Wait for the mates of a step whose gradients the script has averaged; compare them in some steps.

        Raises:
            GradientOrderError: on all learners of the super learner, if their gradients differ.
            LearnerFailedError: if a learner of the super learner has ended.
        """
        averaging, inner = self.averaging, self.averaging.super_learner
        number = inner.mates.sets
        alike = averaging.world.inner_size > 1 and not averaging.spec.is_sharded
        compares = alike and is_compared(number)
        if averaging.owes_nonfinite:
            inner.mates.refuses()
        averaging.before_gradient(0, 0)  # publishes corrections
        if averaging.world.inner_size > 1:
            with inner.reducing():
                _await_devices(self.param_groups, inner)
        if compares:
            inner.mates.steps_with(bits_of(gradients_of(self.param_groups)))
        with averaging.reducing(len(self.names), are_averaged=inner.has_failed):
            inner.require_alive()
        self.is_synchronized = False
        averaging.require_finite_shards()
        if compares and inner.mates.differ():
            refuse_different(self.param_groups, averaging.step, averaging.world.super_rank)

    def first_by_name(self, parameters: list[torch.Tensor]) -> str:
        """Return the name of the first of `parameters`, and how many more there are, for messages."""
        others = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return f"{self.names.get(parameters[0])!r}{others}"

    def _refuse_changed(
        self, changed: list[torch.Tensor], missing: list[torch.Tensor], by_backward: bool
    ) -> None:
        why = "another learner of the super learner was in another operation"
        if missing:
            count = f"{len(missing)} of {len(self.trained)} parameters"
            why = f"{count} got no gradient ({self.first_by_name(missing)})"
        if by_backward:
            why = "a hook changed it inside backward()"
        raise GradientOrderError(
            f"step {self.averaging.step}: the gradient of {self.first_by_name(changed)} was changed while "
            f"the super learner averaged it: backward() had not waited for the average, because {why}. Call "
            "optimizer.synchronize() after backward(), before gradients are changed; or freeze parameters "
            "that the loss does not use (requires_grad_(False))."
        )

    def _refuse_early(self, changed: list[torch.Tensor], accumulated: list[torch.Tensor]) -> None:
        raise GradientOrderError(
            f"step {self.averaging.step}: the gradient of {self.first_by_name(changed)} was changed before "
            f"the super learner averaged it: {self.first_by_name(accumulated)} waited for more backward "
            f"passes (backward_passes_per_step={self.passes}). "
            "Call optimizer.synchronize() before gradients are clipped or unscaled, where an epoch may end "
            "with fewer passes. Nothing was applied."
        )

    def _refuse_replaced(self) -> None:
        raise GradientOrderError(
            f"step {self.averaging.step}: in the step before, gradients that were averaged had been replaced "
            "(p.grad = ...), and the learners of this super learner stepped with different ones: their "
            "models differ now. Change gradients in place, alike on all learners; or call "
            "optimizer.zero_grad() before you set them, and step() averages them. Load a checkpoint, or "
            "call hvd.broadcast_parameters."
        )

    def _refuse_with(self, mate: int) -> None:
        world = self.averaging.world
        raise GradientOrderError(
            f"step {self.averaging.step}: learner {world.groups[world.super_rank][mate]}, of the same super "
            "learner, changed gradients while they were averaged, so no learner of it steps with them. See "
            "the error of that learner."
        )


def _await_devices(param_groups: list[dict[str, Any]], inner: SuperLearner) -> None:
    """Wait until GPUs have averaged the gradients: NCCL's operations end there, later than on the host.

    Raises:
        HorovodInternalError: if a learner of the super learner has failed meanwhile. Gradients may be those
            of an unfinished operation then.
    """
    parameters = (p for group in param_groups for p in group["params"])
    for device in {p.device for p in parameters if p.is_cuda}:
        averaged = torch.cuda.current_stream(device).record_event()
        for _ in polls():
            if averaged.query():
                break
            if inner.has_failed():  # the operation would not end, nor what waits for the GPU
                abort_group(inner.world)
                inner.require_alive()
    if has_aborted(inner.world):
        raise horovod.HorovodInternalError("a learner has ended, or an operation has failed")


def is_compared(number: int) -> bool:
    """Whether learners compare their gradients, which the script averages, in step `number`."""
    return number < _COMPARED_FIRST or number % _COMPARED_EVERY == 0


def gradients_of(param_groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the gradients that the parameters of an optimizer have."""
    return [p.grad for g in param_groups for p in g["params"] if p.grad is not None]


def refuse_different(param_groups: list[dict[str, Any]], step: int, super_rank: int) -> NoReturn:
    """Raise GradientOrderError: the script averages gradients, and the learners have different ones."""
    where = f"step {step}: the gradients differ between the learners of super learner {super_rank}"
    if ddp_of({p for group in param_groups for p in group["params"]}) is not None:
        raise GradientOrderError(
            f"{where}: DistributedDataParallel has not averaged all of them, as a parameter got none in this "
            "backward pass, or it ran in no_sync(). Use all parameters in each forward pass, pass "
            "find_unused_parameters=True, or leave no_sync() before the last backward pass. Nothing was "
            "applied."
        )
    raise GradientOrderError(
        f"{where}: the script does not average them (average_gradients=False). Average them before step(), "
        "put DistributedDataParallel over hvd.super_learner_group() around the model, or leave the argument "
        "out. Nothing was applied."
    )


def _is_called_by_scaler() -> bool:
    """Whether GradScaler calls step(): then it has unscaled gradients without incrementing their version."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == grad_scaler.__file__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
