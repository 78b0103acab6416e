"""Parameters on GPUs, without a GPU: torch's fake tensors have devices and no memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hvd_adpsgd.torch.parameters import Parameters


class Streams:
    """In place of torch.cuda.current_stream: notes what is waited for."""

    def __init__(self) -> None:
        self.waited: list[torch.device] = []

    def __call__(self, device: torch.device | None = None) -> Streams:
        self.device = torch.device("cuda:0" if device is None else device)
        return self

    def synchronize(self) -> None:
        self.waited.append(self.device)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("gpus", [["cuda:0"], ["cuda:1"], ["cuda:0", "cuda:1", "cpu"]])
def test_copies_from_every_gpu_are_waited_for(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams)
    with FakeTensorMode():
        parameters = Parameters()
        parameters.add([(name, torch.empty(4, device=name)) for name in gpus])
        parameters.addresses()
    expected = {torch.device(name) for name in gpus if name != "cpu"}
    assert set(streams.waited) == expected and len(streams.waited) == len(expected)
