"""Five libraries train the same model on four learners: held-out loss over wall time.

    python -m lab.studies.claim                          two tasks, five situations, three seeds: hours
    python -m lab.studies.claim --tasks text --seeds 0   half an hour
    python -m lab.studies.claim --only even --schemes ddp hadpsgd
    python -m lab.studies.claim --table                  what --out holds, once more

The schemes are plain Horovod, DDP, PostLocalSGD, torchft's DiLoCo and H-ADPSGD with its defaults. They take
turns in each situation: even learners, one five times slower, links of 1 Gb/s and 100 Mb/s (network
namespaces, which need root), one learner killed at T/3. All train for 1.1 T; T is --seconds. Copies of the
models are evaluated after a run. Written to --out: runs.jsonl, table.md, claim.png and claim_samples.png. A
second call runs what runs.jsonl lacks. A run needs 3 GB there. What is not installed (pip install torchft)
is left out, and named.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.acoustic_model.speech import launch
from examples.acoustic_model.speech.problem import drop_repeats, new_parser, run, within
from lab.studies.claim import study
from lab.studies.claim.curves import QUANTILES
from lab.studies.claim.schemes import SCHEMES
from lab.studies.claim.situations import SITUATIONS
from lab.studies.claim.tasks import NAMES


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the study.

    Raises:
        Problem: if an option is out of range.
    """
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=NAMES, default=list(NAMES))
    add("--only", nargs="+", choices=SITUATIONS, default=list(SITUATIONS), help="situations")
    add("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--seconds", type=float, help="T (default: 40, with --quick 4)")
    add("--quick", action="store_true", help="tiny models, as a test")
    add("--table", action="store_true", help="print and draw what --out holds; train nothing")
    add("--speech", type=Path, help="folder of the speech (default: out/speech/easy)")
    add("--out", type=Path, default=Path("out/claim"))
    options = parser.parse_args(argv)
    options.seconds = options.seconds or (4.0 if options.quick else 40.0)
    within("--seconds", options.seconds, 1, 86_400)
    drop_repeats(options, "tasks", "only", "schemes", "seeds")
    within("the number of --seeds", len(options.seeds), 1, len(QUANTILES))
    for seed in options.seeds:
        within("--seeds", seed, 0, 2**31 - 1)
    return options


def main() -> None:
    """Train what is missing, then print and draw."""
    options = arguments()
    launch.check(["torch", "horovod", "hvd_adpsgd", "matplotlib"], launcher=True)
    study.perform(options)


if __name__ == "__main__":
    run(main)
