"""Natural-gradient SGD, with online Fisher estimates of inputs and output derivatives of linear layers.

`NaturalGradientSGD` is the optimizer, `LSTM` a torch.nn.LSTM whose weights that optimizer can precondition,
`OnlineFisher` the estimate of a Fisher matrix.
"""

from hvd_adpsgd.optim.natural_gradient.fisher import OnlineFisher
from hvd_adpsgd.optim.natural_gradient.lstm import LSTM
from hvd_adpsgd.optim.natural_gradient.optimizer import NaturalGradientSGD

__all__ = ["LSTM", "NaturalGradientSGD", "OnlineFisher"]
