"""What a checkpoint holds of an optimizer's Averaging, besides the model and the optimizer's own state."""

import logging
import operator
from typing import Any

import torch

from hvd_adpsgd.strategies import same
from hvd_adpsgd.training.averaging import Averaging

log = logging.getLogger("hvd_adpsgd")


def state(averaging: Averaging) -> dict[str, Any]:
    """Return an Averaging's state for a checkpoint: strategy, step, the strategy's tensors; {} if none.

    Inside `averaged` the model is the mean, but the tensors of some strategies belong to this learner's own
    model: `of_mean` is True then, and `load_state` does not use these tensors.
    """
    held = {name: [t.clone() for t in ts] for name, ts in averaging.rule.tensors().items()}
    if not held and averaging.plan.in_step is None:
        return {}
    world = averaging.world
    return {
        "strategy": averaging.spec.strategy.spec(),
        "of": [world.super_rank, world.super_size],
        "of_mean": averaging.holds_mean > 0,
        "step": averaging.step,
        "rule": held,
    }


@torch.no_grad()
def load_state(averaging: Averaging, state: dict[str, Any] | None) -> None:
    """Resume from `state` if it fits `averaging`; else reset the strategy to the loaded model.

    After a reset the strategy's tensors and step are those of a first step.

    Args:
        averaging: the Averaging of one optimizer on this learner, which resumes.
        state: what function `state` returned; None for a checkpoint without it, such as a plain optimizer's.
    """
    plan = averaging.plan
    waits = plan.in_step is not None and plan.in_step.waits
    # no correction is pending: each step adds all corrections of its round
    leaves_nothing = plan.width == 0 and waits
    if averaging.step and not averaging.pauses and not leaves_nothing:
        log.warning(
            "a state is loaded after step %d, outside `with hvd.averaging_paused():`. Pending corrections of "
            "the old model will be added to the loaded one. Load model and optimizer inside.",
            averaging.step,
        )
    averaging.rule.reload()
    averaging.restart = True
    if averaging.rule.in_update:  # at once: learners may be given the state before the next step
        averaging.rule.start()
    if state is None:
        return
    reason = _reason_against(averaging, state)
    if reason:
        log.warning("%s: the strategy starts anew with the loaded model.", reason)
        return
    averaging.step = state["step"]  # equal on all super learners, else their rounds never match
    averaging.restart = averaging.step == 0
    if foreign := _belongs_elsewhere(averaging, state):
        averaging.restart = True
        log.warning("%s: the strategy starts anew with the loaded model.", foreign)
        return
    for name, tensors in averaging.rule.tensors().items():
        for mine, theirs in zip(tensors, state["rule"][name], strict=True):
            mine.copy_(theirs)


def _reason_against(averaging: Averaging, state: dict[str, Any]) -> str:
    """Return why a saved state does not fit `averaging`, for a message; "" if it fits."""
    spec = averaging.spec.strategy.spec()
    try:
        if not same(str(state["strategy"]), spec):  # specs of older versions may lack a key
            return f"the checkpoint is of averaging={state['strategy']}, this is {spec}"
        _, _ = state.get("of", (0, 1))
        mine, its = averaging.rule.tensors(), state["rule"]
        if set(its) != set(mine):
            return (
                f"the checkpoint was saved with other moments= or another optimizer: it has "
                f"{', '.join(its) or 'none'} of {', '.join(mine) or 'none'}"
            )
        if operator.index(state["step"]) < 0 or not _fits(averaging, state["rule"]):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        return 'the checkpoint\'s "averaging" is damaged'
    return ""


def _belongs_elsewhere(averaging: Averaging, state: dict[str, Any]) -> str:
    """Return a message if the saved tensors belong to another super learner or model; "" if they fit."""
    spec, world = averaging.spec.strategy.spec(), averaging.world
    here = [world.super_rank, world.super_size]
    number, of = there = state.get("of", here)
    if not (averaging.rule.own and state["step"]):
        return ""
    if state.get("of_mean"):
        return (
            f"the checkpoint holds the mean model, and the state of {spec} is that of super learner "
            f"{number}'s own model"
        )
    if list(there) != here:
        return (
            f"the state of {spec} differs between super learners; the checkpoint is of super learner "
            f"{number} of {of}, this is super learner {here[0]} of {here[1]}"
        )
    return ""


def _fits(averaging: Averaging, held: dict[str, list[torch.Tensor]]) -> bool:
    """Whether the saved tensors of a strategy have the shapes of the strategy's tensors on this learner."""
    mine = averaging.rule.tensors()
    return all([t.shape for t in held[name]] == [t.shape for t in ts] for name, ts in mine.items())
