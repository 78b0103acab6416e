"""The samplers on one learner, without a job; how the learners of a super learner divide a step."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.data import samplers
from hvd_adpsgd.data.parts import Consumed
from hvd_adpsgd.data.ranges import EPOCH, count, merged
from hvd_adpsgd.data.sharding import Appended, Sharding, View
from hvd_adpsgd.data.steps import Steps
from hvd_adpsgd.errors import ConfigError, StrategyMismatchError
from hvd_adpsgd.torch import dynamic_sampler


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [0, 1, 7, 101])
def test_each_epoch_has_every_index_once_in_an_order_of_its_own(size: int, workers: int) -> None:
    sampler = hvd.DynamicSampler(range(size), batch_size=5, seed=1)
    loader = DataLoader(range(size), batch_size=5, sampler=sampler, num_workers=workers)
    epochs = [[int(i) for batch in loader for i in batch] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == 2 * [list(range(size))]
    assert size < 100 or epochs[0] != epochs[1]
    again = hvd.DynamicSampler(size, batch_size=5, seed=1)
    again.set_epoch(1)
    assert list(again) == epochs[1]


@pytest.mark.parametrize("drops", [False, True])
def test_a_short_last_step_is_dropped_on_request(drops: bool) -> None:
    sampler = hvd.DynamicBatchSampler(23, batch_size=5, shuffle=False, drop_last=drops)
    assert [len(batch) for batch in sampler] == [5, 5, 5, 5] + [3] * (not drops)
    assert len(sampler) == 5  # an estimate


def test_a_resumed_epoch_has_the_rest() -> None:
    size = 50
    sampler = hvd.DynamicBatchSampler(size, batch_size=4)
    list(sampler)
    batches = iter(sampler)
    seen = [next(batches) for _ in range(5)]
    state = sampler.state_dict()  # the fifth is not consumed yet
    other = hvd.DynamicBatchSampler(size, batch_size=3)
    other.load_state_dict(state)
    assert other.state_dict() == state
    half = iter(other)
    rest = [next(half) for _ in range(2)]
    third = hvd.DynamicBatchSampler(size)
    third.load_state_dict(other.state_dict())  # stopped twice
    taken = [i for batch in [*seen[:4], *rest[:1], *third] for i in batch]
    assert sorted(taken) == list(range(size))
    assert list(map(sorted, third)) and third.epoch == 3
    with pytest.raises(StrategyMismatchError, match="seed"):
        hvd.DynamicBatchSampler(size, seed=1).load_state_dict(state)


def test_ends_inside_epochs_change_no_order() -> None:
    whole = hvd.DynamicBatchSampler(10, batch_size=4)
    order = [i for _ in range(3) for batch in whole for i in batch]
    cut = hvd.DynamicBatchSampler(10, batch_size=4)
    cut.set_ends([7, 10, 20, 25], start=3)
    parts = [[i for batch in cut for i in batch] for _ in range(4)]
    assert parts == [order[3:7], order[7:10], order[10:20], order[20:25]]
    assert cut.epoch == 4 and hvd.progress(cut) == (24, 2.4)  # before the last step


def test_a_schedule_follows_the_samples_and_continues_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(samplers, "samplers", [])
    with pytest.raises(ConfigError, match="has 0 samplers"):
        hvd.progress()
    sampler = hvd.DynamicBatchSampler(20, batch_size=5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5 ** hvd.progress().epochs)
    assert hvd.progress() == (0, 0.0)
    seen, rates = [], []
    for _ in range(2):
        for _ in sampler:
            optimizer.step()
            schedule.step()
            seen.append(hvd.progress().samples)
            rates += schedule.get_last_lr()
    assert seen == [0, 5, 10, 15, 20, 25, 30, 35]  # before the step at hand
    assert rates == [0.5 ** (samples / 20) for samples in seen]
    batches = iter(sampler)
    for _ in range(3):
        next(batches)
    other = hvd.DynamicSampler(20)
    other.load_state_dict(sampler.state_dict())
    assert hvd.progress(other) == (50, 2.5)
    next(iter(other))
    assert hvd.progress(other) == hvd.progress(sampler) == (50, 2.5)
    with pytest.raises(ConfigError, match="has 2 samplers"):
        hvd.progress()


def test_a_shard_is_consumed_when_the_next_one_is_asked_for() -> None:
    urls = [f"file:{i}" for i in range(7)]
    shards = hvd.dynamic_shards(urls, seed=1)
    assert sorted(shards) == urls and len(shards) == 7
    second = iter(shards)
    seen = [next(second) for _ in range(3)]
    other = hvd.dynamic_shards(urls, seed=1)
    other.load_state_dict(shards.state_dict())
    assert sorted([*seen[:2], *other]) == urls
    assert sorted(other) == urls and list(hvd.dynamic_shards(urls, shuffle=False)) == urls


def test_wrong_use_is_refused() -> None:
    wrong: Any
    for wrong in ({"dataset": -1}, {"dataset": True}, {"dataset": 3, "seed": 0.5}):
        with pytest.raises(ConfigError, match="give an integer of 0 or more"):
            hvd.DynamicSampler(**wrong)
    for wrong in (0, 4.0):
        with pytest.raises(ConfigError, match="give an integer of 1 or more"):
            hvd.DynamicSampler(3, batch_size=wrong)
    with pytest.raises(ConfigError, match="there are 3. Give at most these"):
        hvd.DynamicSampler(3, samples=4)
    sampler = hvd.DynamicSampler(3)
    for wrong in (-1, 1.5):
        with pytest.raises(ConfigError, match=r"set_epoch\(.*give an integer of 0 or more"):
            sampler.set_epoch(wrong)
    sampler.set_epoch(5)
    list(sampler)
    for epoch in (5, 2):
        sampler.set_epoch(epoch)
        with pytest.raises(ConfigError, match=r"numbers that grow.* new sampler"):
            list(sampler)
    sampler = hvd.DynamicSampler(3)
    sampler.set_ends([2])
    assert len(list(sampler)) == 2
    with pytest.raises(ConfigError, match="set_ends has named 1 iterations"):
        list(sampler)


def test_samples_are_kept_when_a_new_optimizer_counts_from_0() -> None:
    made = [10]
    sharding = Sharding(0, [[0]], 1, lambda: None, lambda _: 12, 4, False, lambda: made[0])
    sharding.talk(View([[0]], frozenset((0,))), [])
    steps = sharding.begin(0)
    for made[0] in (10, 11, 12):
        next(steps)
    before = sharding.samples()
    made[0] = 0
    assert sharding.samples() >= before > 0


def test_prefetching_is_not_taken_for_speed() -> None:
    """A loader's workers ask for several steps at once, before the first is made."""
    made = [0]
    arguments = 1, lambda: None, lambda _: 4000, 4, False, lambda: made[0]
    leader, mate = (Sharding(rank, [[0, 1]], *arguments) for rank in range(2))
    view = View([[0, 1]], frozenset((0,)))
    steps = []
    for each in (leader, mate):
        each.talk(view, [])
        steps.append(each.begin(0))
    mate.talk(view, [(0, Appended(0, 0, [(0, 400)], False, [(0, 0)]))])
    for _ in range(8):
        for its in steps:
            next(its)
    assert (leader.parts.rate, leader.parts.lead, mate._wanted[0]) == (0.0, 8, 9)
    for made[0] in (1, 2, 3, 4):
        time.sleep(0.01)
        next(steps[0])
    assert 0 < leader.parts.rate < 8 / 0.01


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learner_without_a_step_counts_what_others_report(rank: int) -> None:
    sharding = Sharding(rank, [[0, 1], [2]], 2, lambda: None, lambda _: 12, 4, False, lambda: 0)
    view = View([[0, 1], [2]], frozenset((0, 1)))
    sharding.talk(view, [])
    sharding.begin(0)
    for reported in (4, 8):
        sharding.talk(view, [(2, Consumed([(0, reported)], 1.0, 2, []))])
        assert sharding.samples() == reported


@pytest.mark.parametrize("drops", [False, True])
def test_with_rounds_all_make_equally_many_steps(
    drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, spec = (
        SimpleNamespace(in_step=object()),
        SimpleNamespace(strategy=hvd.GossipPGA(period=3)),
    )
    monkeypatch.setattr(dynamic_sampler, "live", lambda: [SimpleNamespace(plan=plan, spec=spec)])
    steps = []
    for rank in range(3):
        world = SimpleNamespace(rank=rank, size=3)
        monkeypatch.setattr(dynamic_sampler.worlds, "current", lambda world=world: world)
        sampler = hvd.DynamicBatchSampler(40, batch_size=4, drop_last=drops, samples=32)
        steps.append(list(sampler))
        assert hvd.progress(sampler) == ((24, 0.75) if drops else (32, 1.0))
    assert [list(map(len, own)) for own in steps] == [[4, 4, 3][: 3 - drops]] * 3
    taken = [i for own in steps for step in own for i in step]
    assert len(taken) == (24 if drops else 33) and len(set(taken)) == (24 if drops else 32)
    sampler.set_epoch(7)
    half = iter(sampler)
    begun = [next(half) for _ in range(2)]  # of them the second is not made yet
    other = hvd.DynamicBatchSampler(40, batch_size=4, samples=32)
    other.load_state_dict(sampler.state_dict())
    assert hvd.progress(other).samples == 7 * 32 + 12 and not set(begun[0]) & set(next(iter(other)))
    with pytest.raises(StrategyMismatchError, match="gossip_pga:period=3"):
        list(hvd.dynamic_shards(["a"]))


@pytest.mark.parametrize("number", [0, 1, 11, 12, 13, 17])
@pytest.mark.parametrize("learners", [1, 2, 3])
def test_learners_make_equally_many_steps_of_equal_size(learners: int, number: int) -> None:
    steps = Steps(learners, 2)
    ranges = [(EPOCH, EPOCH + number // 2), (7, 7 + number - number // 2)]
    steps.append(ranges)
    assert steps.of_step(number // (2 * learners), 0) is None
    steps.ended = True
    taken: set[int] = set()
    for step in range(number // (2 * learners) + 1):
        shares = [steps.of_step(step, learner) or [] for learner in range(learners)]
        assert len({count(share) for share in shares}) == 1
        taken.update(i for share in shares for start, stop in share for i in range(start, stop))
    assert taken == {i for start, stop in ranges for i in range(start, stop)}
    assert all(start < stop for start, stop in merged(ranges))
    assert steps.of_step(-(-number // (2 * learners)), 0) == []


def test_one_that_joins_begins_where_the_job_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next epoch, or, if others are in the middle of one, in that; samplers made later, too."""
    monkeypatch.setattr(samplers, "samplers", [])
    monkeypatch.setattr(samplers, "_joined_at", [])
    first, second = hvd.DynamicSampler(9), hvd.DynamicSampler(9)
    list(first)
    begun = iter(second)
    next(begun)
    assert samplers.epochs(is_between=True) == [1, 1]
    assert samplers.epochs(is_between=False) == [1, 0]
    samplers.join_at([5, 7, 9])
    assert (first.epoch, second.epoch, hvd.DynamicSampler(9).epoch) == (5, 7, 9)
