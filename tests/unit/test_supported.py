"""What is refused at wrapping, and what looks like it and is not."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_adpsgd.errors import GradientOrderError, ModelMismatchError, UnsupportedOptimizerError
from hvd_adpsgd.training.inner_averaging import refuse_different
from hvd_adpsgd.training.model_average import _restore
from hvd_adpsgd.training.parameters import Parameters
from hvd_adpsgd.training.sharded import require_whole_shards
from hvd_adpsgd.training.supported import (
    averages_gradients,
    require_models,
    require_no_ddp,
    require_supported,
)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def linear(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Linear(4, 4).to(dtype)


def test_plain_optimizers_pass() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = linear(dtype)
        for optimizer in (sgd(model), torch.optim.AdamW(model.parameters())):
            require_supported(optimizer)
            require_models(optimizer, list(model.named_parameters()))
            require_models(optimizer, None)


@pytest.mark.parametrize(
    ("model", "cure"),
    [(torch.nn.LazyLinear(3), "one batch"), (torch.nn.Linear(3, 3, device="meta"), "to_empty")],
)
def test_parameters_without_values_are_refused(model: torch.nn.Module, cure: str) -> None:
    with pytest.raises(ModelMismatchError, match=cure):
        require_supported(sgd(model))


@pytest.mark.usefixtures("process_group")
def test_ddp_averages_gradients_inside_a_super_learner_and_nowhere_else() -> None:
    plain, model = linear(), linear()
    ddp = DistributedDataParallel(model)
    inside, outside = (lambda group: True), (lambda group: False)
    assert not averages_gradients(sgd(ddp), None, inside)
    assert not averages_gradients(sgd(ddp), False, inside)
    with pytest.raises(ModelMismatchError, match="average_gradients=True"):
        averages_gradients(sgd(ddp), True, inside)
    with pytest.raises(ModelMismatchError, match="super_learner_group"):
        averages_gradients(sgd(ddp), None, outside)
    with pytest.raises(ModelMismatchError, match="first"):
        require_no_ddp(set(ddp.parameters()))
    assert averages_gradients(sgd(plain), None, outside)
    assert not averages_gradients(sgd(plain), False, outside)
    require_no_ddp(set(plain.parameters()))


@pytest.mark.usefixtures("process_group")
def test_gradients_that_ddp_has_left_out_are_told_with_its_cure() -> None:
    plain, model = linear(), linear()
    ddp = DistributedDataParallel(model)
    for optimizer, cure in (
        (sgd(ddp), "find_unused_parameters=True"),
        (sgd(plain), "average_grad"),
    ):
        with pytest.raises(GradientOrderError, match=cure):
            refuse_different(optimizer.param_groups, 7, 0)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("original", [True, False])
def test_fsdp_is_refused(original: bool) -> None:
    model = FullyShardedDataParallel(
        linear(), use_orig_params=original, device_id=torch.device("cpu")
    )
    with pytest.raises(ModelMismatchError, match="FullyShardedDataParallel.*Use fully_shard"):
        require_supported(sgd(model))


@pytest.mark.usefixtures("process_group")
def test_a_ddp_model_whose_group_has_ended() -> None:
    """As one that is kept over hvd.shutdown() and hvd.init(); the cure is to drop it."""
    group = torch.distributed.new_group([0])
    model = linear()
    ddp = DistributedDataParallel(model, process_group=group)
    torch.distributed.destroy_process_group(group)
    with pytest.raises(ModelMismatchError, match=r"has ended.* Drop it, and put another one"):
        averages_gradients(sgd(model), None, lambda group: True)
    ddp = DistributedDataParallel(ddp.module)
    assert not averages_gradients(sgd(model), None, lambda group: group is ddp.process_group)


@pytest.mark.usefixtures("process_group")
def test_fully_shard_needs_super_learners_of_one_size() -> None:
    model = linear()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh)
    require_supported(sgd(model))
    named = list(model.named_parameters())
    assert require_whole_shards(named, [1, 1], lambda ranks: list(ranks) == [0])
    assert not require_whole_shards(linear().named_parameters(), [2, 1], lambda ranks: False)
    with pytest.raises(ModelMismatchError, match="have 2, 1 learners"):
        require_whole_shards(named, [2, 1], lambda ranks: True)


def refused(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> str:
    with pytest.raises(UnsupportedOptimizerError, match=r"torch\.autocast") as caught:
        require_models(optimizer, list(model.named_parameters()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp32_from_fp16_groups", [[torch.ones(1)]]),
        ("master_params", [torch.ones(1)]),
        ("master_weights", True),
        ("_amp_stash", SimpleNamespace(fp32_from_fp16_groups=[[torch.ones(1)]])),
    ],
)
def test_optimizers_with_master_copies_are_refused(name: str, value: object) -> None:
    model = linear(torch.bfloat16)
    optimizer = sgd(model)
    setattr(optimizer, name, value)
    assert name in refused(optimizer, model) or name == "_amp_stash"


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp32_from_fp16_groups", [[]]), ("master_weights", False), ("master_params", sgd)],
)
def test_the_name_alone_is_not_refused(name: str, value: object) -> None:
    optimizer = sgd(linear(torch.bfloat16))
    setattr(optimizer, name, value)
    require_models(optimizer, None)


def test_param_groups_of_clones_are_refused() -> None:
    model = linear(torch.float16)
    clones = [p.detach().float().requires_grad_() for p in model.parameters()]
    assert "param_groups" in refused(torch.optim.SGD(clones, lr=0.1), model)


def test_state_of_master_copies_is_refused() -> None:
    model = linear(torch.bfloat16)
    optimizer = sgd(model)
    optimizer.state[model.weight]["master_param"] = torch.ones(4, 4)
    assert "master_param" in refused(optimizer, model)


def add(*tensors: torch.Tensor) -> None:
    Parameters().add([(f"p{i}", torch.nn.Parameter(t)) for i, t in enumerate(tensors)])


def test_memory_shared_through_a_strided_view_is_refused() -> None:
    memory = torch.zeros(6, 6)
    apart = torch.zeros(3)
    for views in [
        (memory, memory.t()),
        (memory[::2], apart, memory[4:]),
        (memory[:, :3], memory[:, 3:], memory[5, 5:]),
        (memory.diagonal(), memory[3]),
    ]:
        with pytest.raises(ModelMismatchError, match="share memory"):
            add(*views)


def test_interleaved_views_are_apart() -> None:
    memory = torch.zeros(6, 6)
    add(memory[:, :3], memory[:, 3:].t(), torch.zeros(0), torch.zeros(()))
    add(memory[::2], memory[1::2, ::2], memory[1::2, 1::2])
    add(memory.view(-1)[:7], memory.view(-1)[7:])


def test_an_expanded_parameter_is_refused() -> None:
    """Its elements are one number, to which a correction would be added five times."""
    one = torch.nn.Parameter(torch.ones(1).expand(5))
    with pytest.raises(ModelMismatchError, match="tensor 'one' is expanded"):
        Parameters().add([("one", one)])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_changed_tensor_is_told_as_what_it_is() -> None:
    """Observers of quantization get their buffers' shapes in the first forward pass."""
    for name, kind, cure in (
        ("buffer.min_val", torch.zeros, "tensor 'buffer.min_val' .*Run one batch"),
        ("weight", lambda n: torch.nn.Parameter(torch.zeros(n)), "parameter 'weight' .*Wrap a new"),
    ):
        known, tensor = Parameters(), kind(0)
        known.add([(name, tensor)])
        tensor.data = torch.zeros(4)
        with pytest.raises(ModelMismatchError, match=cure):
            known.check()


def test_buffers_in_csr_layout_are_put_back_after_a_mean() -> None:
    """They have no strides to ask for."""
    buffer, values = ((n * torch.eye(3)).to_sparse_csr() for n in (1, 7))
    _restore(buffer, buffer.data, values)
    assert torch.equal(buffer.to_dense(), 7 * torch.eye(3))


def test_parameters_on_other_devices_are_refused() -> None:
    """Copies from and to them would not be waited for; tests have no such device."""

    class OnXpu(torch.nn.Parameter):
        device = torch.device("xpu", 0)

    parameter = OnXpu(torch.ones(2))
    with pytest.raises(ModelMismatchError, match=r"parameter 0 .* type xpu, allowed are cpu, cuda"):
        require_supported(torch.optim.SGD([parameter], lr=0.1))
