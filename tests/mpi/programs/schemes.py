"""Trains with each averaging scheme, and keeps what the models were: arguments FOLDER GROUP.

Every learner writes FOLDER/RANK.npz: for each case the models after each step, at the elements
`index`. tests/mpi/simulation.py says what they must be.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch
from by_hand import ByHand
from learner import (
    SEED,
    digest,
    outcome,
    pauses,
    retired,
    same_everywhere,
    same_inside,
    say,
    wait_exchanged,
)

import hvd_adpsgd.torch as hvd
from hvd_adpsgd.config import Config
from hvd_adpsgd.launch import world as worlds
from hvd_adpsgd.strategies import STRATEGIES
from hvd_adpsgd.training.reports import metrics_of
from tests.mpi.events import FREE as AT_EVENTS
from tests.mpi.events import PACES, STEPS, events
from tests.mpi.simulation import (
    EXACT,
    FREE,
    GOSSIP,
    HALF,
    KNOWN,
    LAWS,
    ONE_OF_A_KIND,
    RESUMED,
    Setting,
)

SHAPES = [(3, 5), (), (66_001,)]  # more chunks of 64 KiB than are summed at a time
SIZES = [15, 1, 66_001]
INDEX = np.unique([*range(16), *range(16, sum(SIZES), 4111), sum(SIZES) - 1])

MODELS: dict[str, Any] = {}


def fresh() -> torch.nn.ParameterList:
    return torch.nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in SHAPES)


def gradients(s: Setting, step: int, model: Any) -> Iterator[torch.Tensor]:
    rank, first = (0 if s.same_shards else hvd.rank()), 0
    for p in model:
        index = torch.arange(first, first + p.numel(), dtype=torch.float64).reshape(p.shape)
        first += p.numel()
        if s.exact:
            noise = ((7 * step + 5 * rank + 3 * index) % 17 - 8) / 16
        else:
            noise = torch.sin(1 + 3 * step + 5 * rank + 0.37 * index)
        yield s.curvature * (p.detach() - rank) + noise


def backward(s: Setting, step: int, model: Any) -> None:
    sum((p * g).sum() for p, g in zip(model, gradients(s, step, model), strict=True)).backward()


def advance(s: Setting, step: int, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(s, step, model)
    optimizer.step()


def look(model: Any) -> Any:
    """The model at the elements INDEX."""
    return torch.cat([p.detach().reshape(-1) for p in model]).cpu().numpy()[INDEX]


def wrap(s: Setting, model: Any, module: Any = hvd, **how: Any) -> Any:
    plain = torch.optim.SGD(model.parameters(), lr=s.lr, momentum=s.momentum)
    if module is None:
        return plain
    given = {"averaging": s.spec, **how} if module is hvd else how
    return module.DistributedOptimizer(plain, named_parameters=model.named_parameters(), **given)


@contextmanager
def training(s: Setting, **how: Any) -> Iterator[tuple[Any, Any]]:
    model = fresh()
    with retired(wrap(s, model, **how)) as optimizer:
        yield model, optimizer


def follow(name: str, s: Setting, watch: bool = False, **how: Any) -> None:
    """Train, and keep the models after each step; `watch` whether all were alike after each."""
    with training(s, **how) as (model, optimizer):
        models, alike = [], True
        for step in range(s.steps):
            advance(s, step, model, optimizer)
            models.append(look(model))
            alike = alike and (not watch or same_everywhere(model))
        MODELS[name] = np.array(models)
        numbers = getattr(optimizer, "_averaging", None)
        means = metrics_of(numbers)["means"] if numbers is not None else 0
        everybody = alike and same_everywhere(model)
        node = same_inside(model)
    say(case=name, digest=digest(model), node=node, everybody=everybody, means=means)


@contextmanager
def super_learners_of(k: int, **how: Any) -> Iterator[str]:
    """A name for results of this size."""
    hvd.init(config=Config(super_learner_size=k, chunk_kib=64, **how))
    say(case=f"size/{k}", super_size=hvd.super_size())
    yield f"{hvd.super_size()}x{k}"
    hvd.shutdown()


def laws(where: str) -> None:
    momentum = 0.9 if hvd.super_size() == hvd.size() else 0.0
    for spec in LAWS:
        follow(f"{where}/{spec}", Setting(spec, momentum=momentum))


def identities(where: str) -> None:
    for spec in (
        "periodic_averaging:period=1",
        "periodic_averaging:period=2",
        "periodic_averaging:period=2,warm_up=3",
        "periodic_averaging:period=2,block_momentum=1e-300",  # the rule, and as good as no momentum
    ):
        follow(f"{where}/exact/{spec}", Setting(spec, **EXACT))
    for spec in (
        "delay_by_one",
        "periodic_averaging:period=1",
        "synchronous_gossip:order=awc+random_pairs",
    ):
        s = Setting(spec, momentum=0.9, same_shards=True)
        follow(f"{where}/same shards/{spec}", s)
    often = "periodic_averaging:period=1"
    follow(f"{where}/often/{often}", Setting(often, momentum=0.9), watch=True)
    s = Setting("", momentum=0.9, same_shards=True)
    follow(f"{where}/same shards/plain", s, module=None)


def synchronous(where: str) -> None:
    """The last of a world: all learners are one super learner then."""
    follow(f"{where}/synchronous", Setting("synchronous", momentum=0.9))
    follow(f"{where}/exact/synchronous", Setting("synchronous", **EXACT))


def global_averages(where: str) -> None:
    """After its rounds all are alike to the last bit, and the mean has moved by gradients only."""
    pause = pauses()
    for gossip in GOSSIP:
        s = Setting(f"gossip_pga:period=4+{gossip}", **KNOWN)
        with training(s, exchanges_per_step=2.0) as (model, optimizer):
            alike, apart, models = [], [], []
            for step in range(s.steps):
                next(pause)
                advance(s, step, model, optimizer)
                if step % 4 == 3:
                    alike.append(same_everywhere(model))
                    models.append(look(model))
                apart.append(not same_everywhere(model))
            MODELS[f"{where}/{s.spec}"] = np.array(models)
            wait_exchanged(optimizer)
            exchanges = metrics_of(optimizer._averaging)["exchanges"]
            means = metrics_of(optimizer._averaging)["means"]
        facts = {"alike": alike, "apart": apart, "exchanges": exchanges, "means": means}
        say(case=f"{where}/{s.spec}", **facts)


def at_events(where: str) -> None:
    """Gossip that runs freely, but for the times of its steps and exchanges."""
    for spec in AT_EVENTS:
        s = Setting(spec, steps=STEPS, momentum=0.9)
        with training(s) as (model, optimizer):
            me, models, gossip = hvd.super_rank(), [], ByHand(optimizer)
            for event in events(spec):
                if event == (me, None):
                    advance(s, len(models), model, optimizer)
                    models.append(look(model))
                elif me in event and None not in event:
                    gossip.exchange(*event)
            with hvd.averaging_paused():
                models.append(look(model))
            MODELS[f"{where}/events/{spec}"] = np.array(models)
            exchanges = gossip.engine.metrics()["exchanges"]
        say(case=f"{where}/events/{spec}", exchanges=exchanges)


def one_super_learner(where: str) -> None:
    """Every strategy is plain Horovod, or without other learners the plain optimizer."""
    s = Setting("", momentum=0.9)
    if horovod.is_initialized():  # torch.distributed inside does not
        follow(f"{where}/horovod", s, module=horovod)
    if hvd.size() == 1:
        follow(f"{where}/torch", s, module=None)
    for name in STRATEGIES:
        follow(f"{where}/{name}", Setting(name, momentum=0.9))


def distances(where: str) -> None:
    """consensus_distance looks on: nothing changes, nor what is pending."""
    for spec in ("random_pairs", "delay_by_one", "synchronous_gossip"):
        s = Setting(spec, **KNOWN)
        with training(s, exchanges_per_step=2.0) as (model, optimizer):
            for step in range(9):
                advance(s, step, model, optimizer)
            before = digest(model)
            measured = hvd.consensus_distance(model)
            kept = digest(model) == before
            flat = torch.cat([p.detach().reshape(-1) for p in model]).cpu().numpy()
            all_models = np.array(worlds.current().collectives.comm.allgather(flat))
            expected = np.sqrt(((all_models - all_models.mean(axis=0)) ** 2).sum(axis=1).mean())
            advance(s, 9, model, optimizer)
            models = look(model)
            hvd.average_model(model)
            MODELS[f"{where}/distance/{spec}"] = np.array([models, look(model)])
        facts = {"measured": measured, "expected": float(expected), "kept": kept}
        say(case=f"{where}/distance/{spec}", **facts)


def free_running(where: str, specs: tuple[str, ...]) -> None:
    """Learners of a super learner stay the same although nothing makes them wait for each other."""
    for spec in specs:
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        named = model.named_parameters()
        with retired(
            hvd.DistributedOptimizer(
                plain, named_parameters=named, averaging=spec, exchanges_per_step=8
            )
        ) as optimizer:
            torch.manual_seed(hvd.rank())
            same, work, ends = True, 0, time.monotonic() + 60
            while work == 0 and not worlds.current().collectives.comm.bcast(
                time.monotonic() > ends
            ):
                for _ in range(100):
                    optimizer.zero_grad()
                    model(torch.randn(8, 16)).square().mean().backward()
                    optimizer.step()
                numbers = metrics_of(optimizer._averaging)
                same = same and same_inside(model.parameters())
                done = numbers["exchanges"] + numbers["means"]
                work = worlds.current().collectives.comm.allreduce(done)
        say(case=f"{where}/free/{spec}", same=same, work=work)


def number(word: str) -> float | str:
    return float(word) if word[0].isdigit() else word


def refusals(where: str) -> None:
    specs = ["0.5 delay_by_one", "auto delay_by_one", "auto a2cid2"]
    specs += ["a2cid2"] * (hvd.super_size() < 4)
    for case in specs:
        *share, spec = case.split()
        how = {"exchange_share": number(share[0])} if share else {}
        refused = outcome(lambda spec=spec, how=how: wrap(Setting(spec), fresh(), **how))
        say(case=f"{where}/refused/{case}", **refused)
    plain = torch.optim.SGD(fresh(), lr=0.1)
    of_a_class = outcome(lambda: hvd.DistributedOptimizer(plain, averaging=hvd.RandomPairs))
    say(case=f"{where}/refused/class", **of_a_class)
    s = Setting("delayed_gradients")
    with training(s) as (model, optimizer):
        for step in range(2):
            advance(s, step, model, optimizer)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in model)
            loss.backward()
            return loss

        say(case=f"{where}/refused/closure", **outcome(lambda: optimizer.step(closure)))
    for spec in ("delayed_gradients", "periodic_averaging:block_momentum=0.5", "noloco"):
        s = Setting(spec)
        with training(s) as (model, optimizer):
            advance(s, 0, model, optimizer)
            more = {"params": [torch.nn.Parameter(torch.zeros(2))]}
            call = lambda optimizer=optimizer, more=more: optimizer.add_param_group(more)  # noqa: E731
            say(case=f"{where}/refused/group/{spec}", **outcome(call))


def not_finite(where: str) -> None:
    """Super learner 0 has NaN from step 1 on and stays out."""
    for spec in (
        "periodic_averaging:period=2",
        "delay_by_one",
        "delayed_gradients",
        "synchronous_gossip:order=awc+random_pairs",
        "synchronous_gossip:order=atc+fixed_ring",
        "noloco:period=2",
        "gossip_pga:period=2",
    ):
        s = Setting(spec, steps=8)
        with training(s) as (model, optimizer):
            models = []
            for step in range(s.steps):
                if step == 1 and hvd.super_rank() == 0:
                    with torch.no_grad():
                        for p in model:
                            p.fill_(float("nan"))
                advance(s, step, model, optimizer)
                models.append(look(model))
            MODELS[f"{where}/nan/{spec}"] = np.array(models)
        say(case=f"{where}/nan/{spec}")


def mean_in_a_block(where: str) -> None:
    """What average_model moves a model by moves the start of GASLoC's block, too."""
    s = Setting("gasloc:period=50,rate=1,momentum=0.9")
    with training(s) as (model, optimizer):
        for step in range(3):
            advance(s, step, model, optimizer)
        rule = optimizer._averaging.rule
        with hvd.averaging_paused():
            held = zip(model, rule.tensors()["start"], strict=True)
            before = [m.detach() - start for m, start in held]
        hvd.average_model(model)
        apart = max(
            float((m.detach() - start - b).abs().max())
            for m, start, b in zip(model, rule.tensors()["start"], before, strict=True)
        )
        local = max(float(b.abs().max()) for b in before)
        say(case=f"{where}/mean in a block", apart=apart, local=local)
    for spec in ("gasloc:period=50", "noloco:period=50", "a2cid2"):
        s = Setting(spec)
        with training(s) as (model, optimizer):
            for step in range(3):
                advance(s, step, model, optimizer)
            with hvd.averaged(model):
                saved = optimizer.state_dict()
            with hvd.averaging_paused():
                own = optimizer.state_dict()
            facts = {"of mean": saved["averaging"]["of_mean"], "own": own["averaging"]["of_mean"]}
            with hvd.averaging_paused():
                optimizer.load_state_dict(saved)
            facts["anew"] = optimizer._averaging.restart
            with hvd.averaging_paused():
                optimizer.load_state_dict(own)
            say(case=f"{where}/of the mean/{spec}", again=not optimizer._averaging.restart, **facts)


def keep(folder: Path, spec: str, model: Any, optimizer: Any) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{spec.replace('+', '-')} {hvd.rank()}.pt")


def kept(folder: Path, spec: str, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{spec.replace('+', '-')} {rank}.pt", weights_only=True)


def save(folder: Path, where: str) -> None:
    """Half of a run, a checkpoint of each learner's own model, and the other half."""
    for spec in RESUMED:
        s = Setting(spec, steps=2 * HALF, momentum=0.9)
        with training(s) as (model, optimizer):
            models = []
            for step in range(s.steps):
                advance(s, step, model, optimizer)
                if step == HALF - 1:
                    with hvd.averaging_paused():
                        keep(folder, spec, model, optimizer)
                models.append(look(model))
            MODELS[f"{where}/saved/{spec}"] = np.array(models)
        say(case=f"{where}/saved/{spec}", digest=digest(model))
    pause = pauses(5e-3)
    for spec in FREE:
        s = Setting(spec, **KNOWN)
        with training(s, exchanges_per_step=2.0) as (model, optimizer):
            step, owed = train_until_owed(s, model, optimizer, pause)
            with hvd.averaging_paused():
                keep(folder, spec, model, optimizer)
                settled = look(model)
            for later in range(step, step + HALF):
                next(pause)
                advance(s, later, model, optimizer)
            wait_exchanged(optimizer)
            exchanges = metrics_of(optimizer._averaging)["exchanges"]
            hvd.average_model(model)
            MODELS[f"{where}/saved/{spec}"] = np.array([settled, look(model)])
        say(case=f"{where}/saved/{spec}", steps=step, owed=owed, exchanges=exchanges)


def train_until_owed(s: Setting, model: Any, optimizer: Any, pause: Any) -> tuple[int, bool]:
    """At least HALF steps, then on until the mean shows that something is on its way.

    Not after a step that ends with a mean of all: its models are equal.
    """
    rounds = optimizer._averaging.plan.in_step
    comm, sums, ends = (
        worlds.current().collectives.comm,
        np.zeros(INDEX.size),
        time.monotonic() + 60,
    )
    for step in itertools.count():
        next(pause)
        advance(s, step, model, optimizer)
        zero = torch.nn.ParameterList(torch.zeros_like(p) for p in model)
        flat = [g.reshape(-1) for g in gradients(s, step, zero)]
        sums -= s.lr * torch.cat(flat).cpu().numpy()[INDEX]
        if step < HALF or (rounds is not None and rounds.is_due(step)):
            continue
        apart = np.mean(comm.allgather(look(model) - sums), axis=0)
        owed = bool(np.abs(apart).max() > 1e-9)
        if owed or comm.bcast(time.monotonic() > ends):
            return step + 1, owed
    raise AssertionError


def resume(folder: Path, where: str) -> None:
    """Go on with as many super learners, each with its own file."""
    for spec in RESUMED:
        s, state = Setting(spec, momentum=0.9), kept(folder, spec, hvd.rank())
        with training(s) as (model, optimizer):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            models = []
            for step in range(HALF, 2 * HALF):
                advance(s, step, model, optimizer)
                models.append(look(model))
            MODELS[f"{where}/resumed/{spec}"] = np.array(models)
        held = state["optimizer"].get("averaging", {})
        facts = {"step": held.get("step"), "holds": sorted(held.get("rule", {}))}
        say(case=f"{where}/resumed/{spec}", digest=digest(model), **facts)
    for spec in FREE:
        resume_free(folder, f"{where}/resumed/{spec}", spec, [hvd.rank()])


def resume_free(folder: Path, case: str, spec: str, files: list[int]) -> None:
    """Train 20 steps on from the mean of the files; the mean of all then."""
    s, pause = Setting(spec, **KNOWN), pauses()
    states = [kept(folder, spec, rank) for rank in files]
    with training(s, exchanges_per_step=2.0) as (model, optimizer):
        with torch.no_grad():
            for p, values in zip(model, zip(*(x["model"].values() for x in states)), strict=True):  # noqa: B905
                p.copy_(torch.stack(values).mean(dim=0))
        if len(files) == 1:
            optimizer.load_state_dict(states[0]["optimizer"])
        for step in range(20):
            next(pause)
            advance(s, step, model, optimizer)
        wait_exchanged(optimizer)
        exchanges = metrics_of(optimizer._averaging)["exchanges"]
        hvd.average_model(model)
        MODELS[case] = look(model)[np.newaxis]
    say(case=case, exchanges=exchanges)


def main() -> None:
    folder, group = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    size = int(sys.argv[3])
    if group == "laws":
        for k in [k for k in (1, 2) if size % k == 0 and size > k]:
            with super_learners_of(k) as where:
                laws(where)
                identities(where)
                global_averages(where)
                distances(where)
                if hvd.super_size() == len(PACES):
                    at_events(where)
                refusals(where)
                synchronous(where)
    if group in ("laws", "alone"):
        with super_learners_of(size) as where:
            one_super_learner(where)
    if group == "later":
        with super_learners_of(1) as where:
            save(folder, where)
        with super_learners_of(1) as where:
            resume(folder, where)
        with super_learners_of(2) as where:
            for spec in ("random_pairs", "random_ring"):
                resume_free(folder, f"{where}/resumed/{spec}", spec, [0, 1, 2, 3])
            free_running(where, ONE_OF_A_KIND)
        with super_learners_of(1, nonfinite="skip") as where:
            not_finite(where)
            mean_in_a_block(where)
    if group == "nodes":
        with super_learners_of(2) as where:
            free_running(where, ("a2cid2",))
    rank = int(worlds_rank())
    np.savez(folder / f"{rank}.npz", index=INDEX, **MODELS)


def worlds_rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


if __name__ == "__main__":
    print("seed", SEED, file=sys.stderr)
    main()
