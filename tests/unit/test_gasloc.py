"""GASLoC: its law in numpy, what it is in special cases, and what exchanges leave unchanged."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hvd_adpsgd.strategies import GASLoC, RandomPairs
from hvd_adpsgd.training.update_rules import UpdateRule, make_rule
from tests.theorems import mixing_matrix

Array = NDArray[np.float64]
N, SIZE, BLOCKS = 4, 6, 7


class Learner:
    """A super learner's model under the rule; its local steps and corrections are given."""

    def __init__(self, strategy: GASLoC):
        self.model = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        law = strategy.plan(0, N).rule
        with torch.no_grad():
            self.rule: UpdateRule = make_rule(law, [("w", self.model)], 1.0)
            self.rule.start()
        self.steps = 0

    @property
    def w(self) -> Array:
        return self.model.detach().numpy().copy()

    @torch.no_grad()
    def step(self, update: Array, correction: Array | None = None) -> None:
        self.model += torch.from_numpy(update)
        self.rule.pass_time(self.steps)
        self.steps += 1
        self.rule.before_corrections()
        if correction is not None:
            self.model += torch.from_numpy(correction)
        self.rule.after_corrections()


def updates(period: int, seed: int = 0) -> Iterator[Array]:
    random = np.random.default_rng(seed)
    for _ in range(BLOCKS * period):
        yield random.normal(size=(N, SIZE))


def pairs(block: int) -> Array:
    return mixing_matrix(RandomPairs(3), N, block)


def run(strategy: GASLoC, mixing: Any = pairs) -> Array:
    """Models after each block: pairs average in the first step of a block, with the models as they are."""
    learners = [Learner(strategy) for _ in range(N)]
    after = []
    for step, update in enumerate(updates(strategy.period)):
        models = np.array([learner.w for learner in learners])
        first = step % strategy.period == 0
        owed = mixing(step // strategy.period) @ models - models if first and step else [None] * N
        for learner, its, correction in zip(learners, update, owed, strict=True):
            learner.step(its, correction)
        if learners[0].steps % strategy.period == 0:
            after.append(np.array([learner.w for learner in learners]))
    return np.array(after)


def law(strategy: GASLoC, mixing: Any = pairs) -> Array:
    """theta' = u + gamma (u - u before), u = theta + eta g + c, block by block."""
    h, eta, gamma = strategy.period, strategy.rate, strategy.momentum
    theta, before, after = np.zeros((N, SIZE)), np.zeros((N, SIZE)), []
    drawn = list(updates(h))
    for block in range(BLOCKS):
        g = sum(drawn[block * h : (block + 1) * h])
        c = mixing(block) @ theta - theta if block else 0 * theta
        u = theta + eta * g + c
        theta, before = u + gamma * (u - before), u
        after.append(theta)
    return np.array(after)


@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.5), (0.7, 0.9), (1.3, 0.0)])
def test_models_follow_the_law(period: int, rate: float, momentum: float) -> None:
    strategy = GASLoC(period, rate, momentum)
    np.testing.assert_allclose(run(strategy), law(strategy), rtol=0, atol=1e-12)


def test_without_momentum_and_with_rate_1_it_is_gossip_to_the_last_bit() -> None:
    rule, plain = Learner(GASLoC(3, 1.0, 0.0)), np.zeros(SIZE)
    correction = np.random.default_rng(1).normal(size=SIZE)
    for update in updates(3):
        rule.step(update[0], correction)
        plain = plain + update[0] + correction
        assert (rule.w == plain).all()


def test_with_the_mean_of_all_it_is_diloco() -> None:
    """Nesterov's momentum, as torch has it, on the mean of what a block has changed."""
    strategy = GASLoC(4, 0.7, 0.9)
    drawn, outer = list(updates(4)), torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    nesterov = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for block, models in enumerate(run(strategy, lambda _: np.full((N, N), 1 / N))):
        moved = sum(drawn[4 * block : 4 * block + 4]).mean(axis=0)
        outer.grad = torch.from_numpy(-moved)
        nesterov.step()
        np.testing.assert_allclose(models.mean(axis=0), outer.detach().numpy(), rtol=0, atol=1e-12)


def test_frozen_parameters_have_no_momentum() -> None:
    learner = Learner(GASLoC(1, 1.0, 0.9))
    for update in list(updates(1))[:3]:
        learner.step(update[0])
    learner.model.requires_grad = False
    learner.step(np.zeros(SIZE))
    before = learner.w
    learner.step(np.zeros(SIZE))
    assert (learner.w == before).all()


def test_a_model_that_is_finite_again_trains_on() -> None:
    learner = Learner(GASLoC(2, 0.7, 0.5))
    learner.step(np.full(SIZE, np.nan))
    with torch.no_grad():
        learner.model.fill_(3.0)  # as average_model gives the mean of the others
    for _ in range(3):
        learner.step(np.zeros(SIZE))
    assert (learner.w == 3.0).all()
    for _ in range(2):
        learner.step(np.ones(SIZE))
    np.testing.assert_allclose(learner.w, 3 + 0.7 * 2 + 0.5 * 0.7 * 2)  # an outer step of its own


def test_a_resumed_run_goes_on_as_if_it_had_not_ended() -> None:
    one, other = (Learner(GASLoC(3, 0.7, 0.5)) for _ in range(2))
    drawn = [update[0] for update in updates(3)]
    for update in drawn[:4]:
        one.step(update, update / 7)
    with torch.no_grad():
        other.model.copy_(one.model)
        for name, tensors in other.rule.tensors().items():
            for mine, its in zip(tensors, one.rule.tensors()[name], strict=True):
                mine.copy_(its)
    other.steps = one.steps
    for update in drawn[4:]:
        one.step(update, update / 7)
        other.step(update, update / 7)
        assert (one.w == other.w).all()
