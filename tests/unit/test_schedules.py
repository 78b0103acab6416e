"""Schedules against sequences worked out by hand."""

import warnings

import pytest
import torch

from hvd_adpsgd.errors import ConfigError

pytest.importorskip("horovod.torch")
from hvd_adpsgd.torch import Newbob, WarmupAnneal

ROOT = 0.5**0.5


def optimizer(*rates):
    """SGD with one group per rate."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def run(scheduler, steps):
    """First group's rate at each of the steps."""
    taken = []
    for _ in range(steps):
        taken.append(rates_of(scheduler.optimizer)[0])
        scheduler.optimizer.step()
        scheduler.step()
    return taken


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_single_learner_is_constant_for_ten_epochs_then_annealed():
    taken = run(WarmupAnneal(optimizer(0.1)), 16)
    expected = [0.1] * 10 + [0.1 * ROOT, 0.05, 0.05 * ROOT, 0.025, 0.025 * ROOT, 0.0125]
    assert taken == pytest.approx(expected)


def test_ten_times_the_batch_warms_up_to_ten_times_the_rate():
    taken = run(WarmupAnneal(optimizer(0.1), scale=10), 13)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, ROOT, 0.5, 0.5 * ROOT]
    assert taken == pytest.approx(expected)


def test_by_step_it_climbs_within_epochs_and_is_annealed_once_per_epoch():
    schedule = WarmupAnneal(optimizer(1.0), scale=6, warmup_epochs=2, decay=0.5, steps_per_epoch=3)
    assert run(schedule, 12) == pytest.approx([1, 2, 3, 4, 5, 6, 3, 3, 3, 1.5, 1.5, 1.5])


def test_every_group_has_its_own_rate():
    opt = optimizer(0.1, 1.0, 0.0)
    schedule = WarmupAnneal(opt, scale=3, warmup_epochs=3, decay=0.5)
    seen = []
    for _ in range(4):
        seen.append(rates_of(opt))
        opt.step()
        schedule.step()
    expected = [[0.1, 1, 0], [0.2, 2, 0], [0.3, 3, 0], [0.15, 1.5, 0]]
    assert torch.tensor(seen).allclose(torch.tensor(expected))
    assert schedule.get_last_lr() == rates_of(opt)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.1)
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    assert run(WarmupAnneal(opt, scale=2, warmup_epochs=2), 3) == pytest.approx(
        [0.1, 0.2, 0.2 * ROOT]
    )
    assert opt.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("make", [WarmupAnneal, Newbob])
def test_loading_the_state_sets_a_rate_that_is_a_tensor(make):
    first = make(optimizer(0.5))
    rate = torch.tensor(0.1)
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    make(opt).load_state_dict(first.state_dict())
    assert opt.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_last_epoch_continues_from_an_optimizer_alone():
    first = WarmupAnneal(optimizer(0.1), scale=10)
    run(first, 4)
    opt = optimizer(0.7)
    opt.load_state_dict(first.optimizer.state_dict())
    second = WarmupAnneal(opt, scale=10, last_epoch=first.last_epoch - 1)
    assert rates_of(opt) == pytest.approx([0.5])
    assert run(second, 2) == pytest.approx([0.5, 0.6])


def fed(scheduler, losses):
    """First group's rate and the stage after each loss."""
    seen = []
    for loss in losses:
        scheduler.optimizer.step()
        scheduler.step(loss)
        seen.append((rates_of(scheduler.optimizer)[0], scheduler.stage))
    return seen


# gain of each epoch:      -     10 %  2 %    0.5 %   5 %    0.2 %   0.05 %  10 %
LOSSES = [100.0, 90.0, 88.2, 87.759, 83.37, 83.203, 83.161, 74.8]
STAGES = [(0.8, "constant")] * 3 + [(rate, "halving") for rate in (0.4, 0.2, 0.1)]
STAGES += [(0.1, "finished")] * 2


def test_newbob_by_hand():
    schedule = Newbob(optimizer(0.8))
    assert fed(schedule, LOSSES) == STAGES
    assert schedule.finished
    assert schedule.halvings == 3


def test_newbob_counts_gain_from_the_best():
    """A worse loss gains nothing, and coming back to the best gains nothing either."""
    schedule = Newbob(optimizer(1.0))
    assert fed(schedule, [10.0, 12.0]) == [(1, "constant"), (0.5, "halving")]
    assert schedule.best == 10
    assert fed(schedule, [10.0]) == [(0.5, "finished")]


def test_newbob_may_be_told_the_loss_before_training():
    """No warning that the optimizer has not stepped yet."""
    schedule = Newbob(optimizer(1.0))
    schedule.step(torch.tensor([10.0]))
    assert fed(schedule, [9.99]) == [(0.5, "halving")]


def stepped(scheduler, losses):
    """As `fed`, of a schedule that takes no loss."""
    return run(scheduler, len(losses))


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("cut", [0, 3, 5, 8])
@pytest.mark.parametrize(
    ("kind", "how", "follow"),
    [
        (WarmupAnneal, {"scale": 5, "warmup_epochs": 2, "steps_per_epoch": 3}, stepped),
        (Newbob, {}, fed),
    ],
)
def test_resumed_anywhere_it_goes_on_alike(kind, how, follow, cut, optimizer_first):
    whole = follow(kind(optimizer(0.8, 0.2), **how), LOSSES)
    first = kind(optimizer(0.8, 0.2), **how)
    assert follow(first, LOSSES[:cut]) == whole[:cut]
    saved, opt = first.optimizer.state_dict(), optimizer(0.7, 0.7)
    if optimizer_first:
        opt.load_state_dict(saved)
    second = kind(opt, **({"threshold": 0.3} if kind is Newbob else {}))  # the state replaces it
    second.load_state_dict(first.state_dict())
    if not optimizer_first:
        opt.load_state_dict(saved)
    assert rates_of(opt) == rates_of(first.optimizer)
    assert follow(second, LOSSES[cut:]) == whole[cut:]


INF, NAN = float("inf"), float("nan")
WRONG = [(WarmupAnneal, {name: value}) for name, values in {
    "scale": (0, INF, NAN, "8"), "warmup_epochs": (0, None, INF, NAN), "decay": (0, 1.1),
    "steps_per_epoch": (0, 2.5, "9", INF),
}.items() for value in values] + [(Newbob, {name: value}) for name, values in {
    "threshold": (-0.1, NAN), "stop": (-0.1, 0.02), "factor": (0, 1),
}.items() for value in values]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wrong"), [*WRONG, (WarmupAnneal, {"warmup_epochs": 0.1, "steps_per_epoch": 9})]
)
def test_wrong_arguments(kind, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = .*, allowed is .*\\. [A-Z]"):
        kind(optimizer(0.1), **wrong)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_newbob_refuses_what_is_no_loss(loss):
    schedule = Newbob(optimizer(0.1))
    schedule.step(1.0)
    before = schedule.state_dict()
    with pytest.raises(ConfigError, match=r"step\(held_out_loss\) = .*, allowed is a finite"):
        schedule.step(loss)
    assert schedule.state_dict() == before
