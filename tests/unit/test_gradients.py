"""What becomes of gradients between backward() and step(), and where the learners of a super learner are."""

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvd_adpsgd.training.gradients import Gradients, bits_of
from hvd_adpsgd.training.mates import COLUMNS, Mates
from hvd_adpsgd.training.reducer import Reducible


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
    assert not gradients.submit([a], [a, b, c])
    assert not gradients.submit([b], [a, b, c])
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
    gradients.submit([b], [a, b, c])
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
    gradients.submit([a], [a])
    gradients.average([a], by_backward=True)
    held = weakref.ref(a.grad)
    a.grad = None
    gc.collect()
    assert held() is None


def test_frozen_parameters_are_not_waited_for() -> None:
    gradients, (a, b, c) = Gradients(), trained()
    c.requires_grad_(False)
    assert not gradients.submit([a], [a, b, c])
    assert gradients.missing([a, b, c]) == [b]
    assert gradients.submit([b], [a, b, c])
    gradients.average([a, b, c], by_backward=True)
    c.requires_grad_(True)
    assert not gradients.submit([a, b], [a, b, c])
    assert gradients.submit([c], [a, b, c])


def test_a_gradient_changed_before_its_last_backward_pass_is_known() -> None:
    gradients, (a, b, _) = Gradients(), trained()
    for p in (a, b):
        gradients.computed(p)
    assert gradients.accumulating() == [a, b]
    assert gradients.changed() == []
    assert a.grad is not None
    a.grad.mul_(2)
    assert gradients.changed() == [a]
    gradients.computed(a)
    assert gradients.changed() == [], "backward() has added to it"
    gradients.submit([a], [a, b])
    gradients.computed(a)  # the hook behind the one that has submitted it
    assert gradients.accumulating() == [b]
    gradients.average([a, b], by_backward=False)
    assert gradients.accumulating() == []


def test_gradients_that_replace_averaged_ones_are_known() -> None:
    gradients, (a, b, c) = Gradients(), trained()
    gradients.average([a, b, c], by_backward=True)
    assert a.grad is not None
    a.grad.mul_(2)
    b.grad = None
    c.grad = torch.ones(4)
    assert [g is c.grad for g in gradients.replaced([a, b, c])] == [True]


def mates(n: int = 2) -> list[Mates]:
    """Of one super learner, in one process."""
    rows = np.zeros(n, list(COLUMNS))
    made = [Mates(None, 0) for _ in range(n)]
    for rank, one in enumerate(made):
        one._rows, one._row = rows, rows[rank]
    return made


def test_learners_compare_gradients_that_replace_averaged_ones() -> None:
    me, other, joined = mates(3)
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    given = [torch.arange(4.0, dtype=kind) for kind in kinds]
    given.append(torch.eye(3).to_sparse())
    joined.steps_with(0)  # and no more
    for sets, (mine, its, differ) in enumerate(
        [([], [], False), (given, given, False), (given, given[1:], True), ([], given[:1], True)], 4
    ):
        me.sets = other.sets = sets
        me.steps_with(bits_of(mine))
        me.averaged()
        assert not me.differ(), "the other one has not stepped, and is not waited for"
        other.steps_with(bits_of(its))
        me.steps_with(0)  # it may be ahead
        other.averaged()
        assert other.differ() is differ
    me.sets = 10
    assert not me.differ()


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


def test_one_that_has_submitted_its_last_set_and_closes_is_not_late() -> None:
    """It does so after this learner has found it late, and before it looks for those that have closed."""
    me, other = mates()
    me.submitted()
    late = me.late()
    assert late == [1]
    other.submitted()
    other.averaged()
    other.closes(ends=True)
    assert me.have_closed(late) == me.have_ended(late) == []
    me.averaged()
    late = me.late()
    assert me.have_closed(late) == me.have_ended(late) == [1]
    assert me.submitted_by(1) == 1


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


def test_a_lost_quorum_stops_all_learners_after_the_same_set() -> None:
    """Also one that looks so late that its mate has noted the loss before the next set."""
    leader, other = mates()
    for one in (leader, other):
        one.averaged()
    assert not leader.lack_quorum
    leader.loses_quorum()
    leader.loses_quorum()  # of each further set
    assert not other.lack_quorum, "that set is stepped with on the leader"
    for one in (leader, other):
        one.averaged()
        assert one.lack_quorum
    leader.regains_quorum()
    assert not other.lack_quorum


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_horovod_writes_is_no_change_by_the_script(dtype: torch.dtype) -> None:
    """It copies to a GPU what it has averaged in host memory, which torch counts as a change in place."""

    class NoCompression:
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return tensor, None

        def decompress(self, tensor: torch.Tensor, context: None) -> torch.Tensor:
            return tensor

    (p,), gradients, reducible = trained(1), Gradients(), Reducible(NoCompression())
    p.data, p.grad = p.data.to(dtype), p.grad.to(dtype)
    sent, context = reducible.compress(p.grad)
    gradients.submit([p], [p])
    sent.copy_(torch.full_like(sent, 3.0))
    assert gradients.changed() == []
    p.grad.set_(reducible.decompress(sent, context))  # as Horovod's synchronize()
    assert (p.grad == 3.0).all()
