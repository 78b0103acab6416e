"""What a process holds, to be compared before and after something that should leave nothing behind."""

import contextlib
import gc
import os
import re
import threading
from collections import Counter
from pathlib import Path


def holdings() -> Counter[str]:
    """Count threads by name, descriptors by target (without numbers), and mappings of /dev/shm.

    `holdings() - before` is what has been added: things of earlier tests may end meanwhile.
    """
    gc.collect()
    held = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            held[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{handle}"))] += 1
    held["mapping"] = Path("/proc/self/maps").read_text().count("/dev/shm/")
    return held
