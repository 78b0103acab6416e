"""Trains with schemes whose averaging may run beside the computation: arguments FOLDER SCHEME=SECONDS ...

FOLDER gets a trace of each scheme, in which computations are recorded. In each step one of two learners
leads: the other makes its own step only when that one computes again, so a round ends while the leader
computes, however slow the machine is. A leader that waits for the round in its step never gets there;
then the other goes on after SECONDS.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from learner import retired, say, wrap

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.collectives.of_communicator import wait
from hvd_adpsgd.config import Config
from hvd_adpsgd.launch import world as worlds

SIZE, STEPS = 200_000, 6  # float64: several chunks
LONGEST_S = 60.0  # of a computation


def main() -> None:
    torch.set_num_threads(1)
    for number, scheme in enumerate(sys.argv[2:]):
        spec, seconds = scheme.rsplit("=", 1)
        trace = Path(sys.argv[1]) / f"{number}.json"
        hvd.init(config=Config(super_learner_size=1, timeline=str(trace)))
        train(spec, float(seconds))
        hvd.shutdown()
        say(case=spec)


def train(spec: str, patience_s: float) -> None:
    comm, me, leads = worlds.current().collectives.comm, hvd.rank(), np.zeros(1)
    model = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    with retired(wrap(torch.nn.ParameterList([model]), averaging=spec)) as optimizer:
        timeline = optimizer._averaging.record.timeline
        for step in range(STEPS):
            leader = step % 2
            if me != leader:
                told = comm.Irecv(leads, leader, tag=step)
                if not wait(told, time.monotonic() + patience_s):
                    patience_s = 0.1  # it has shown what it does
                    told.Cancel()
                    told.Wait()
            model.grad = model.detach() - me - step
            optimizer.step()
            began = time.monotonic()
            if me == leader:
                wait(comm.Isend(leads, 1 - me, tag=step))
            compute(step + 1)
            timeline.complete("computation", "trainer", began, time.monotonic())


def compute(rounds: int) -> None:
    """Until so many rounds are over: longer than averaging takes, as a GPU's work may be."""
    ends = time.monotonic() + LONGEST_S
    while over() < rounds and time.monotonic() < ends:
        time.sleep(1e-3)


def over() -> int:
    numbers = hvd.metrics()
    return int(numbers["means"] + numbers["exchanges"])


if __name__ == "__main__":
    main()
