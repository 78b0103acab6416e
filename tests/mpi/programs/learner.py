"""What the programs of the tests share: how a learner speaks, pauses, and looks at its super learner."""

import hashlib
import itertools
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.launch import world as worlds

MARK = "@learner "
SEED = int(os.environ.get("SEED", "7"))
DEADLINE_S = 60.0  # of a wait for what must come: it bounds the wait, no verdict is about it


def say(**facts: Any) -> None:
    """One line that the test reads. One write: learners share the pipe."""
    facts.setdefault("rank", worlds.current().rank if hvd.is_initialized() else None)
    with open(1, "wb", closefd=False) as out:  # os.write may write a part only
        out.write(f"\n{MARK}{json.dumps(facts)}\n".encode())


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for bit-identical tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def same_inside(tensors: Iterable[torch.Tensor]) -> bool:
    return len(set(worlds.current().inner.allgather(digest(tensors)))) == 1


def same_everywhere(tensors: Iterable[torch.Tensor]) -> bool:
    return len(set(worlds.current().collectives.comm.allgather(digest(tensors)))) == 1


def pauses(longest_s: float = 2e-3) -> Iterator[None]:
    """Ragged timing: pauses at random, of another length on every learner."""
    rng = random.Random(SEED * 1000 + hvd.rank())
    while True:
        time.sleep(rng.uniform(0, longest_s))
        yield


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on the seed and `numbers` only."""
    seed = SEED
    for number in numbers:
        seed = seed * 10_007 + number + 1
    return torch.Generator().manual_seed(seed % 2**31)


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def wrap(model: torch.nn.Module, make: Callable[..., Any] = sgd, **how: Any) -> Any:
    """An optimizer of the model's named parameters, wrapped."""
    named = list(model.named_parameters())
    return hvd.DistributedOptimizer(make([p for _, p in named]), named_parameters=named, **how)


def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    """One step on the mean square of the output."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@contextmanager
def retired(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Stop the optimizer's engine behind the block, as shutdown would."""
    try:
        yield optimizer
    finally:
        averaging: Any = getattr(optimizer, "_averaging", None)
        if averaging is not None:
            averaging.stop()


@contextmanager
def heard(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What the library logs meanwhile."""
    lines: list[str] = []
    handler, log = logging.Handler(level), logging.getLogger("hvd_adpsgd")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def wait_exchanged(optimizer: Any) -> None:
    """Wait until every learner's engine has finished an exchange, if it has any; all learners call this.

    On a busy machine all steps may pass without one. Learners leave together: an engine that stops is
    lost as a peer for those that still wait.
    """
    engine = optimizer._averaging.engine
    if engine.loop is not None and engine.memory.own.layout.nchunks:
        assert engine.loop.wait_finished(1, DEADLINE_S), engine.loop.peers()
    hvd.barrier()


def until_all(fact: Callable[[], bool], least: int, every: int = 10) -> Iterator[int]:
    """Numbers of steps: at least so many, then until the fact holds on all learners.

    They are asked every few steps, so that they run freely in between.
    """
    ends = time.monotonic() + DEADLINE_S
    for step in itertools.count():
        if step >= least and (step - least) % every == 0:
            told = hvd.allgather_object((fact(), time.monotonic() < ends))
            if all(holds for holds, _ in told):
                return
            assert all(in_time for _, in_time in told), f"not after {step} steps: {told}"
        yield step


def outcome(call: Any) -> dict[str, str]:
    """Class and text of what a call raises, {} if nothing."""
    try:
        call()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}
