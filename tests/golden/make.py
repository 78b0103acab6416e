"""Writes schemes.json: what every scheme made of a small model.

    python -m tests.golden.make

tests/mpi/test_schemes.py compares new runs with it. Write it anew only if a law has changed, and say
why in the commit.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("schemes.json")
TESTS = Path(__file__).parents[1]
LEFT_OUT = (
    "runs of random_pairs, fixed_ring, random_ring, gossip_pga, gasloc and a2cid2 at the machine's own "
    "times: which models meet depends on timing, so no two are alike. Their cases, named events, are at "
    "times drawn from a seed (tests/mpi/events.py)."
)


def main() -> None:
    from tests.mpi.test_schemes import summaries

    lines = [f"  {json.dumps(case)}: {json.dumps(found)}" for case, found in summaries().items()]
    schemes = ",\n".join(lines)
    FILE.write_text(f'{{"left_out": {json.dumps(LEFT_OUT)},\n "schemes": {{\n{schemes}\n}}}}\n')


if __name__ == "__main__":
    main()
