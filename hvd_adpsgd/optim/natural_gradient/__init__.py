"""Natural-gradient SGD: online Fisher estimates on both sides of every affine map.

`NaturalGradientSGD` is the optimizer, `LSTM` a torch.nn.LSTM whose weights it can precondition,
`OnlineFisher` the estimate itself.
"""

from __future__ import annotations

from hvd_adpsgd.optim.natural_gradient.fisher import OnlineFisher
from hvd_adpsgd.optim.natural_gradient.lstm import LSTM
from hvd_adpsgd.optim.natural_gradient.optimizer import NaturalGradientSGD

__all__ = ["LSTM", "NaturalGradientSGD", "OnlineFisher"]
