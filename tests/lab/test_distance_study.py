"""The study of what averaging costs in loss: its schemes and optimizers."""

import pytest

from lab.studies import distance


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "plain"])
def test_schemes_send_what_they_say(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    monkeypatch.setattr(distance, "STEPS", 6)
    schemes = "synchronous", "1xfloat32", "1xfloat32:own", "4xint4:2"
    runs = [distance.outcome(2, optimizer, scheme, 0.02, 0) for scheme in schemes]
    assert all(0 < run["loss"] < 7 for run in runs)
    _, shared, own, bits = (run["mb"] for run in runs)
    assert own < shared
    assert bits < shared  # 4 x 0.15 x 1.5 models, of 1.25
