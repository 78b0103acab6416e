"""Waits that poll: at least once, with pauses that grow to a bound, until a deadline."""

import itertools

import pytest

from hvd_adpsgd import polling


def test_pauses_double_to_a_bound_and_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(polling.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(polling.time, "sleep", slept.append)
    assert len(list(polling.polls(ends=-1.0))) == 1 and not slept
    assert len(list(polling.polls(1.0, longest_s=0.1))) == len(slept) + 1
    assert slept[:2] == [1e-6, 2e-6] and max(slept) == 0.1 and 1.0 < sum(slept) <= 1.1
    assert sum(1 for _ in itertools.islice(polling.polls(), 10**4)) == 10**4  # no deadline
