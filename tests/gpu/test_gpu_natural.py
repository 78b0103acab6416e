"""The estimates of natural gradients on a GPU. Skipped without one."""

import pytest
import torch

from hvd_adpsgd.optim.natural_gradient.fisher import OnlineFisher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def test_a_state_that_was_loaded_from_the_host_goes_on_on_the_gpu_with_the_same_bits() -> None:
    torch.manual_seed(0)
    first, second = (OnlineFisher(20, 5, update_period=1) for _ in range(2))
    for _ in range(4):
        first.precondition(torch.randn(30, 20, device="cuda"))
    state = first.state_dict()
    second.load_state_dict({**state, "directions": state["directions"].cpu()})
    for _ in range(3):
        x = torch.randn(30, 20, device="cuda")
        torch.testing.assert_close(
            first.precondition(x)[0], second.precondition(x)[0], rtol=0, atol=0
        )
    assert second.directions is not None and second.directions.is_cuda
