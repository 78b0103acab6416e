"""Promise 5 with nothing between the steps that would make learners of a node wait for each other.

A tiny model and many exchanges: the leader is often a step ahead of the others, which still read the
corrections of the step before. Comparing after every step would hide what goes wrong then.
"""

from tests.launcher import run_learners

PROGRAM = """
    import torch
    import hvd_adpsgd.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(), exchanges_per_step=8)
    torch.manual_seed(hvd.rank())
    for _ in range(2000):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).reshape(1, -1)
    node = hvd.allgather(mine, process_set=hvd.super_learner)
    say(rank=hvd.rank(), spread=float((node - node[0]).abs().max()),
        exchanges=hvd.metrics().get("exchanges", 0))
    hvd.shutdown()
"""


def test_learners_of_a_node_stay_the_same_when_nothing_makes_them_wait() -> None:
    size = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}
    said = run_learners(4, PROGRAM, env=size, timeout=120).checked().by_rank()
    assert [facts["spread"] for facts in said] == [0.0] * 4
    assert sum(facts["exchanges"] for facts in said) > 5
