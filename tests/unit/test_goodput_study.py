"""The study of goodput: its runs, and its table."""

from lab.studies import goodput


def test_a_small_job_loses_less_to_failures_than_synchronous_training() -> None:
    told = {
        "n": 4, "rate": 60.0, "seed": 0, "minutes": 0.7, "step": 1.0, "replace": 5.0,
        "task": "examples/virtual_time.py",
    }  # fmt: skip
    gossip, synchronous = (
        goodput.trained(told | {"scheme": scheme}) for scheme in ("random_pairs", "synchronous")
    )
    assert gossip["failed"] > 0 and synchronous["failed"] > 0
    assert gossip["kept"] > 1.5 * synchronous["kept"]
    assert gossip["curve"][-1][2] < gossip["curve"][0][2]
