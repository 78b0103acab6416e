"""An LSTM in which the derivatives of the gates can be read, in place of the fused torch.nn.LSTM.

Each layer and direction is one linear map of all its inputs, then a recurrence with a custom backward,
which writes the derivatives of all gates into one tensor: rows for the Fisher estimates of the input
weights and of the recurrent weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.optim.natural_gradient.capture import Tap, affine, data_dtype, hand_over

Span = tuple[int, int]  # first row and number of rows of one time step


class LSTM(nn.LSTM):
    """torch.nn.LSTM, whose weights `NaturalGradientSGD` can precondition.

    Arguments, parameters, state_dict, inputs and outputs are those of torch.nn.LSTM (num_layers,
    bidirectional, batch_first, dropout between layers, packed sequences, sequences without a
    batch); outputs are equal up to rounding. Either class loads the other's state_dict. Under
    autocast the recurrence runs in float32.

    The recurrence runs in Python, one matrix product and a few elementwise operations per time step: on
    a GPU it is slower than the fused torch.nn.LSTM.

    Raises:
        ConfigError: for proj_size > 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size > 0:
            raise ConfigError(
                f"natural.LSTM: proj_size={self.proj_size} must be 0: projections are not supported. "
                "Leave it out, or use torch.nn.LSTM, whose weights are trained by plain SGD."
            )
        self.taps: dict[str, Tap] = _Taps()

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return the outputs, and (h, c) after the last time step, as torch.nn.LSTM does."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        batched = input.ndim == 3
        if not batched:
            input = input.unsqueeze(0 if self.batch_first else 1)
            hx = None if hx is None else tuple(part.unsqueeze(1) for part in hx)
        hx = self._started(input, hx, None)
        x = input.transpose(0, 1) if self.batch_first else input
        times, batch = x.shape[:2]
        spans = [(time * batch, batch) for time in range(times)]
        x, hx = self._layers(x.reshape(times * batch, -1), hx, spans)
        x = x.view(times, batch, -1)
        x = x.transpose(0, 1) if self.batch_first else x
        if not batched:
            x = x.squeeze(0 if self.batch_first else 1)
            hx = tuple(part.squeeze(1) for part in hx)
        return x, hx

    def _packed(self, input: PackedSequence, hx: Any) -> Any:
        hx = self._started(input.data, hx, input.batch_sizes, input.sorted_indices)
        spans, row = [], 0
        for size in input.batch_sizes.tolist():
            spans.append((row, size))
            row += size
        x, hx = self._layers(input.data, hx, spans)
        packed = PackedSequence(x, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        return packed, self.permute_hidden(hx, input.unsorted_indices)

    def _started(self, x: Tensor, hx: Any, sizes: Tensor | None, order: Any = None) -> Any:
        """Return the initial state (h, c), checked as in torch.nn.LSTM; zeros if `hx` is None."""
        self.check_input(x, sizes)
        if hx is not None:
            hx = self.permute_hidden(hx, order)
            self.check_forward_args(x, hx, sizes)
            return hx
        batch = x.shape[0 if self.batch_first else 1] if sizes is None else int(sizes[0])
        states = self.num_layers * (2 if self.bidirectional else 1)
        zeros = x.new_zeros(states, batch, self.hidden_size)
        return zeros, zeros

    def _layers(self, x: Tensor, hx: Any, spans: list[Span]) -> Any:
        directions = 2 if self.bidirectional else 1
        last_h, last_c = [], []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                suffix = f"l{layer}" + ("_reverse" if direction else "")
                y, h, c = self._one(x, hx[0][index], hx[1][index], suffix, spans)
                outputs.append(y)
                last_h.append(h)
                last_c.append(c)
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            if layer < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, (torch.stack(last_h), torch.stack(last_c))

    def _one(self, x: Tensor, h: Tensor, c: Tensor, suffix: str, spans: list[Span]) -> Any:
        """Run one direction of one LSTM layer; return its outputs, and h and c after its last time step."""
        weight, bias = getattr(self, f"weight_ih_{suffix}"), self._bias("ih", suffix)
        gates = affine(x, weight, bias, self.taps.get(f"ih_{suffix}"))
        backwards = suffix.endswith("reverse")
        return _Recurrence.apply(
            gates,
            getattr(self, f"weight_hh_{suffix}"),
            self._bias("hh", suffix),
            h,
            c,
            spans[::-1] if backwards else spans,
            self.taps.get(f"hh_{suffix}"),
        )

    def _bias(self, kind: str, suffix: str) -> Tensor | None:
        return getattr(self, f"bias_{kind}_{suffix}") if self.bias else None


class _Taps(dict[str, Tap]):
    """An LSTM's Taps by suffix of the weight's name ("ih_l0"); a copy of the LSTM gets an empty dict."""

    def __deepcopy__(self, memo: Any) -> _Taps:
        return _Taps()

    def __reduce__(self) -> Any:
        return _Taps, ()


def tap_lstm(name: str, module: LSTM, wanted: set[int], make: Callable[..., Tap]) -> Iterator[Tap]:
    """Precondition an LSTM's trained weight matrices with an id in `wanted`: yield a Tap for each.

    Args:
        name: name of the module.
        module: the LSTM.
        wanted: ids of the parameters to tap.
        make: makes a Tap of its first three arguments: name, weight and bias.
    """
    for full, weight in module.named_parameters(recurse=False):
        suffix = full.removeprefix("weight_")
        if suffix == full or id(weight) not in wanted or not weight.requires_grad:
            continue
        tap = make(f"{name}.{suffix}", weight, getattr(module, f"bias_{suffix}", None))
        module.taps[suffix] = tap
        yield tap


class _Recurrence(torch.autograd.Function):
    """Recurrence of one LSTM layer and direction: from gates (n, 4H), in order i, f, g, o, to outputs (n, H).

    `gates` is the contribution of the inputs. At each time step, with h and c of the step before,
        i, f, o = sigmoid(a_ifo),  g = tanh(a_g),  a = gates + W h + b,
        c <- f c + i g,  h <- o tanh(c).
    The rows of a time step are contiguous; `spans` lists them in the order in which they are visited. A
    time step may have fewer rows than the batch: the states of the other sequences do not change.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Any, h: Tensor, c: Tensor,
        spans: list[Span], tap: Tap | None,
    ) -> Any:  # fmt: skip
        given, kind = gates.dtype, data_dtype(weight.dtype)
        with torch.autocast(gates.device.type, enabled=False):
            acts = gates.to(kind) + bias.to(kind) if bias is not None else gates.to(kind).clone()
            transposed = weight.detach().to(kind).t()
            size = weight.shape[1]
            h, c = h.to(kind, copy=True), c.to(kind, copy=True)
            outputs, squashed = acts.new_empty(len(acts), size), acts.new_empty(len(acts), size)
            before_h, before_c = torch.empty_like(outputs), torch.empty_like(outputs)
            for first, rows in spans:
                span = slice(first, first + rows)
                now_h, now_c = h[:rows], c[:rows]
                before_h[span], before_c[span] = now_h, now_c
                a = acts[span].addmm_(now_h, transposed)
                a[:, : 2 * size].sigmoid_()
                a[:, 2 * size : 3 * size].tanh_()
                a[:, 3 * size :].sigmoid_()
                i, f, g, o = a.chunk(4, 1)
                now_c.mul_(f).addcmul_(i, g)
                torch.tanh(now_c, out=squashed[span])
                torch.mul(o, squashed[span], out=now_h)
                outputs[span] = now_h
        ctx.save_for_backward(acts, weight, squashed, before_h, before_c)
        ctx.spans, ctx.tap, ctx.bias, ctx.given = spans, tap, bias, given
        return outputs.to(given), h.to(given), c.to(given)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor) -> Any:
        acts, weight, squashed, before_h, before_c = ctx.saved_tensors
        kind, given, n, size = acts.dtype, ctx.given, len(acts), weight.shape[1]
        with torch.autocast(dy.device.type, enabled=False):
            dy, recurrent = dy.to(kind), weight.detach().to(kind)
            dh, dc = dh.to(kind, copy=True), dc.to(kind, copy=True)
            by_gate, to_cell = _slopes(acts, squashed, before_c)
            da = acts.new_empty(n, 4, size)
            for first, rows in reversed(ctx.spans):
                span = slice(first, first + rows)
                now_h, now_c = dh[:rows], dc[:rows]
                now_h += dy[span]
                now_c.addcmul_(now_h, to_cell[span])
                torch.mul(now_c.unsqueeze(1), by_gate[span, :3], out=da[span, :3])
                torch.mul(now_h, by_gate[span, 3], out=da[span, 3])
                now_c *= acts[span, size : 2 * size]
                torch.mm(da[span].view(rows, -1), recurrent, out=now_h)
            da = da.view(n, -1)
            needed = ctx.needs_input_grad
            w = b = None
            if needed[1] or needed[2]:
                w, b = hand_over(ctx.tap, before_h, da, weight, ctx.bias)
        return (
            da.to(given), w, b, dh.to(given) if needed[3] else None,
            dc.to(given) if needed[4] else None, None, None,
        )  # fmt: skip


def _slopes(acts: Tensor, squashed: Tensor, before_c: Tensor) -> tuple[Tensor, Tensor]:
    """Return derivatives in a time step: of c by gates i, f, g and h by o, (n, 4, H); of h by c, (n, H)."""
    i, f, g, o = acts.chunk(4, 1)
    by_gate = acts.new_empty(len(acts), 4, i.shape[1])
    torch.mul(g * i, 1 - i, out=by_gate[:, 0])
    torch.mul(before_c * f, 1 - f, out=by_gate[:, 1])
    torch.mul(i, 1 - g * g, out=by_gate[:, 2])
    torch.mul(squashed * o, 1 - o, out=by_gate[:, 3])
    return by_gate, o * (1 - squashed * squashed)
