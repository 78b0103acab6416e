"""Methods of wrapped optimizers: they accept what the user's class accepts, and warn as Horovod does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_adpsgd.torch import optimizer as averaging_optimizer
from hvd_adpsgd.torch.plain_optimizer import become_plain


class Strict(torch.optim.SGD):
    """Its zero_grad() takes no argument, as that of apex's FusedAdam; the other methods take one more."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=True)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "gather": gather}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self.strict = strict


def wrapped(kind: str) -> Any:
    """Return a wrapped optimizer of a job of several super learners ("averaging"), or of one ("plain")."""
    methods = {
        "_handles": {},
        "_compression": None,
        "_allreduce_delay": {},
        "_group_counts": {},
        "_should_synchronize": True,
        "_synchronized": False,
        "_allreduce_grad_async": None,
        "_grouped_allreduce_grad_async": None,
        "_requires_update": set(),
        "_grad_accs": [],
        "backward_passes_per_step": 1,
        "synchronize": lambda self: None,
    }
    parameter = torch.nn.Parameter(torch.ones(3))
    if kind == "plain":
        made: Any = type("Strict", (Strict,), methods)([parameter], lr=0.1)
        become_plain(made, Strict, [])
    else:
        own = {
            "_parent": Strict,
            "_gradients": SimpleNamespace(release=lambda: None, forget=lambda: None),
            "_averaging": SimpleNamespace(
                spec=SimpleNamespace(moments=None), tensors=SimpleNamespace(trained=set())
            ),
        }
        taken = ("zero_grad", "state_dict", "load_state_dict")
        own.update({name: averaging_optimizer._METHODS[name] for name in taken})
        made = type("Strict", (Strict,), {**methods, **own})([parameter], lr=0.1)
        made._averaging.tensors.trained.add(id(parameter))
    parameter.grad = torch.ones(3)
    return made


@pytest.mark.parametrize("kind", ["plain", "averaging"])
def test_arguments_are_the_users_class_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("state", "load_state"):
        monkeypatch.setattr(averaging_optimizer.checkpoint, name, lambda *_: None)
    optimizer = wrapped(kind)
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"][0].grad is None
    state = optimizer.state_dict(gather=True)
    assert state.pop("gather") is True
    optimizer.load_state_dict(state, strict=False)
    assert optimizer.strict is False


def test_a_step_after_synchronize_warns_in_horovods_words() -> None:
    """Scripts and Horovod's own tests look for this sentence."""
    optimizer = wrapped("plain")
    optimizer._synchronized = True
    sentence = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after "
    with pytest.warns(UserWarning, match=sentence + r"optimizer\.synchronize\(\)\."):
        optimizer.step()
