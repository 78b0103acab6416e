"""The distance of models from their mean, estimated from the distances in exchanges."""

import math

from hvd_adpsgd.errors import TopologyError
from hvd_adpsgd.theory.topology import require_size


def consensus_from_exchanges(mean_squared_distance: float, n: int) -> float:
    """Estimate the consensus distance from the distances in exchanges between uniformly random pairs.

    sum over i != j of |x_i - x_j|^2 = 2 n sum_i |x_i - m|^2, hence
    D^2 = (n - 1) / (2 n) * E|x_i - x_j|^2 over pairs i != j. On a fixed ring the estimate is too small,
    because the models of neighbours are closer to each other than those of other pairs.

    Args:
        mean_squared_distance: mean of |x_i - x_j|^2 over the exchanges, >= 0.
        n: number of super learners.

    Returns:
        D = sqrt((1/n) sum_i |x_i - m|^2).

    Raises:
        TopologyError: if n < 1 or the distance is negative or NaN.

    Source: the identity above; the tests compare it with brute force.
    """
    require_size(n)
    if not mean_squared_distance >= 0:
        raise TopologyError(
            f"no distance: consensus_from_exchanges got {mean_squared_distance}, needed is >= 0. "
            "Pass a mean of squared distances."
        )
    return math.sqrt((n - 1) / (2 * n) * mean_squared_distance)
