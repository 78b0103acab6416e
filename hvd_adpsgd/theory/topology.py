"""Communication graphs of super learners: rings, permuted rings, matchings, random peers.

Pure functions of (n, outer rank, seed, round). Super learners that agree on n and seed compute the same graph
without a message, on any machine with the same NumPy release (another release may generate other random
numbers).

Legend: n super learners, outer ranks i in [0, n), round k >= 0.
"""

import numpy as np
import numpy.typing as npt

from hvd_adpsgd.errors import TopologyError

Peers = tuple[int | None, ...]


def ring_neighbours(n: int, i: int) -> tuple[int, ...]:
    """Left and right neighbour of i on the ring 0, 1, ..., n-1.

    A ring of two has one edge, hence one neighbour; a ring of one has none.

    Returns:
        (i-1 mod n, i+1 mod n) for n >= 3, (1-i,) for n = 2, () for n = 1.
    """
    if n <= 2:
        return tuple(j for j in range(n) if j != i)
    return ((i - 1) % n, (i + 1) % n)


def ring_order(n: int, seed: int, round: int) -> npt.NDArray[np.intp]:
    """The order of the super learners on the permuted ring of a round, by outer rank.

    A uniformly random permutation drawn from (seed, round), the same on all super learners.

    Returns:
        Permutation of 0..n-1, shape (n,).

    Source: randomised mixing of ADPSGD, Zhang et al., arXiv:2002.01119 and arXiv:2110.11199.
    """
    return _generator(seed, round).permutation(n)


def permuted_ring_neighbours(n: int, i: int, seed: int, round: int) -> tuple[int, ...]:
    """Left and right neighbour of i on the permuted ring of `ring_order(n, seed, round)`.

    Returns:
        As `ring_neighbours`: two ranks for n >= 3, one for n = 2, none for n = 1.
    """
    order = ring_order(n, seed, round)
    position = int(np.flatnonzero(order == i)[0])
    return tuple(int(order[s]) for s in ring_neighbours(n, position))


def perfect_matching(n: int, seed: int, round: int) -> Peers:
    """A uniformly random matching of all super learners into pairs, the same on all super learners.

    The permutation of `ring_order` is cut into consecutive pairs; with n odd its last rank has no peer.

    Returns:
        The peer of each rank, length n; None for a rank without a peer.
    """
    order = [int(rank) for rank in ring_order(n, seed, round)]
    peers: list[int | None] = [None] * n
    for i, j in zip(order[0::2], order[1::2], strict=False):
        peers[i], peers[j] = j, i
    return tuple(peers)


def random_partners(n: int, i: int, seed: int, rounds: int) -> npt.NDArray[np.int32]:
    """Draw independent, uniformly random peers of super learner i, never i itself.

    The peers are drawn from (seed, i), so that each super learner has its own table.

    Returns:
        Outer ranks, shape (rounds,), int32.

    Source: Lian et al., AD-PSGD, arXiv:1710.06952, on the complete graph.
    """
    others = _generator(seed, i).integers(0, n - 1, size=rounds, dtype=np.int32)
    return np.where(others >= i, others + 1, others).astype(np.int32)


def require_rank(n: int, i: int) -> None:
    """Raise TopologyError unless i is an outer rank among n super learners."""
    if not 0 <= i < n:
        raise TopologyError(
            f"no such super learner: got outer rank {i}, allowed are 0 to {n - 1}. "
            "Pass an outer rank (super_rank()), not a learner's rank."
        )


def _generator(seed: int, stream: int) -> np.random.Generator:
    """Return the random generator of (seed, stream), where the stream is a round or a rank."""
    return np.random.default_rng(np.random.SeedSequence([seed, stream]))
