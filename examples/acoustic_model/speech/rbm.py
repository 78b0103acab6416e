"""Restricted Boltzmann machines, trained by contrastive divergence as a loss for any optimizer.

    E(v, h) = -h W v - c h - b v          visible units 0 or 1
    E(v, h) = -h W v - c h + |v - b|^2/2  visible units real, of unit variance (Gaussian)

Hidden units are 0 or 1. The free energy F(v) = -log sum over h of exp(-E(v, h)) has the gradient that
contrastive divergence needs: with v- one step of Gibbs sampling away from v+,

    d/dW (F(v+) - F(v-)) = -(h+ v+ - h- v-),    h = sigmoid(W v + c)

so CD-1 (Hinton 2002) is gradient descent on the mean of F(v+) - F(v-), with v- held fixed.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, softplus

_FAR = 1e-4  # means of visible units are kept this far from 0 and 1, where the logit is infinite


class RBM(nn.Module):
    """One restricted Boltzmann machine; weights start from N(0, 0.1^2), hidden biases from 0.

    Args:
        visible, hidden: numbers of visible and hidden units.
        gaussian: visible units are real numbers, instead of 0 or 1.
        mean: mean activation of each visible unit, shape (visible,); the visible biases start from its
            logit, or from 0 without `mean`.
    """

    def __init__(
        self, visible: int, hidden: int, gaussian: bool, mean: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.gaussian = gaussian
        self.weight = nn.Parameter(0.1 * torch.randn(hidden, visible))
        self.bias = nn.Parameter(torch.zeros(hidden))
        start = torch.zeros(visible) if mean is None else torch.logit(mean.clamp(_FAR, 1 - _FAR))
        self.visible_bias = nn.Parameter(start)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """Return P(h = 1 | v): (batch, visible) to (batch, hidden)."""
        return torch.sigmoid(linear(v, self.weight, self.bias))

    def back(self, h: torch.Tensor) -> torch.Tensor:
        """Return the mean of v given h: (batch, hidden) to (batch, visible)."""
        v = linear(h, self.weight.t(), self.visible_bias)
        return v if self.gaussian else torch.sigmoid(v)

    def free_energy(self, v: torch.Tensor) -> torch.Tensor:
        """Return the free energy F of each row of v, up to a constant: (batch, visible) to (batch,)."""
        hidden = softplus(linear(v, self.weight, self.bias)).sum(-1)
        if self.gaussian:
            return (v - self.visible_bias).square().sum(-1) / 2 - hidden
        return -(v @ self.visible_bias) - hidden

    @torch.no_grad()
    def reconstruct(self, v: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return one step of Gibbs sampling from v: hidden units are sampled, visible ones are their mean."""
        return self.back(torch.bernoulli(self(v), generator=generator))

    def contrastive(self, v: torch.Tensor, reconstructed: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradient is that of CD-1: mean F(v) - mean F(reconstructed)."""
        return self.free_energy(v).mean() - self.free_energy(reconstructed).mean()

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """Multiply all parameters by `factor`, if reconstructions have become much larger than the data."""
        for parameter in self.parameters():
            parameter.mul_(factor)


def spread(v: torch.Tensor, reconstructed: torch.Tensor) -> tuple[float, float]:
    """Return the standard deviations of v and of its reconstruction over the batch, means over the units."""
    return v.std(0).mean().item(), reconstructed.std(0).mean().item()
