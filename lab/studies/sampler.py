"""What hvd.DynamicSampler costs a step, with fast steps and many learners.

    export HVD_ADPSGD_SUPER_LEARNER_SIZE=1
    python -m hvd_adpsgd run -np 16 python -m lab.studies.sampler

A step late 1 ms, with 4 samples. Each learner prints the CPU time of the sampler per step, and in how many
steps it took over 1 ms: it waited for an answer, or another process had the core.
"""

import statistics
import time

import torch

import hvd_adpsgd.torch as hvd

STEPS, BATCH, STEP_S, EPOCHS = 2000, 4, 1e-3, 2


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = hvd.DynamicBatchSampler(STEPS * BATCH * hvd.size(), batch_size=BATCH)
    cpu_s, late = [], 0
    hvd.barrier()
    for _ in range(EPOCHS):
        batches, is_over = iter(sampler), False
        while not is_over:
            cpu, wall = time.thread_time(), time.perf_counter()
            is_over = next(batches, None) is None
            cpu_s.append(time.thread_time() - cpu)
            late += time.perf_counter() - wall > STEP_S
            optimizer.zero_grad()
            model(torch.ones(BATCH, 4)).sum().backward()
            time.sleep(STEP_S)
            optimizer.step()
        hvd.barrier()
    median = statistics.median(cpu_s) * 1e6
    print(
        f"learner {hvd.rank()}: {len(cpu_s)} steps, {median:.0f} us of CPU each, {late} over 1 ms"
    )


if __name__ == "__main__":
    main()
