"""Takes a core away again and again, as a hypervisor does that gives it to another machine.

    python -m tests.preempting CORE SEED

For 0 to 60 ms at a time, as long as this process lives, with as long a time between: the threads that run on
the core, or are about to, stand still while those on other cores go on. It needs root, or the right to
real-time priority.
"""

import os
import random
import sys
import time

LONGEST_S = 0.06


def go_before_others() -> None:
    """Real-time priority for this thread: it runs before all that have none."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def is_permitted() -> bool:
    """Whether this process may take a core away."""
    try:
        go_before_others()
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def main() -> None:
    core, drawn = int(sys.argv[1]), random.Random(f"{sys.argv[2]}.{sys.argv[1]}")
    os.sched_setaffinity(0, {core})
    go_before_others()
    while True:
        ends = time.monotonic() + drawn.uniform(0, LONGEST_S)
        while time.monotonic() < ends:
            pass
        time.sleep(drawn.uniform(0, LONGEST_S))


if __name__ == "__main__":
    main()
