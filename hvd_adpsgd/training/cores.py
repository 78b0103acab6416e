"""Threads of a learner that add corrections to its model."""

from __future__ import annotations

import os

import torch


def pass_threads(learners: int) -> int:
    """Return the number of threads with which this learner adds corrections to its model.

    As many as torch has, but no more than this learner's share of the host's cores: without OMP_NUM_THREADS
    torch has one thread per core in every learner.

    Args:
        learners: number of learners on this host.
    """
    share = (os.cpu_count() or 1) // learners
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)), share))
