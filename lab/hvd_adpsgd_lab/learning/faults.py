"""Faults that strike a job that trains in virtual time: from text, and checked."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd_lab.simulation.bounds import Bound, in_bound
from hvd_adpsgd_lab.simulation.faults import FAULTS
from hvd_adpsgd_lab.simulation.scenario import VALUES, Fault

KINDS = tuple(kind for kind in FAULTS if kind not in ("unfit", "extend", "bits"))
LOCK_STEP_KINDS = ("crash", "stop", "slow")  # those that the baselines have
_WITH_PEER = ("cut", "sever", "suspect", "break")
_TIME: Bound = (0.0, 1e9)
_CURE = "Correct the fault."


def checked(faults: Sequence[Fault], n: int, kinds: Sequence[str], strategy: str) -> list[Fault]:
    """Return faults in the order of their times.

    Args:
        faults: the faults.
        n: number of super learners.
        kinds: kinds that the strategy, or the baseline, has.
        strategy: its spec, for messages.

    Raises:
        ConfigError: for another kind, or a number out of its bound.
    """
    joins = 0
    faults = sorted(faults, key=lambda fault: fault.at_s)
    for i, fault in enumerate(faults):
        where = f"fault {i} ({fault.kind})"
        if fault.kind not in kinds:
            raise ConfigError(
                f"{where}: {strategy} has no such fault when it trains in virtual time, allowed are "
                f"{', '.join(kinds)}. Use one of these, or leave the fault out."
            )
        in_bound(f"{where}: its time in seconds", fault.at_s, _TIME, _CURE)
        most = n + joins if fault.kind == "join" else n - 1
        joins += fault.kind == "join" and fault.who >= n
        in_bound(f"{where}: its super learner", fault.who, (0, most), _CURE)
        value = VALUES.get(fault.kind, _TIME)
        in_bound(f"{where}: its value", fault.value, value, _CURE)
        for peer in fault.peers:
            in_bound(f"{where}: a peer", peer, (0, n - 1), _CURE)
            if peer == fault.who and fault.kind in _WITH_PEER:
                raise ConfigError(
                    f"{where}: super learner {peer} is its own peer. Name another one."
                )
        if fault.kind in _WITH_PEER:
            in_bound(f"{where}: the number of its peers", len(fault.peers), (1, 1), _CURE)
    return faults
