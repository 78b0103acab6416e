"""Which backend moves CUDA tensors: NCCL refuses two learners on one GPU."""

import json
import logging

import pytest
import torch
import torch.distributed as dist

from hvd_adpsgd.inner import gpus


@pytest.mark.parametrize(
    ("mine", "mate", "host", "expected"),
    [
        (["a"], ["/b"], "", "nccl"),  # each learner sees its own
        (["a", "b"], ["/a", "/b"], "", "nccl"),  # both see both
        (["a"], ["/a"], "", "gloo"),
        (["a"], ["2/a"], "1", "nccl"),
        (["a"], [], "", "gloo"),
        ([], [], "", ""),
    ],
)
def test_nccl_where_each_learner_can_have_a_gpu(mine, mate, host, expected, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(mine))
    monkeypatch.setattr(gpus, "_uuid", lambda number: mine[number])
    monkeypatch.setenv("NCCL_HOSTID", host)
    store = dist.HashStore()
    store.set("1", json.dumps([mate, None]))
    assert gpus.cuda_backend(0, 2, store) == expected
    assert ("2 learners of a super learner share 1 GPU(s)" in caplog.text) == (expected == "gloo")


@pytest.mark.parametrize(("used", "others"), [(0, "b"), (1, "a"), (0, "a")])
def test_learners_that_forget_to_choose_their_gpu(used, others, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpus, "_uuid", lambda number: "ab"[number])
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    store = dist.HashStore()
    store.set("1", json.dumps([["/a", "/b"], f"/{others}"]))
    if "ab"[used] != others:
        assert gpus.cuda_backend(0, 2, store, used) == "nccl"
        return
    with pytest.raises(RuntimeError, match=r"learners 0 and 1 .* same GPU \(a\).*set_device"):
        gpus.cuda_backend(0, 2, store, used)


def test_a_watchdog_that_would_train_on_with_part_of_a_sum_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpus, "_uuid", lambda number: "a")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    with pytest.raises(RuntimeError, match="ASYNC_ERROR_HANDLING=2.*Unset it"):
        gpus.cuda_backend(0, 1, dist.HashStore())
