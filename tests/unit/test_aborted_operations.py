"""Operations on GPUs: their streams, and those that wait for a failed learner, which end unused.

On fake GPUs: tests/gpu has the real ones.
"""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvd_adpsgd.inner.horovod import HorovodInternalError
from hvd_adpsgd.inner.over_torch.pending import Pending
from hvd_adpsgd.inner.over_torch.transfers import Transfers
from hvd_adpsgd.launch import torch_group
from hvd_adpsgd.training import inner_averaging


class Membership:
    """Stands for a super learner's membership: a key that can be referred to weakly."""


@dataclasses.dataclass(frozen=True)
class World:
    membership: Membership
    super_rank: int = 0
    size: int = 2


class Nccl:
    """A backend whose operation is never complete, unless it is aborted."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def abort(self) -> None:
        self.over.set()


class Inner:
    """A super learner of which a mate fails at look number `fails`; None: never."""

    def __init__(self, world: World, fails: int | None):
        self.world, self.fails, self.looks = world, fails, 0

    def has_failed(self) -> bool:
        self.looks += 1
        return self.fails is not None and self.looks >= self.fails

    def require_alive(self) -> None:
        if self.fails is not None and self.looks >= self.fails:
            raise HorovodInternalError("a learner of the super learner has ended")


@pytest.fixture
def made():
    """A world whose group has NCCL."""
    world, nccl = World(Membership()), Nccl()
    torch_group._made[world.membership] = torch_group._Made(SimpleNamespace(), nccl)
    return world, nccl


def groups_on_gpu() -> Any:
    parameter = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    return [{"params": [parameter]}]


def waits_for(monkeypatch: pytest.MonkeyPatch, query) -> None:
    event = SimpleNamespace(query=query)
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def test_a_step_waits_until_the_gpu_has_averaged(made, monkeypatch):
    world, nccl = made
    answers = iter([False, False, True])
    waits_for(monkeypatch, lambda: next(answers))
    inner_averaging._await_devices(groups_on_gpu(), Inner(world, None))
    assert not list(answers) and not nccl.over.is_set()


def test_a_step_whose_operation_waits_for_a_failed_mate_raises_and_ends_it(made, monkeypatch):
    world, nccl = made
    waits_for(monkeypatch, nccl.over.is_set)
    with pytest.raises(HorovodInternalError):
        inner_averaging._await_devices(groups_on_gpu(), Inner(world, 3))
    assert nccl.over.wait(30)


def test_the_result_of_an_aborted_operation_is_not_used(made, monkeypatch):
    """Another thread has ended it. The World is that after others have joined the job."""
    world, nccl = made
    grown = dataclasses.replace(world, size=3)
    waits_for(monkeypatch, lambda: torch_group.abort_group(world) or nccl.over.wait(30))
    with pytest.raises(HorovodInternalError):
        inner_averaging._await_devices(groups_on_gpu(), Inner(grown, None))
    assert torch_group.has_aborted(grown)


def test_without_nccl_nothing_is_aborted():
    world = World(Membership())
    torch_group.abort_group(world)
    torch_group._made[world.membership] = torch_group._Made(SimpleNamespace(), None)
    torch_group.abort_group(world)
    assert not torch_group.has_aborted(world)


def test_an_operation_of_the_library_that_was_aborted_fails(monkeypatch):
    transfers = Transfers(0, 1, dist.HashStore(), "127.0.0.1", 60.0)
    transfers._nccl = Nccl()

    class Event:
        def __init__(self, blocking: bool):
            assert blocking

        def synchronize(self) -> None:
            transfers.abort()  # on the thread that has seen the end of a mate
            assert transfers._nccl.over.wait(30)

    stream = SimpleNamespace(wait_event=lambda event: None, record_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    pending: Any = SimpleNamespace(tensors=[tensor], submitted=[None])
    with pytest.raises(RuntimeError, match="a learner has ended"), transfers._in_order(pending):
        pass


@pytest.mark.parametrize("kind", ["tensor", "list", "pair"])
def test_the_result_of_an_operation_on_a_gpu_belongs_to_the_stream_that_waits(kind, monkeypatch):
    """Else its memory is used anew while the script's kernels, which are queued, read it."""
    used: list[object] = []

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: object) -> None:
            used.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "script's")
    tensor = torch.ones(2).as_subclass(OnGpu)
    pending = Pending(SimpleNamespace(), [], single=True)  # type: ignore[arg-type]
    pending.succeed({"tensor": tensor, "list": [tensor], "pair": (tensor, torch.ones(1))}[kind])
    pending.wait()
    assert used == ["script's"]


def test_operations_on_a_gpu_use_one_stream(monkeypatch):
    transfers = Transfers(0, 1, dist.HashStore(), "127.0.0.1", 60.0)
    made: list[Any] = []

    def stream(device: torch.device) -> Any:
        made.append(device)
        return SimpleNamespace(wait_event=lambda event: None, record_event=lambda event: None)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    ended = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: ended)
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    pending: Any = SimpleNamespace(tensors=[tensor], submitted=[None])
    for _ in range(3):
        with transfers._in_order(pending):
            pass
    assert len(made) == 1


@pytest.mark.parametrize("aborted", [False, True])
def test_the_default_group_ends_in_bounded_time(aborted, made, monkeypatch):
    """NCCL's own end waits for a failed learner."""
    world, _ = made
    its = torch_group._made[world.membership]
    its.aborted = aborted
    ended, called = threading.Event(), []
    monkeypatch.setattr(torch_group, "_LONGEST_S", 0.05)
    monkeypatch.setattr(torch_group, "_default", its)
    monkeypatch.setattr(dist, "is_initialized", lambda: not ended.is_set())
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=its.group))

    def destroy() -> None:
        called.append("destroy")
        ended.wait(60)

    def abort() -> None:
        called.append("abort")
        ended.set()

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    torch_group._end_default()
    assert called == (["abort"] if aborted else ["destroy", "abort"])
    assert torch_group._default is None


def test_a_group_that_the_script_has_destroyed_is_made_anew(made, monkeypatch):
    world, _ = made
    group, new = torch_group._made[world.membership].group, object()
    known = [group]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", known)
    for name, value in {
        "address_inside": lambda world: "127.0.0.1",
        "interface_of": lambda address: "",
        "store_of": lambda *how: None,
        "group_of": lambda *how: new,
        "nccl_of": lambda group: None,
    }.items():
        monkeypatch.setattr(torch_group, name, value)
    its: Any = SimpleNamespace(membership=world.membership, inner=None, inner_rank=0, inner_size=1)
    assert torch_group.super_learner_group(its) is group
    known.clear()
    assert torch_group.super_learner_group(its) is new
