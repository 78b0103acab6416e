"""The processes of Hugging Face Accelerate are the learners: its state, without a process group.

By itself Accelerate reads the launcher's variables and starts torch.distributed, whose DDP averages gradients
over all learners. `join_learners` makes its state before that: ranks and sizes are hvd's, and the kind of
distribution is one that Accelerate does not know, so it wraps no model and calls no torch.distributed.
"""

import enum
import os

import torch
from accelerate.state import AcceleratorState, PartialState

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.errors import WorldError

# Accelerate starts a process group if it finds one of these.
_LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class _Kind(enum.StrEnum):  # as accelerate.DistributedType
    HVD_ADPSGD = "HVD_ADPSGD"


def join_learners(cpu: bool = False) -> PartialState:
    """Call hvd.init() and make the state of Accelerate, a process per learner; all learners call it together.

    Args:
        cpu: whether the device is the CPU; else it is GPU number hvd.local_rank(), if there are GPUs.

    Raises:
        WorldError: if Accelerate has started a process group of its own.
    """
    hvd.init()
    shared = PartialState._shared_state
    if shared.get("distributed_type") is _Kind.HVD_ADPSGD:
        return PartialState()
    hidden = {name: os.environ.pop(name) for name in _LAUNCHERS if name in os.environ}
    try:
        state = PartialState(cpu=cpu)
    finally:
        os.environ.update(hidden)
    if state.use_distributed:
        raise WorldError(
            f"learner {hvd.rank()}: Accelerate runs {state.num_processes} processes of its own, whose "
            "DistributedDataParallel averages gradients over all learners. Make AdpsgdAccelerator, or "
            "AdpsgdTrainingArguments, before any other object of Accelerate."
        )
    shared.update(distributed_type=_Kind.HVD_ADPSGD, local_process_index=hvd.local_rank())
    shared["wait_for_everyone"] = follow_survivors  # hides the method of PartialState
    if state.device.type == "cuda":
        shared["device"] = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(shared["device"])
    follow_survivors()
    return state


def follow_survivors() -> None:
    """Number the surviving learners anew: process 0 saves, later data loaders divide the data among them.

    All learners call it together, and wait for the slowest; it is wait_for_everyone() of Accelerate.
    """
    ranks = hvd.allgather_object(hvd.rank())
    numbers = {"num_processes": len(ranks), "process_index": ranks.index(hvd.rank())}
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared.update(numbers if shared else {})  # an empty one is not made yet
