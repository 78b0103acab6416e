"""Wrapped optimizers on one learner: their hooks, methods that accept what the user's class accepts."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adpsgd.errors import GradientOrderError
from hvd_adpsgd.inner import horovod
from hvd_adpsgd.torch import optimizer as wrapping
from hvd_adpsgd.training import reducer as reducing
from hvd_adpsgd.training.inner_averaging import AveragingReducer
from hvd_adpsgd.training.optimizer_state import made_of
from hvd_adpsgd.training.reducer import Reducer

OPTIONS: dict[str, Any] = {
    "compression": horovod.Compression.none,
    "backward_passes_per_step": 1,
    "op": horovod.Average,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "sparse_as_dense": False,
    "process_set": SimpleNamespace(included=lambda: True, size=lambda: 2),
}


class Strict(torch.optim.SGD):
    """Its zero_grad() takes no argument, as that of apex's FusedAdam; the other methods take one more."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=True)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "gather": gather}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self.strict = strict


def wrapped(is_plain: bool) -> Any:
    """Return a wrapped optimizer of a job of one super learner, or of several."""
    plain = Strict([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    made = made_of(plain, wrapping._METHODS)
    made._reducer = (Reducer if is_plain else AveragingReducer)(plain.param_groups, None, **OPTIONS)
    made._alone = SimpleNamespace(step=lambda own, closure: own._reducer.before_step())
    tensors = SimpleNamespace(trained=set(map(id, plain.param_groups[0]["params"])))
    spec = SimpleNamespace(moments=None)
    made._averaging = None if is_plain else SimpleNamespace(spec=spec, tensors=tensors)
    plain.param_groups[0]["params"][0].grad = torch.ones(3)
    return made


@pytest.mark.parametrize("is_plain", [True, False])
def test_arguments_are_the_users_class_own(is_plain: bool, monkeypatch: Any) -> None:
    for name in ("state", "load_state"):
        monkeypatch.setattr(wrapping.checkpoint, name, lambda *_: None)
    optimizer = wrapped(is_plain)
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"][0].grad is None
    state = optimizer.state_dict(gather=True)
    assert state.pop("gather") is True
    optimizer.load_state_dict(state, strict=False)
    assert optimizer.strict is False


def test_a_step_after_synchronize_warns_in_horovods_words() -> None:
    """Scripts and Horovod's own tests look for this sentence."""
    optimizer = wrapped(is_plain=True)
    optimizer._reducer.is_synchronized = True
    sentence = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after "
    with pytest.warns(UserWarning, match=sentence + r"optimizer\.synchronize\(\)\."):
        optimizer.step()


class Backend:
    """Doubles tensors at once, and records names and numbers of tensors; learner 0 names b before a."""

    HorovodInternalError, Average = horovod.HorovodInternalError, horovod.Average
    Compression, BUCKET_NBYTES = horovod.Compression, 0

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int]] = []

    def allreduce_async_(self, tensor: torch.Tensor, name: str, **_: Any) -> Any:
        self.submitted.append((name, 1))
        return tensor.mul_(2)

    def grouped_allreduce_async_(self, tensors: Any, name: str, **_: Any) -> Any:
        self.submitted.append((name, len(tensors)))
        return [t.mul_(2) for t in tensors]

    size = staticmethod(lambda: 2)
    synchronize = staticmethod(lambda handle: handle)
    broadcast_object = staticmethod(lambda names, **_: sorted(names, reverse=True))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend()
    monkeypatch.setattr(reducing, "horovod", made)
    return made


def made(n: int, **options: Any) -> tuple[Reducer, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(n)]
    reducer = Reducer([{"params": parameters}], zip("abc", parameters), **OPTIONS | options)  # noqa: B905
    reducer.start(True)
    return reducer, parameters


def test_gradients_are_submitted_after_their_last_pass(backend: Backend) -> None:
    reducer, (a, unused) = made(2, backward_passes_per_step=2)
    a.sum().backward()
    assert reducer.gradients.is_pending and not backend.submitted
    a.sum().backward()
    assert backend.submitted == [("a", 1)]
    for act, words in (
        (reducer.before_zero_grad, "zero_grad"),
        (a.sum().backward, "more than backward_passes_per_step"),  # adds 1 to the doubled 2
    ):
        with pytest.raises(AssertionError, match=words):
            act()
    reducer.synchronize()
    assert [p.grad.tolist() for p in (a, unused)] == [[5.0] * 2, [0.0] * 2], "with the refused pass"
    reducer.set_passes(1)
    a.sum().backward()
    reducer.drop()
    a.sum().backward()
    assert len(backend.submitted) == 4


def test_a_group_is_submitted_when_what_is_not_frozen_is_complete(backend: Backend) -> None:
    _reducer, (a, b, c) = made(3, groups=2)
    b.sum().backward()
    assert not backend.submitted, "c, b are the first group"
    c.sum().backward()
    assert backend.submitted == [("c", 2)]
    reducer, (a, b) = made(2, groups=1)
    b.requires_grad_(False)
    a.sum().backward()
    assert backend.submitted[1:] == [("b", 2)] and reducer.is_submitted


def test_buckets_hold_the_last_parameters_first_up_to_a_size(backend: Backend) -> None:
    backend.BUCKET_NBYTES = 24  # three parameters
    reducer, parameters = made(3)
    torch.stack(parameters).sum().backward()
    assert backend.submitted == [("c", 3)]
    assert all(p.grad is not None and p.grad.tolist() == [2.0] * 2 for p in parameters)
    backend.BUCKET_NBYTES = 16
    assert [len(group.parameters) for group in reducer._groups] == [3]
    reducer, parameters = made(3)
    parameters[2].sum().backward()
    assert len(backend.submitted) == 1, "the bucket lacks b"
    reducer.synchronize()
    assert backend.submitted[1:] == [("c", 2), ("a", 1)], "with zeros, in the order of buckets"


def test_a_gradient_with_a_graph_is_refused_with_its_cure(backend: Backend) -> None:
    _reducer, (weight,) = made(1)
    with pytest.raises(GradientOrderError, match=r"torch\.autograd\.grad"):
        weight.square().sum().backward(create_graph=True)


def test_hooks_go_with_the_optimizer(backend: Backend) -> None:
    kept, (a,) = made(1)
    reducer, (b,) = made(1)
    dropped = weakref.ref(reducer)
    del reducer
    gc.collect()
    kept.close()
    (a + b).sum().backward()
    assert dropped() is None and not backend.submitted and kept.trained
