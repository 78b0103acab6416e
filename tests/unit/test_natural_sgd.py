"""NaturalGradientSGD on modules: gradients against preconditioned rows, bounds, hooks, states."""

from __future__ import annotations

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
from torch.utils.checkpoint import checkpoint

from hvd_adpsgd.errors import ConfigError

pytest.importorskip("horovod.torch")
from hvd_adpsgd.optim.natural_gradient import LSTM, OnlineFisher
from hvd_adpsgd.torch import NaturalGradientSGD

F64 = torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape, dtype=F64):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def net(*widths, dtype=F64):
    torch.manual_seed(3)
    layers = [
        part
        for a, b in zip(widths, widths[1:], strict=False)  # noqa: RUF007
        for part in (nn.Linear(a, b), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1]).to(dtype)


def unlimited(model, lr=0.1, **options):
    limits = {"max_change": math.inf, "max_change_per_component": math.inf}
    return NaturalGradientSGD(model, lr, **{**limits, **options})


def backward(model, x, target_seed=1):
    """Gradients of a mean square of the output."""
    y = model(x)
    (y - normal(target_seed, *y.shape, dtype=y.dtype)).square().mean().backward()


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


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


# ---- the gradient


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
        torch.testing.assert_close(model.weight.grad, w)
        if one:
            torch.testing.assert_close(model.bias.grad, b)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - 0.1 * p.grad)


@given(
    st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2),
    st.booleans(),
)  # fmt: skip
def test_a_convolution_is_a_linear_map_of_its_unfolded_input(
    two_dims, kernel, stride, padding, dilation, one
):
    torch.manual_seed(0)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "bias": one}
    if two_dims:
        conv, size, block = nn.Conv2d(2, 5, kernel, **how, dtype=F64), (7, 8), (kernel, kernel)
        around = padding
    else:
        conv, size, block = nn.Conv1d(2, 5, kernel, **how, dtype=F64), (11,), (1, kernel)
        around = (0, padding)
    rows = 2 * math.prod(block)
    linear = nn.Linear(rows, 5, bias=one, dtype=F64)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
        if one:
            linear.bias.copy_(conv.bias)
    step = stride if two_dims else (1, stride)
    unfold = nn.Unfold(block, dilation if two_dims else (1, dilation), around, step)
    first, second = unlimited(conv), unlimited(linear)
    for k in range(3):
        x = normal(k, 3, 2, *size).requires_grad_()
        flat = x if two_dims else x.unsqueeze(2)
        y, z = conv(x), linear(unfold(flat).transpose(1, 2))
        target = normal(50 + k, *y.shape)
        first.zero_grad()
        second.zero_grad()
        (dx,) = torch.autograd.grad((y - target).square().mean(), x, retain_graph=True)
        (y - target).square().mean().backward()
        (z - target.flatten(2).transpose(1, 2)).square().mean().backward()
        torch.testing.assert_close(x.grad, 2 * dx)
        torch.testing.assert_close(conv.weight.grad.flatten(1), linear.weight.grad)
        if one:
            torch.testing.assert_close(conv.bias.grad, linear.bias.grad)
        first.step()
        second.step()
        torch.testing.assert_close(conv.weight.flatten(1), linear.weight)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    torch.manual_seed(0)
    named = nn.Conv2d(2, 5, 3, padding=padding, dtype=F64)
    number = nn.Conv2d(2, 5, 3, padding=1 if padding == "same" else 0, dtype=F64)
    number.load_state_dict(named.state_dict())
    optimizers = [unlimited(named), unlimited(number)]
    for model in (named, number):
        backward(model, normal(0, 3, 2, 6, 6))
    torch.testing.assert_close(grads(named), grads(number))
    assert all(o.state_dict()["natural"] for o in optimizers)


def test_a_convolution_without_a_batch():
    conv = nn.Conv1d(2, 5, 3, dtype=F64)
    optimizer = unlimited(conv)
    backward(conv, normal(0, 1, 2, 9))
    expected = grads(conv)
    optimizer.zero_grad()
    y = conv(normal(0, 1, 2, 9)[0])
    (y - normal(1, 1, *y.shape)[0]).square().mean().backward()
    torch.testing.assert_close(grads(conv), expected)


def test_derivatives_by_inputs_are_plain():
    model, plain = net(6, 8, 5), net(6, 8, 5)
    optimizer = unlimited(model)
    for k in range(3):
        x, z = normal(k, 20, 6).requires_grad_(), normal(k, 20, 6).requires_grad_()
        optimizer.zero_grad()
        backward(model, x)
        backward(plain, z)
        torch.testing.assert_close(x.grad, z.grad)
    assert not torch.allclose(model[0].weight.grad, plain[0].weight.grad)


@given(st.integers(-40, 40))
def test_directions_do_not_depend_on_the_scale_of_the_loss(power):
    models = [net(6, 8, 5), net(6, 8, 5)]
    optimizers = [unlimited(model, lr=0.0) for model in models]
    for k in range(12):
        for model, optimizer, factor in zip(models, optimizers, (1.0, 2.0**power), strict=True):
            optimizer.zero_grad()
            y = model(normal(k, 20, 6))
            (factor * (y - normal(50 + k, 20, 5)).square().mean()).backward()
            optimizer.step()
        for a, b in zip(grads(models[0]), grads(models[1]), strict=True):
            torch.testing.assert_close(b / 2.0**power, a)


# ---- several passes, several uses


def warmed(model, optimizer, minibatches=12):
    """The estimates have begun (with the first pass they see) and moved."""
    for k in range(minibatches):
        optimizer.zero_grad()
        backward(model, normal(200 + k, 20, 6))
        optimizer.step()


@pytest.mark.parametrize("cuts", [[10, 10], [3, 16, 1], [20]])
def test_passes_that_add_up_are_one_minibatch(cuts):
    """Gradient, parameters and estimates, to rounding; once the estimates have begun."""
    x, target = normal(0, 20, 6), normal(1, 20, 5)
    found = []
    for parts in ([20], cuts):
        model = net(6, 8, 5)
        optimizer = unlimited(model, update_period=1)
        warmed(model, optimizer)
        optimizer.zero_grad()
        for a, b in zip(x.split(parts), target.split(parts), strict=True):
            ((model(a) - b).square().sum() / 100).backward()
        found.append(grads(model))
        optimizer.step()
        assert optimizer.state_dict()["natural"]["0"]["in"]["updates"] == 13
        side = optimizer.state_dict()["natural"]["0"]["out"]
        found[-1] += [
            *model.parameters(),
            side["directions"].T * side["strengths"] @ side["directions"],
        ]
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole)


def test_uses_in_one_forward_are_one_minibatch():
    x, target = normal(0, 20, 6), normal(1, 20, 5)
    found = []
    for parts in ([20], [7, 13]):
        model = net(6, 8, 5)
        optimizer = unlimited(model, update_period=1)
        warmed(model, optimizer)
        optimizer.zero_grad()
        y = torch.cat([model(part) for part in x.split(parts)])
        ((y - target).square().sum() / 100).backward()
        optimizer.step()
        found.append([*grads(model), *model.parameters()])
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_computed_again_in_the_backward(reentrant):
    found = []
    for again in (False, True):
        model = net(6, 8, 5)
        optimizer = unlimited(model)
        for k in range(4):
            optimizer.zero_grad()
            x = normal(k, 20, 6).requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
            y.square().mean().backward()
            optimizer.step()
        found.append(list(model.parameters()))
    torch.testing.assert_close(found[0], found[1])


def test_a_pass_that_never_reaches_the_weights_counts_for_nothing():
    models = [net(6, 8, 5), net(6, 8, 5)]
    optimizers = [unlimited(model) for model in models]
    for k in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if model is models[0]:
                x = normal(30 + k, 20, 6).requires_grad_()
                torch.autograd.grad(model(x).square().mean(), x)
            backward(model, normal(k, 20, 6))
            optimizer.step()
        if k == 0:  # the first pass of all begins the estimates, whatever becomes of it
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            models[1].load_state_dict(models[0].state_dict())
    torch.testing.assert_close(list(models[0].parameters()), list(models[1].parameters()))


def test_a_weight_in_the_loss_is_added_as_it_is():
    one, two = net(6, 8, 5), net(6, 8, 5)
    keep = unlimited(one), unlimited(two)
    x = normal(0, 20, 6)
    backward(one, x)
    (two(x) - normal(1, 20, 5)).square().mean().add(0.3 * two[0].weight.square().sum()).backward()
    torch.testing.assert_close(two[0].weight.grad, one[0].weight.grad + 0.6 * two[0].weight)
    torch.testing.assert_close(two[2].weight.grad, one[2].weight.grad)
    assert len(keep) == 2


def test_zeroed_gradients_in_place_are_like_none():
    found = []
    for to_none in (True, False):
        model = net(6, 8, 5)
        optimizer = unlimited(model, momentum=0.9)
        for k in range(6):
            optimizer.zero_grad(set_to_none=to_none)
            backward(model, normal(k, 20, 6))
            if k != 3:  # a step that is left out
                optimizer.step()
        found.append([*model.parameters(), estimates(optimizer)])
    torch.testing.assert_close(found[0][:-1], found[1][:-1], rtol=0, atol=0)
    assert found[0][-1] == found[1][-1]


def test_second_derivatives_are_refused():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    x = normal(0, 4, 6).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()
    optimizer.remove_hooks()


# ---- not finite, mixed precision


def test_a_minibatch_that_is_not_finite_shows_in_gradients_and_not_in_estimates():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    warmed(model, optimizer, 3)
    before = estimates(optimizer)
    optimizer.zero_grad()
    x = normal(0, 20, 6)
    x[2, 3] = math.nan
    backward(model, x)
    assert all(bool(g.isnan().any()) for g in grads(model))
    optimizer.step()
    assert estimates(optimizer) == before


def test_a_minibatch_of_zeros():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    backward(model, torch.zeros(20, 6, dtype=F64))
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    optimizer.zero_grad()
    (0 * model(normal(0, 20, 6)).sum()).backward()
    optimizer.step()
    assert all(bool((g == 0).all()) for g in grads(model))
    warmed(model, optimizer, 3)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_first_pass_of_zeros_then_one_that_is_not():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    for x in (torch.zeros(20, 6, dtype=F64), normal(0, 20, 6)):
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
        assert bool(model.weight.grad.isfinite().all())
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
    optimizer = NaturalGradientSGD(model, 0.1)
    for k in range(3):
        optimizer.zero_grad()
        model(normal(k, 20, 6, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 and bool(p.isfinite().all()) for p in model.parameters())


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
    close = [
        torch.allclose(a, b, rtol=1e-3, atol=1e-6)
        for a, b in zip(plain.parameters(), scaled.parameters(), strict=True)
    ]
    assert all(close) if told else bool(torch.isfinite(scaled[0].weight).all())
    before, size = estimates(two), scaler.get_scale()
    parameters = [p.detach().clone() for p in scaled.parameters()]
    two.zero_grad()
    scaler.scale(scaled(torch.full((4, 6), math.inf)).sum()).backward()
    scaler.step(two)
    scaler.update()
    assert scaler.get_scale() == size / 2 and estimates(two) == before
    torch.testing.assert_close(list(scaled.parameters()), parameters, rtol=0, atol=0)


# ---- the step


@given(st.floats(0, 1e4), st.floats(0.01, 3), st.floats(0.01, 3), st.sampled_from([0.0, 0.9]))
def test_no_step_is_longer_than_max_change(lr, overall, each, momentum):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)).to(F64)
    optimizer = NaturalGradientSGD(
        model, lr, momentum, max_change=overall, max_change_per_component=each, weight_decay=1e-3
    )
    for k in range(4):
        before = [[p.detach().clone() for p in m.parameters()] for m in model]
        optimizer.zero_grad()
        backward(model, normal(k, 20, 6))
        optimizer.step()
        moved = [
            math.sqrt(
                sum(
                    float((p - q).detach().square().sum())
                    for p, q in zip(m.parameters(), old, strict=True)
                )
            )
            for m, old in zip(model, before, strict=True)
        ]
        assert max(moved) <= each * (1 + 1e-9)
        assert math.hypot(*moved) <= overall * (1 + 1e-9)


def test_limits_scale_the_step_and_do_not_turn_it():
    moves = []
    for limit in (math.inf, 1e-3):
        model = net(6, 8, 5)
        optimizer = NaturalGradientSGD(
            model, 10.0, max_change=limit, max_change_per_component=math.inf
        )
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        backward(model, normal(0, 20, 6))
        optimizer.step()
        moves.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    assert float(moves[0].norm()) > 0.1
    assert float(moves[1].norm()) == pytest.approx(1e-3)
    torch.testing.assert_close(moves[1] / moves[1].norm(), moves[0] / moves[0].norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_what_is_not_preconditioned_is_torch_sgd(momentum, weight_decay):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 6, sparse=not momentum and not weight_decay),
                             nn.GRU(6, 5, batch_first=True)).to(F64)  # fmt: skip

    one, two = make(), make()
    first = unlimited(one, 0.2, momentum=momentum, weight_decay=weight_decay)
    second = torch.optim.SGD(two.parameters(), 0.2, momentum=momentum, weight_decay=weight_decay)
    for k in range(4):
        x = torch.randint(9, (4, 3), generator=seeded(k))
        for model, optimizer in ((one, first), (two, second)):
            optimizer.zero_grad()
            model(x)[0].square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(list(one.parameters()), list(two.parameters()))


def test_momentum_and_weight_decay_are_those_of_sgd_on_the_natural_gradient():
    model = net(6, 8, 5)
    optimizer = unlimited(model, 0.1, momentum=0.9, weight_decay=0.01)
    mine = [p.detach().clone().requires_grad_() for p in model.parameters()]
    other = torch.optim.SGD(mine, 0.1, momentum=0.9, weight_decay=0.01)
    for k in range(5):
        optimizer.zero_grad()
        backward(model, normal(k, 20, 6))
        for p, q in zip(mine, model.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        other.step()
        torch.testing.assert_close(list(model.parameters()), mine)


def test_a_closure():
    models = [net(6, 8, 5), net(6, 8, 5)]
    one, two = (unlimited(model) for model in models)
    for k in range(3):

        def closure(k=k):
            one.zero_grad()
            loss = (models[0](normal(k, 20, 6)) - normal(1, 20, 5)).square().mean()
            loss.backward()
            return loss

        assert one.step(closure).item() > 0
        two.zero_grad()
        backward(models[1], normal(k, 20, 6))
        two.step()
    torch.testing.assert_close(list(models[0].parameters()), list(models[1].parameters()))


# ---- which modules


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x).tanh())


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
]  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "said"), FALLS_BACK)
def test_everything_else_has_plain_gradients_and_is_named_once(make, shape, said, caplog):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "hvd_adpsgd"):
        optimizer = NaturalGradientSGD(model, 0.1)
    assert len(caplog.records) == 1
    assert said in caplog.text
    for m in (model, plain):
        y = m(normal(0, *shape, dtype=torch.float32))
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    torch.testing.assert_close(grads(model), grads(plain))
    assert optimizer.state_dict()["natural"] == {}


def test_nothing_falls_back_nothing_is_said(caplog):
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 3, 2), LSTM(4, 4))
    optimizer = NaturalGradientSGD(model, 0.1)
    assert caplog.text == ""
    assert set(optimizer.state_dict()["natural"]) == {"0", "1", "2.ih_l0", "2.hh_l0"}


def test_a_shared_weight_is_plain(caplog):
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    optimizer = NaturalGradientSGD(model, 0.1)
    for m in (model, plain):
        m(torch.arange(5)).square().sum().backward()
    torch.testing.assert_close(grads(model), grads(plain))
    assert "1 Embedding, 1 Linear" in caplog.text and optimizer.state_dict()["natural"] == {}


def test_attention_uses_its_output_map_without_calling_it(caplog):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(6, 2)
    plain = copy.deepcopy(model)
    optimizer = NaturalGradientSGD(model, 0.1)
    for m in (model, plain):
        x = normal(0, 4, 3, 6, dtype=torch.float32)
        m(x, x, x)[0].square().sum().backward()
    torch.testing.assert_close(grads(model), grads(plain))
    assert "1 MultiheadAttention" in caplog.text and optimizer.state_dict()["natural"] == {}


def test_frozen_parameters():
    model = net(6, 8, 5)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = unlimited(model)
    for k in range(3):
        optimizer.zero_grad()
        backward(model, normal(k, 20, 6))
        optimizer.step()
    same = {key: torch.equal(value, before[key]) for key, value in model.state_dict().items()}
    assert same == {"0.weight": True, "0.bias": False, "2.weight": False, "2.bias": True}
    assert set(optimizer.state_dict()["natural"]) == {"2"}


def test_groups_and_a_part_of_the_model():
    model = net(6, 8, 5, 4)
    optimizer = NaturalGradientSGD(
        model,
        0.1,
        params=[{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}],
    )
    before = copy.deepcopy(model.state_dict())
    assert set(optimizer.state_dict()["natural"]) == {"0", "2"}
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.2})
    assert set(optimizer.state_dict()["natural"]) == {"0", "2", "4"}
    backward(model, normal(0, 20, 6))
    optimizer.step()
    moved = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert moved == {"2.weight", "2.bias", "4.weight", "4.bias"}


# ---- hooks


def hooks_of(model):
    return sum(
        len(m._forward_hooks) for m in model.modules()
    ) + sum(len(p._backward_hooks or ()) for p in model.parameters())  # fmt: skip


def is_plain(model, x):
    """Whether its gradients are those of a network that no optimizer has seen."""
    plain = net(6, 8, 5)
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        m.zero_grad()
        backward(m, x)
    return all(torch.equal(a, b) for a, b in zip(grads(model), grads(plain), strict=True))


def test_hooks_are_removed():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    assert hooks_of(model) == 2 + 4 and not is_plain(model, normal(0, 20, 6))
    optimizer.remove_hooks()
    assert hooks_of(model) == 0 and is_plain(model, normal(0, 20, 6))


def test_hooks_removed_between_forward_and_backward():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    loss = (model(normal(0, 20, 6)) - normal(1, 20, 5)).square().mean()
    optimizer.remove_hooks()
    loss.backward()
    found = grads(model)
    model.zero_grad()
    backward(model, normal(0, 20, 6))
    torch.testing.assert_close(found, grads(model))


def test_an_optimizer_that_is_gone_leaves_no_hooks():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    assert hooks_of(model) > 0
    del optimizer
    gc.collect()
    assert hooks_of(model) == 0


def test_a_new_optimizer_takes_the_weights_over():
    model, fresh = net(6, 8, 5), net(6, 8, 5)
    old, new, expected = unlimited(model), unlimited(model, alpha=1.0), unlimited(fresh, alpha=1.0)
    assert hooks_of(model) == 2 + 4
    for m in (model, fresh):
        backward(m, normal(0, 20, 6))
    torch.testing.assert_close(grads(model), grads(fresh), rtol=0, atol=0)
    del old, new, expected


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_is_plain(how):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).to(F64)
    optimizer = unlimited(model)
    backward(model, normal(0, 20, 6))
    natural, copied = grads(model), how(model)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).to(F64)
    plain.load_state_dict(model.state_dict())
    for m in (copied, plain):
        m.zero_grad()
        backward(m, normal(0, 20, 6))
    torch.testing.assert_close(grads(copied), grads(plain), rtol=0, atol=0)
    assert not torch.allclose(natural[0], grads(plain)[0])
    optimizer.remove_hooks()


def test_nothing_is_collected_without_a_gradient():
    model = net(6, 8, 5)
    optimizer = unlimited(model)
    warmed(model, optimizer, 2)
    before = estimates(optimizer)
    with torch.no_grad():
        model(normal(0, 20, 6))
    model(normal(0, 20, 6))
    optimizer.step()
    assert estimates(optimizer) == before


def test_relu_in_place_after_a_map():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5)).to(F64)
    other = nn.Sequential(model[0], nn.ReLU(), model[2])
    optimizer = unlimited(model)
    backward(model, normal(0, 20, 6))
    first = grads(model)
    optimizer.zero_grad()
    backward(other, normal(0, 20, 6))
    torch.testing.assert_close(first, grads(model))


# ---- states


def test_a_resumed_run_gives_the_same_bits():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), LSTM(8, 5))
        return model, NaturalGradientSGD(model, 0.05, 0.9)

    def forward(model, x):
        return model[2](model[1](model[0](x)).unsqueeze(0))[0]

    def train(model, optimizer, steps):
        for k in steps:
            optimizer.zero_grad()
            forward(model, normal(k, 20, 6, dtype=torch.float32)).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(13))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(13, 25))
    file.seek(0)
    resumed, other = make()
    first, second = torch.load(file, weights_only=True)
    resumed.load_state_dict(first)
    other.load_state_dict(second)
    train(resumed, other, range(13, 25))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert estimates(optimizer) == estimates(other)


def test_states_of_other_models_are_refused():
    state = unlimited(net(6, 8, 5)).state_dict()
    with pytest.raises(
        ConfigError, match=r"estimates of \['0', '2'\] in the state, of \['0'\] here"
    ):
        unlimited(net(6, 8)).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"estimates of \[\] in the state"):
        unlimited(net(6, 8)).load_state_dict(
            torch.optim.SGD(net(6, 8).parameters(), 0.1).state_dict()
        )
    model = net(6, 8)
    optimizer = unlimited(model)
    backward(model, normal(0, 20, 6))
    with pytest.raises(ConfigError, match="saved directions"):
        unlimited(net(6, 8), rank_in=2).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"history": 0}, "history=0"),
        ({"update_period": 0}, "update_period=0"),
        ({"rank_in": 0}, "rank_in=0"),
        ({"rank_out": 0}, "rank_out=0"),
        ({"max_change": 0.0}, "max_change=0.0"),
        ({"max_change_per_component": -1.0}, "max_change_per_component=-1.0"),
    ],
)
def test_options_out_of_range(how, message):
    with pytest.raises(ConfigError, match=message):
        NaturalGradientSGD(net(6, 8), **{"lr": 0.1, **how})


def test_parameters_in_place_of_a_model():
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module"):
        NaturalGradientSGD(net(6, 8).parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"must be a torch.nn.Module"):
        NaturalGradientSGD([{"params": list(net(6, 8).parameters())}], 0.1)
