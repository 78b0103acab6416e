"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675), which torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps of one size, by the sign of a mean of gradients; it has no second moment.

        p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p),   m <- b2 m + (1 - b2) g

    Args:
        params: parameters, or groups of them.
        lr: learning rate, about a third to a tenth of AdamW's.
        betas: b1, b2.
        weight_decay: per step and learning rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """See torch.optim.Optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(p.grad, m, b1).sign_(), alpha=group["lr"])
                m.lerp_(p.grad, 1 - b2)
        return loss
