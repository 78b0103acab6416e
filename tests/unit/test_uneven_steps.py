"""hvd.join() gives a learner without optimizer state that of another one."""

import pytest
import torch

pytest.importorskip("horovod.torch")


def test_a_state_tensor_that_lacks_its_value_is_zero() -> None:
    """It is looked at before the root's value arrives; here memory that is not filled is NaN."""
    from hvd_adpsgd.torch.uneven_steps import _fit

    state: dict[str, torch.Tensor] = {}
    torch.use_deterministic_algorithms(True)
    try:
        outline = {"step": (torch.Size(()), torch.float32, True)}
        made = list(_fit(state, outline, torch.device("cpu")))
    finally:
        torch.use_deterministic_algorithms(False)
    assert made == [torch.zeros(())] and made[0] is state["step"]
