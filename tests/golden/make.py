"""Writes schemes.json: what every scheme made of a small model.

    python -m tests.golden.make [--force]

tests/mpi/test_schemes.py compares new runs with it. Write it anew only if a law has changed, and say
why in the commit.
"""

import argparse
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("schemes.json")
TESTS = Path(__file__).parents[1]
LEFT_OUT = (
    "runs of random_pairs, fixed_ring, random_ring, gossip_pga, gasloc and a2cid2 at the machine's own "
    "times: which models meet depends on timing, so no two are alike. Their cases, named events, are at "
    "times drawn from a seed (tests/mpi/events.py)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    force = parser.parse_args().force
    if FILE.exists() and not force:
        sys.exit(f"{FILE} exists, and tests rely on it. Give --force to overwrite it.")
    from tests.mpi.test_schemes import summaries

    lines = [f"  {json.dumps(case)}: {json.dumps(found)}" for case, found in summaries().items()]
    schemes = ",\n".join(lines)
    FILE.write_text(f'{{"left_out": {json.dumps(LEFT_OUT)},\n "schemes": {{\n{schemes}\n}}}}\n')


if __name__ == "__main__":
    main()
