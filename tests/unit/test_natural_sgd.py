"""NaturalGradientSGD on modules: gradients against preconditioned rows, bounds, hooks, states."""

import copy
import gc
import io
import logging
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from hvd_adpsgd.errors import ConfigError

pytest.importorskip("horovod.torch")
from hvd_adpsgd.optim.natural_gradient import LSTM, OnlineFisher
from hvd_adpsgd.torch import NaturalGradientSGD

F64 = torch.float64


def normal(seed, *shape, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


X, TARGET = normal(0, 20, 6), normal(1, 20, 5)


def net(*widths, dtype=F64):
    torch.manual_seed(3)
    layers = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):  # noqa: RUF007
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def unlimited(model, lr=0.1, **options):
    limits = {"max_change": math.inf, "max_change_per_component": math.inf}
    return NaturalGradientSGD(model, lr, **{**limits, **options})


def natural_net(**options):
    model = net(6, 8, 5)
    return model, unlimited(model, **options)


def backward(model, x, target_seed=1, factor=1.0):
    """Gradients of a mean square of the output."""
    y = model(x)
    (factor * (y - normal(target_seed, *y.shape, dtype=y.dtype)).square().mean()).backward()


def train(model, optimizer, seeds, **how):
    for k in seeds:
        optimizer.zero_grad()
        backward(model, normal(k, 20, 6, dtype=next(model.parameters()).dtype), **how)
        optimizer.step()


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def is_finite(tensors):
    return all(bool(t.isfinite().all()) for t in tensors)


def estimates(optimizer):
    """The saved estimates, as bytes."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict()["natural"], file)
    return file.getvalue()


def preconditioned(sides, x, dy, weight_shape, one=True):
    """The gradient by the law: rows through OnlineFisher, then their product."""
    x = torch.cat([x, x.new_ones(len(x), 1)], 1) if one else x
    g = sides[1].precondition(dy)[0].T @ sides[0].precondition(x)[0]
    if not one:
        return g.view(weight_shape), None
    return g[:, :-1].reshape(weight_shape), g[:, -1]


def sides(inputs, outputs, one=True):
    return (
        OnlineFisher(inputs + one, min(20, (inputs + 1) // 2)),
        OnlineFisher(outputs, min(80, (outputs + 1) // 2)),
    )


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("shape", [(6,), (40,), (3, 2), (300,), (2, 3, 4)])
def test_gradient_of_a_linear_map_is_the_product_of_preconditioned_rows(one, shape):
    """Few rows are preconditioned themselves, of many their product: the same to rounding."""
    torch.manual_seed(0)
    model = nn.Linear(9, 7, bias=one, dtype=F64)
    optimizer, expected = unlimited(model), sides(9, 7, one)
    for k in range(13):
        x, target = normal(k, *shape, 9), normal(100 + k, *shape, 7)
        optimizer.zero_grad()
        y = model(x)
        y.retain_grad()
        (y - target).square().mean().backward()
        w, b = preconditioned(expected, x.view(-1, 9), y.grad.view(-1, 7), (7, 9), one)
        assert_close(grads(model), [w, b] if one else [w])
        before = values(model)
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert_close(p, old - 0.1 * p.grad)


@given(
    st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2),
    st.booleans(),
)  # fmt: skip
def test_a_convolution_is_a_linear_map_of_its_unfolded_input(
    two_dims, kernel, stride, padding, dilation, one
):
    torch.manual_seed(0)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "bias": one, "dtype": F64}
    conv = (nn.Conv2d if two_dims else nn.Conv1d)(2, 5, kernel, **how)
    size, block = ((7, 8), (kernel, kernel)) if two_dims else ((11,), (1, kernel))
    linear = nn.Linear(2 * math.prod(block), 5, bias=one, dtype=F64)
    linear.load_state_dict(
        {k: v.view_as(linear.get_parameter(k)) for k, v in conv.state_dict().items()}
    )
    first = 1 if not two_dims else None  # the dimension that a Conv1d does not have
    unfold = nn.Unfold(
        block,
        (first or dilation, dilation),
        (0 if first else padding, padding),
        (first or stride, stride),
    )
    optimizers = [unlimited(conv), unlimited(linear)]
    for k in range(3):
        x = normal(k, 3, 2, *size).requires_grad_()
        y, z = conv(x), linear(unfold(x if two_dims else x.unsqueeze(2)).transpose(1, 2))
        target = normal(50 + k, *y.shape)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (dx,) = torch.autograd.grad((y - target).square().mean(), x, retain_graph=True)
        (y - target).square().mean().backward()
        (z - target.flatten(2).transpose(1, 2)).square().mean().backward()
        assert_close(x.grad, 2 * dx)
        assert_close([g.flatten(1) if g.ndim > 1 else g for g in grads(conv)], grads(linear))
        for optimizer in optimizers:
            optimizer.step()
        assert_close(conv.weight.flatten(1), linear.weight)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    named = nn.Conv2d(2, 5, 3, padding=padding, dtype=F64)
    number = nn.Conv2d(2, 5, 3, padding=1 if padding == "same" else 0, dtype=F64)
    number.load_state_dict(named.state_dict())
    optimizers = [unlimited(named), unlimited(number)]
    for model in (named, number):
        backward(model, normal(0, 3, 2, 6, 6))
    assert_close(grads(named), grads(number))
    assert all(o.state_dict()["natural"] for o in optimizers)


def test_a_convolution_without_a_batch():
    conv = nn.Conv1d(2, 5, 3, dtype=F64)
    optimizer = unlimited(conv)
    x = normal(0, 1, 2, 9)
    backward(conv, x)
    expected = grads(conv)
    optimizer.zero_grad()
    backward(conv, x[0])
    assert_close(grads(conv), expected)


@given(st.integers(-40, 40))
def test_directions_do_not_depend_on_the_scale_of_the_loss(power):
    factors = (1.0, 2.0**power)
    one, other = pairs = [natural_net(lr=0.0) for _ in factors]
    for k in range(6):
        for pair, factor in zip(pairs, factors, strict=True):
            train(*pair, [k], factor=factor)
        assert_close([g / factors[1] for g in grads(other[0])], grads(one[0]))


@pytest.mark.parametrize("in_one_forward", [False, True])
@pytest.mark.parametrize("cuts", [[10, 10], [3, 16, 1], [20]])
def test_passes_or_uses_that_add_up_are_one_minibatch(cuts, in_one_forward):
    """Gradient, parameters and estimates, to rounding; once the estimates have begun."""
    found = []
    for parts in ([20], cuts):
        model, optimizer = natural_net(update_period=1)
        train(model, optimizer, range(200, 212))
        optimizer.zero_grad()
        if in_one_forward:
            y = torch.cat([model(part) for part in X.split(parts)])
            ((y - TARGET).square().sum() / 100).backward()
        else:
            for a, b in zip(X.split(parts), TARGET.split(parts), strict=True):
                ((model(a) - b).square().sum() / 100).backward()
        optimizer.step()
        natural = optimizer.state_dict()["natural"]["0"]
        assert natural["in"]["updates"] == 13
        d, strengths = natural["out"]["directions"], natural["out"]["strengths"]
        found.append([*grads(model), *values(model), d.T * strengths @ d])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_computed_again_in_the_backward(reentrant):
    found = []
    for again in (False, True):
        model, optimizer = natural_net()
        for k in range(4):
            optimizer.zero_grad()
            x = normal(k, 20, 6).requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
            y.square().mean().backward()
            optimizer.step()
        found.append(values(model))
    assert_close(found[0], found[1])


def test_a_pass_that_never_reaches_the_weights_counts_for_nothing():
    (model, optimizer), (other, second) = natural_net(), natural_net()
    for k in range(4):
        x = normal(30 + k, 20, 6).requires_grad_()
        torch.autograd.grad(model(x).square().mean(), x)
        train(model, optimizer, [k])
        if k == 0:  # the first pass of all begins the estimates, whatever becomes of it
            second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            other.load_state_dict(model.state_dict())
        else:
            train(other, second, [k])
    assert_close(values(model), values(other))


def test_a_weight_in_the_loss_is_added_as_it_is():
    (one, _first), (two, _second) = natural_net(), natural_net()
    backward(one, X)
    ((two(X) - TARGET).square().mean() + 0.3 * two[0].weight.square().sum()).backward()
    assert_close(two[0].weight.grad, one[0].weight.grad + 0.6 * two[0].weight)
    assert_close(two[2].weight.grad, one[2].weight.grad)


def test_zeroed_gradients_in_place_are_like_none():
    found = []
    for to_none in (True, False):
        model, optimizer = natural_net(momentum=0.9)
        for k in range(6):
            optimizer.zero_grad(set_to_none=to_none)
            backward(model, normal(k, 20, 6))
            if k != 3:  # a step that is left out
                optimizer.step()
        found.append((values(model), estimates(optimizer)))
    assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert found[0][1] == found[1][1]


def test_second_derivatives_are_refused():
    model, _optimizer = natural_net()
    x = normal(0, 4, 6).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


def test_a_minibatch_that_is_not_finite_shows_in_gradients_and_not_in_estimates():
    model, optimizer = natural_net()
    train(model, optimizer, range(3))
    before, x = estimates(optimizer), X.clone()
    optimizer.zero_grad()
    x[2, 3] = math.nan
    backward(model, x)
    assert all(bool(g.isnan().any()) for g in grads(model))
    optimizer.step()
    assert estimates(optimizer) == before


def test_a_minibatch_of_zeros():
    model, optimizer = natural_net()
    backward(model, torch.zeros_like(X))
    optimizer.step()
    assert is_finite(model.parameters())
    optimizer.zero_grad()
    (0 * model(X).sum()).backward()
    optimizer.step()
    assert all(bool((g == 0).all()) for g in grads(model))
    train(model, optimizer, range(3))
    assert is_finite(model.parameters())


def test_a_first_pass_of_zeros_then_one_that_is_not():
    model, optimizer = natural_net()
    for x in (torch.zeros_like(X), X):
        (model(x) * x.abs().sum()).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()["natural"]
    assert [saved[name][side]["updates"] for name in "02" for side in ("in", "out")] == [1] * 4


def test_rows_that_almost_vanish_keep_their_norm_in_float32():
    """One direction, which the estimate knows: what is left of it must not have failed to rounding."""
    model = nn.Linear(30, 4, bias=False)
    optimizer = unlimited(model, alpha=0.0)
    x = normal(0, 2000, 1, dtype=torch.float32) * normal(1, 1, 30, dtype=torch.float32)
    for _ in range(12):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        assert is_finite(grads(model))
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    found = []
    for on in (False, True):
        model = net(6, 8, 5, dtype=torch.float32)
        optimizer = unlimited(model)
        for k in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=on):
                y = model(normal(k, 64, 6, dtype=torch.float32))
            assert y.dtype == (dtype if on else torch.float32)
            (y.float() - normal(9, 64, 5, dtype=torch.float32)).square().mean().backward()
            optimizer.step()
        assert all(g.dtype == torch.float32 for g in grads(model))
        found.append(torch.cat([g.flatten() for g in grads(model)]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.05


def test_weights_of_16_bits():
    model = net(6, 8, 5, dtype=torch.bfloat16)
    train(model, NaturalGradientSGD(model, 0.1), range(3))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert is_finite(model.parameters())


@pytest.mark.parametrize("told", [True, False])
def test_a_grad_scaler(told):
    """Told of the scaler, the estimates are those without scaling; a step it skips leaves them."""
    plain, scaled = net(6, 8, 5, dtype=torch.float32), net(6, 8, 5, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    one, two = unlimited(plain), unlimited(scaled, scaler=scaler if told else None)
    for k in range(8):
        x = normal(k, 20, 6, dtype=torch.float32)
        for model, optimizer in ((plain, one), (scaled, two)):
            optimizer.zero_grad()
            loss = (model(x) - 0.3).square().mean()
            (loss if model is plain else scaler.scale(loss)).backward()
        one.step()
        scaler.step(two)
        scaler.update()
    if told:
        assert_close(values(plain), values(scaled), rtol=1e-3, atol=1e-6)
    assert is_finite([scaled[0].weight])
    before, size, parameters = estimates(two), scaler.get_scale(), values(scaled)
    two.zero_grad()
    scaler.scale(scaled(torch.full((4, 6), math.inf)).sum()).backward()
    scaler.step(two)
    scaler.update()
    assert scaler.get_scale() == size / 2 and estimates(two) == before
    assert_close(values(scaled), parameters, rtol=0, atol=0)


@given(st.floats(0, 1e4), st.floats(0.01, 3), st.floats(0.01, 3), st.sampled_from([0.0, 0.9]))
def test_no_step_is_longer_than_max_change(lr, overall, each, momentum):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)).to(F64)
    limits = {"max_change": overall, "max_change_per_component": each}
    optimizer = NaturalGradientSGD(model, lr, momentum, **limits, weight_decay=1e-3)
    for k in range(4):
        before = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in model]
        train(model, optimizer, [k])
        moved = [
            float((nn.utils.parameters_to_vector(m.parameters()).detach() - old).norm())
            for m, old in zip(model, before, strict=True)
        ]
        assert max(moved) <= each * (1 + 1e-9)
        assert math.hypot(*moved) <= overall * (1 + 1e-9)


def test_limits_scale_the_step_and_do_not_turn_it():
    moves = []
    for limit in (math.inf, 1e-3):
        model, optimizer = natural_net(lr=10.0, max_change=limit)
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        train(model, optimizer, [0])
        moves.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
    assert float(moves[0].norm()) > 0.1
    assert float(moves[1].norm()) == pytest.approx(1e-3)
    assert_close(moves[1] / moves[1].norm(), moves[0] / moves[0].norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_what_is_not_preconditioned_is_torch_sgd(momentum, weight_decay):
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 6, sparse=not momentum and not weight_decay)
    one = nn.Sequential(embedding, nn.GRU(6, 5, batch_first=True)).to(F64)
    two = copy.deepcopy(one)
    first = unlimited(one, 0.2, momentum=momentum, weight_decay=weight_decay)
    second = torch.optim.SGD(two.parameters(), 0.2, momentum=momentum, weight_decay=weight_decay)
    for k in range(4):
        x = torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(k))
        for model, optimizer in ((one, first), (two, second)):
            optimizer.zero_grad()
            model(x)[0].square().sum().backward()
            optimizer.step()
        assert_close(values(one), values(two))


def test_momentum_and_weight_decay_are_those_of_sgd_on_the_natural_gradient():
    model, optimizer = natural_net(momentum=0.9, weight_decay=0.01)
    same = [p.requires_grad_() for p in values(model)]
    other = torch.optim.SGD(same, 0.1, momentum=0.9, weight_decay=0.01)
    for k in range(5):
        train(model, optimizer, [k])
        for p, grad in zip(same, grads(model), strict=True):
            p.grad = grad
        other.step()
        assert_close(values(model), [p.detach() for p in same])


def test_a_closure():
    (model, optimizer), other = natural_net(), natural_net()
    for k in range(3):

        def closure(k=k):
            optimizer.zero_grad()
            loss = (model(normal(k, 20, 6)) - TARGET).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    train(*other, range(3))
    assert_close(values(model), values(other[0]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding((x > 0).long().sum(-1)).tanh())


class Attention(nn.MultiheadAttention):
    """Uses its output map without calling it."""

    def forward(self, x):
        return super().forward(x, x, x)


FALLS_BACK = [
    (lambda: nn.LSTM(6, 5), (4, 3, 6), "1 LSTM. hvd_adpsgd.optim.natural_gradient.LSTM in place of"),
    (lambda: nn.GRU(6, 5), (4, 3, 6), "1 GRU"),
    (lambda: nn.Conv1d(6, 4, 3, groups=2), (3, 6, 5), "1 Conv1d"),
    (lambda: nn.Conv1d(6, 4, 2, padding="same"), (3, 6, 5), "1 Conv1d"),
    (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (3, 2, 5, 5), "1 Conv2d"),
    (lambda: nn.Conv3d(2, 4, 2), (3, 2, 5, 5, 5), "1 Conv3d"),
    (lambda: nn.LayerNorm(6), (3, 6), "1 LayerNorm"),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), (3, 6),
     "1 ParametrizationList, 1 ParametrizedLinear"),
    (Tied, (3, 6), "1 Embedding, 1 Linear"),
    (lambda: Attention(6, 2), (4, 3, 6), "1 Attention"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "names"), FALLS_BACK)
def test_everything_else_has_plain_gradients_and_is_named_once(make, shape, names, caplog):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "hvd_adpsgd"):
        optimizer = NaturalGradientSGD(model, 0.1)
    assert len(caplog.records) == 1
    assert names in caplog.text
    for m in (model, plain):
        y = m(normal(0, *shape, dtype=torch.float32))
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    assert_close(grads(model), grads(plain))
    assert optimizer.state_dict()["natural"] == {}


def test_nothing_falls_back_nothing_is_said(caplog):
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 3, 2), LSTM(4, 4))
    optimizer = NaturalGradientSGD(model, 0.1)
    assert caplog.text == ""
    assert set(optimizer.state_dict()["natural"]) == {"0", "1", "2.ih_l0", "2.hh_l0"}


def moved(model, optimizer):
    """Names of parameters that training changes."""
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3))
    return {name for name, p in model.state_dict().items() if not torch.equal(p, before[name])}


def test_frozen_parameters():
    model = net(6, 8, 5)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = unlimited(model)
    assert moved(model, optimizer) == {"0.bias", "2.weight"}
    assert set(optimizer.state_dict()["natural"]) == {"2"}


def test_groups_and_a_part_of_the_model():
    model = net(6, 8, 5, 4)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = NaturalGradientSGD(model, 0.1, params=groups)
    assert set(optimizer.state_dict()["natural"]) == {"0", "2"}
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.2})
    assert set(optimizer.state_dict()["natural"]) == {"0", "2", "4"}
    assert moved(model, optimizer) == {"2.weight", "2.bias", "4.weight", "4.bias"}


def hooks_of(model):
    on_modules = sum(len(m._forward_hooks) for m in model.modules())
    return on_modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def is_plain(model):
    """Whether its gradients are those of a network that no optimizer has seen."""
    plain = net(6, 8, 5)
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        m.zero_grad()
        backward(m, X)
    return all(map(torch.equal, grads(model), grads(plain)))


def remove(optimizer):
    optimizer.remove_hooks()


def drop(optimizer):
    del optimizer
    gc.collect()


@pytest.mark.parametrize("end", [remove, drop])
def test_hooks_are_removed(end):
    model = net(6, 8, 5)
    owners = [unlimited(model)]
    assert hooks_of(model) == 2 + 4 and not is_plain(model)
    end(owners.pop())
    assert hooks_of(model) == 0 and is_plain(model)


def test_hooks_removed_between_forward_and_backward():
    model, optimizer = natural_net()
    loss = (model(X) - TARGET).square().mean()
    optimizer.remove_hooks()
    loss.backward()
    found = grads(model)
    model.zero_grad()
    backward(model, X)
    assert_close(found, grads(model))


def test_a_new_optimizer_takes_the_weights_over():
    (model, _old), (fresh, _expected) = natural_net(), natural_net(alpha=1.0)
    _new = unlimited(model, alpha=1.0)
    assert hooks_of(model) == 2 + 4
    for m in (model, fresh):
        backward(m, X)
    assert_close(grads(model), grads(fresh), rtol=0, atol=0)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_is_plain(how):
    model, _optimizer = natural_net()
    backward(model, X)
    assert not is_plain(model) and is_plain(how(model))


def test_nothing_is_collected_without_a_gradient():
    model, optimizer = natural_net()
    train(model, optimizer, range(2))
    before = estimates(optimizer)
    with torch.no_grad():
        model(X)
    model(X)
    optimizer.step()
    assert estimates(optimizer) == before


def test_relu_in_place_after_a_map():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5)).to(F64)
    optimizer, found = unlimited(model), []
    for m in (model, nn.Sequential(model[0], nn.ReLU(), model[2])):
        optimizer.zero_grad()
        backward(m, X)
        found.append(grads(model))
    assert_close(found[0], found[1])


class Resumed(nn.Sequential):
    def forward(self, x):
        linear, norm, lstm = self
        return lstm(norm(linear(x)).unsqueeze(0))[0][0]


def test_a_resumed_run_gives_the_same_bits():
    def make():
        torch.manual_seed(0)
        model = Resumed(nn.Linear(6, 8), nn.BatchNorm1d(8), LSTM(8, 5))
        return model, NaturalGradientSGD(model, 0.05, 0.9)

    (model, optimizer), (resumed, other) = make(), make()
    train(model, optimizer, range(13))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(13, 25))
    file.seek(0)
    for part, state in zip((resumed, other), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(resumed, other, range(13, 25))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    assert estimates(optimizer) == estimates(other)


def test_states_of_other_models_are_refused():
    small = net(6, 8)
    one = unlimited(small)
    train(small, one, [0])
    for state, options, message in (
        (natural_net()[1].state_dict(), {}, r"\['0', '2'\] in the state, of \['0'\] here"),
        (torch.optim.SGD(small.parameters(), 0.1).state_dict(), {}, r"\[\] in the state"),
        (one.state_dict(), {"rank_in": 2}, "saved directions"),
    ):
        with pytest.raises(ConfigError, match=message):
            unlimited(net(6, 8), **options).load_state_dict(state)


OUT_OF_RANGE = {
    "lr": -1.0, "momentum": 1.0, "weight_decay": -0.1, "alpha": -1.0, "history": 0, "update_period": 0,
    "rank_in": 0, "rank_out": 0, "max_change": 0.0, "max_change_per_component": -1.0,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE.items())
def test_options_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        NaturalGradientSGD(net(6, 8), **{"lr": 0.1, name: value})


@pytest.mark.parametrize("how", [iter, lambda params: [{"params": list(params)}]])
def test_parameters_in_place_of_a_model(how):
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module"):
        NaturalGradientSGD(how(net(6, 8).parameters()), 0.1)
