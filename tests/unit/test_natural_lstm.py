"""The LSTM that shows its gates: equal to torch.nn.LSTM, and preconditioned as its rows say."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hvd_adpsgd.errors import ConfigError

pytest.importorskip("horovod.torch")
from hvd_adpsgd.optim.natural_gradient import LSTM, OnlineFisher
from hvd_adpsgd.torch import NaturalGradientSGD

F64 = torch.float64


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pair(*args, **kwargs):
    """torch's and ours, with the same weights, loaded both ways."""
    torch.manual_seed(5)
    fused = nn.LSTM(*args, **kwargs, dtype=F64)
    ours = LSTM(*args, **kwargs, dtype=F64)
    ours.load_state_dict(fused.state_dict())
    fused.load_state_dict(ours.state_dict())
    return fused, ours


def outcome(module, x, hx):
    """Outputs, last states, and derivatives by inputs, states and parameters."""
    y, (h, c) = module(x, hx)
    data = y if isinstance(y, torch.Tensor) else y.data
    loss = (data * normal(7, *data.shape)).sum() + (h * normal(8, *h.shape)).sum()
    loss = loss + (c * normal(9, *c.shape)).sum()
    leaves = [*module.parameters(), *(hx or ()), *([x] if isinstance(x, torch.Tensor) else [])]
    return [data, h, c, *torch.autograd.grad(loss, leaves)]


@given(
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    times=st.integers(1, 6),
    batch=st.integers(0, 4),
    given_state=st.booleans(),
)
def test_it_is_torchs_lstm(layers, bidirectional, batch_first, bias, times, batch, given_state):
    """batch = 0 stands for a sequence without a batch."""
    fused, ours = pair(3, 4, layers, bias, batch_first, 0.0, bidirectional)
    shape = (times, 3) if batch == 0 else (batch, times, 3) if batch_first else (times, batch, 3)
    states = (layers * (1 + bidirectional), *([batch] if batch else []), 4)
    hx = None
    if given_state:
        hx = tuple(normal(k, *states).requires_grad_() for k in (1, 2))
    x = normal(0, *shape).requires_grad_()
    for mine, torchs in zip(outcome(ours, x, hx), outcome(fused, x, hx), strict=True):
        torch.testing.assert_close(mine, torchs)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_packed_sequences(lengths, bidirectional, given_state):
    fused, ours = pair(3, 4, 2, bidirectional=bidirectional)
    packed = pack_sequence([normal(k, n, 3) for k, n in enumerate(lengths)], enforce_sorted=False)
    hx = None
    if given_state:
        states = (2 * (1 + bidirectional), len(lengths), 4)
        hx = tuple(normal(k, *states).requires_grad_() for k in (1, 2))
    for mine, torchs in zip(outcome(ours, packed, hx), outcome(fused, packed, hx), strict=True):
        torch.testing.assert_close(mine, torchs)


def test_dropout_between_layers_while_training_only():
    _, ours = pair(3, 4, 2, dropout=0.5)
    torch.manual_seed(0)
    x = normal(0, 5, 2, 3)
    assert not torch.equal(ours(x)[0], ours(x)[0])
    ours.eval()
    assert torch.equal(ours(x)[0], ours(x)[0])


def test_projections_are_refused():
    with pytest.raises(ConfigError, match="proj_size=2 must be 0"):
        LSTM(3, 4, proj_size=2)


def test_under_autocast():
    torch.manual_seed(0)
    ours = LSTM(3, 4)
    x = normal(0, 5, 2, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = ours(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), ours(x)[0], rtol=0.03, atol=0.02)
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())


def unrolled(module, x):
    """Outputs of one layer by plain autograd, the gates before they are squashed, and h before."""
    weights = dict(module.named_parameters())
    h = x.new_zeros(x.shape[1], 4)
    c, outputs, gates, before = h, [], [], []
    for row in x:
        before.append(h)
        a = row @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]
        a = a + h @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]
        a.retain_grad()
        gates.append(a)
        i, f, g, o = a.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs), gates, torch.cat(before).detach()


def test_gradients_are_products_of_preconditioned_inputs_and_gate_derivatives():
    torch.manual_seed(0)
    ours = LSTM(3, 4, dtype=F64)
    plain = copy.deepcopy(ours)
    optimizer = NaturalGradientSGD(ours, 0.0)
    fishers = {
        kind: (OnlineFisher(width + 1, (width + 1) // 2), OnlineFisher(16, 8))
        for kind, width in (("ih", 3), ("hh", 4))
    }
    for k in range(12):
        x, target = normal(k, 5, 6, 3), normal(50 + k, 5, 6, 4)
        optimizer.zero_grad()
        plain.zero_grad()
        (ours(x)[0] - target).square().mean().backward()
        y, gates, before = unrolled(plain, x)
        (y - target).square().mean().backward()
        da = torch.cat([a.grad for a in gates])
        for kind, rows in (("ih", x.reshape(-1, 3)), ("hh", before)):
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            inputs, outputs = fishers[kind]
            g = outputs.precondition(da)[0].T @ inputs.precondition(rows)[0]
            torch.testing.assert_close(getattr(ours, f"weight_{kind}_l0").grad, g[:, :-1])
            torch.testing.assert_close(getattr(ours, f"bias_{kind}_l0").grad, g[:, -1])
        optimizer.step()


def test_it_learns_and_its_copies_are_plain():
    torch.manual_seed(0)
    ours = LSTM(3, 4, 2, bidirectional=True, dtype=F64)
    optimizer = NaturalGradientSGD(ours, 0.5)
    x, target = normal(0, 5, 6, 3), normal(1, 5, 6, 8) * 0.3
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (ours(x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert len(optimizer.state_dict()["natural"]) == 8
    natural = [p.grad.clone() for p in ours.parameters()]
    copied, fused = copy.deepcopy(ours), nn.LSTM(3, 4, 2, bidirectional=True, dtype=F64)
    fused.load_state_dict(ours.state_dict())
    optimizer.remove_hooks()
    for module in (copied, fused, ours):
        module.zero_grad()
        (module(x)[0] - target).square().mean().backward()
    for a, b, c, d in zip(
        copied.parameters(), fused.parameters(), ours.parameters(), natural, strict=True
    ):
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(c.grad, b.grad)
        assert not torch.allclose(d, b.grad, rtol=1e-3)
