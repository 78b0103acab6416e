"""What becomes of gradients between backward() and step(), and where the learners of a super learner are."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvd_adpsgd.torch.gradients import Gradients
from hvd_adpsgd.torch.mates import _COLUMNS, Mates


def trained(n: int = 3) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(n)]
    for p in parameters:
        p.grad = torch.ones(4)
    return parameters


@pytest.mark.parametrize(
    "change",
    [
        lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
        lambda p: torch.nn.utils.clip_grad_value_([p], 0.1),
        lambda p: p.grad.zero_(),
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p, "grad", p.grad.clone()),
    ],
)
def test_a_gradient_changed_while_it_is_averaged_is_known(
    change: Callable[[torch.Tensor], object],
) -> None:
    gradients, (a, b, c) = Gradients(), trained()
    assert gradients.submit([a]) == 1
    assert gradients.submit([b]) == 2
    held = b.grad
    change(b)
    change(c)
    assert gradients.changed() == [b]
    assert held is not None, "also if the script keeps the one before"
    assert gradients.missing([a, b, c]) == [c]
    gradients.average([a, b, c], by_backward=True)
    change(b)
    assert gradients.changed() == [], "averaged gradients are the script's"
    assert gradients.averaged


def test_only_what_is_added_to_an_average_of_backward_is_refused() -> None:
    gradients, (a, b, c) = Gradients(), trained()
    gradients.average([a, b], by_backward=True)
    b.grad = torch.ones(4)
    assert gradients.accumulated([a, b, c]) == [a], "b is new, c was not averaged"
    gradients.submit([b])
    assert not gradients.averaged
    assert gradients.accumulated([a]) == [a], "also when others are new"
    gradients.release()
    assert gradients.accumulated([a]) == []
    gradients.average([a], by_backward=False)
    assert gradients.accumulated([a]) == [], "after synchronize(), as in Horovod"


def test_a_repeated_average_is_of_the_same_gradients() -> None:
    gradients, (a, b, _) = Gradients(), trained()
    assert not gradients.is_same(in_place=False)
    gradients.average([a, b], by_backward=False)
    assert gradients.is_same(in_place=True)
    assert a.grad is not None
    a.grad.mul_(2)
    assert gradients.is_same(in_place=False)
    assert not gradients.is_same(in_place=True)
    b.grad = None
    assert not gradients.is_same(in_place=False)


def test_gradients_that_a_script_drops_are_freed() -> None:
    gradients, (a, *_) = Gradients(), trained()
    gradients.submit([a])
    gradients.average([a], by_backward=True)
    held = weakref.ref(a.grad)
    a.grad = None
    gc.collect()
    assert held() is None


# ---- mates --------------------------------------------------------------------------------------


def mates(n: int = 2) -> list[Mates]:
    """Of one super learner, in one process."""
    rows = np.zeros((n, _COLUMNS), np.int64)
    made = [Mates(None, 0) for _ in range(n)]
    for rank, one in enumerate(made):
        one._rows, one._mine = rows, rows[rank]
    return made


def never() -> bool:
    return False


def test_a_learner_waits_for_gradients_that_come() -> None:
    me, other = mates()
    me.submitted()
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(me.all_submit([], never)))
    waiting.start()
    other.submitted()
    waiting.join(60)
    assert found == [True]


def test_a_learner_does_not_wait_for_one_that_waits_for_it() -> None:
    me, other, third = mates(3)
    me.submitted()
    third.submitted()
    other.asks()
    assert not me.all_submit([], never)
    me.asks()
    other.submitted()
    assert me.all_submit([], never), "that operation is over"
    other.asks()  # and it alone has raised an error
    for one in (me, other, third):
        one.averaged()
    third.submitted()
    me.submitted()
    waits = iter((False, False, True))
    assert me.all_submit([], lambda: next(waits)), "it is only late, and not ahead"


def test_a_learner_that_averages_meanwhile_is_not_elsewhere() -> None:
    """Between two reads of the counters it submits, and its average is complete."""
    me, other = mates()
    me.submitted()

    def averages_now() -> bool:
        other.submitted()
        other.averaged()
        return False

    assert me.all_submit([], averages_now)


def test_a_learner_does_not_wait_for_one_that_waits_with_another_optimizer() -> None:
    me, other = mates()
    mine_too, others_too = mates()
    me.submitted()
    others_too.submitted()
    assert not me.all_submit([mine_too], never)
    other.submitted()
    assert me.all_submit([mine_too], never)


def test_a_learner_that_has_joined_is_not_waited_for() -> None:
    """Whether it contributes to a set depends on the set, not on the moment."""
    me, other = mates()
    other.joins()  # after 0 sets
    me.submitted()
    assert me.all_submit([], never)
    me.averaged()
    assert me.has_joined(1)
    assert me.someone_has_joined()
    other.returns(1)
    assert not me.someone_has_joined()
    other.joins()  # it has contributed to set 0, of which the other learner may still be
    assert not me.has_joined(1)
    me.averaged()
    assert me.has_joined(1)


def test_a_learner_that_has_closed_its_optimizer_is_not_waited_for() -> None:
    me, other = mates()
    me.submitted()
    other.submitted()
    other.closes()  # after that set
    assert me.all_submit([], never)
    assert me.late() == []
    me.averaged()
    me.submitted()
    assert not me.all_submit([], never)
    assert me.have_closed(me.late()) == [1]


def test_a_set_that_one_learner_refuses_is_refused_by_all() -> None:
    """Also if it refuses the next one before the others have looked."""
    me, other = mates()
    other.refuses()
    other.averaged()
    other.refuses()
    for _ in range(2):
        me.averaged()
        assert me.refusing() == [1]
    me.averaged()
    assert me.refusing() == []


def test_a_set_that_horovod_is_done_with_is_not_waited_for() -> None:
    me, _ = mates()
    me.submitted()
    assert me.all_submit([], lambda: True), "an error, which synchronize raises"
