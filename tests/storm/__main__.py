"""Plays the simulator's fault scripts on real processes: python -m tests.storm --seed 17, or --seeds 0 20."""

import argparse
import sys

from tests.storm.judge import intervals
from tests.storm.play import play
from tests.storm.script import script_of
from tests.storm.story import Story


def main() -> int:
    """Play, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="play it, and print what happened")
    which.add_argument(
        "--seeds", type=int, nargs=2, help="from the first up to the last, not included"
    )
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(*args.seeds)
    broken = 0
    for seed in seeds:
        story = play(script_of(seed))
        broken += bool(story.broken)
        if args.seed is not None or story.broken:
            print(story)
        if args.seed is None:
            print(row(story), flush=True)
    return bool(broken)


def row(story: Story) -> str:
    """A line of the table: the script in short, the faults that were committed, the verdict."""
    script = story.script
    faults = ", ".join(f"{n['kind']} {n['who']} ({n['place']})" for n in story.of("fault"))
    joined = len({note["pid"] for note in story.of("joined")})
    between = intervals(story)
    return " | ".join(
        [
            f"{script.seed:4d}",
            f"{script.n} x {script.k}",
            f"{script.strategy} {script.launcher} {script.variables['HVD_ADPSGD_WIRE']}",
            faults + f"; {joined} joined" * bool(script.joins),
            f"status {story.statuses}",
            f"sum exact in {sum(each.is_exact for each in between)} of {len(between)} intervals",
            f"{story.seconds:.0f} s",
            "BROKEN" if story.broken else "holds",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
