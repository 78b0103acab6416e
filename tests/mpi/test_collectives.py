"""Operations over all learners of several super learners, against NumPy and against Horovod."""

import inspect

import pytest

from tests.launcher import needs_horovod_inside, run_learners

pytestmark = pytest.mark.mpi

TWO = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": "2"}


def test_names_and_signatures_are_horovods() -> None:
    horovod = pytest.importorskip("horovod.torch")
    import hvd_adpsgd.torch as hvd

    names = [name for name in dir(horovod) if not name.startswith("_")]
    assert [name for name in names if name not in hvd.__all__] == []
    for name in names:
        theirs, ours = getattr(horovod, name), getattr(hvd, name)
        assert inspect.ismodule(ours) == inspect.ismodule(theirs), name
        assert inspect.isclass(ours) == inspect.isclass(theirs), name
        assert callable(ours) == callable(theirs), name
        if callable(theirs) and not inspect.isclass(theirs):
            assert_same_call(name, inspect.signature(theirs), inspect.signature(ours))


def assert_same_call(name: str, theirs: inspect.Signature, ours: inspect.Signature) -> None:
    """Whatever Horovod's accepts, ours does, with the same meaning and default."""
    if name in ("init", "shutdown"):  # Horovod's say (*args, **kwargs), handed on to these
        handed_on = {"init": ["comm", "process_sets"], "shutdown": []}[name]
        assert [p.name for p in ours.parameters.values() if p.kind != p.KEYWORD_ONLY] == handed_on
        return
    for parameter in theirs.parameters.values():
        same = ours.parameters[parameter.name]
        assert same.kind == parameter.kind, name
        if parameter.name != "process_set":
            assert same.default == parameter.default, name
    extra = list(ours.parameters.values())[len(theirs.parameters) :]
    assert all(p.kind == inspect.Parameter.KEYWORD_ONLY for p in extra), name


def test_tensors_against_numpy_groups_and_asynchronous_operations() -> None:
    """Every dtype, sizes 0, 1, 7 and 10**5 + 1, and shapes that are no plain vector.

    In groups the same values as one by one; asynchronous ones run in the order in which all are asked for.
    One that not all ask for ends with the script.
    """
    program = """
        import numpy as np, torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        wrong = []
        def check(what, got, want):
            got, want = (x if isinstance(x, (list, tuple)) else [x] for x in (got, want))
            if len(got) != len(want) or not all(g.dtype == w.dtype and torch.equal(g, w)
                                                for g, w in zip(got, want)):
                wrong.append(f"{what}: {[g.flatten()[:3] for g in got]} {[w.flatten()[:3] for w in want]}")

        REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8,
                   torch.uint8, torch.int16, torch.int32, torch.int64]
        MOVED = [*REDUCED, torch.bool, torch.complex64]
        def values(n, seed):  # small integers: exact in every dtype, in any order of summation
            return np.random.default_rng([n, seed]).integers(0, 5, n)
        def tensor(n, r, dtype):
            return torch.from_numpy(values(n, r)).to(dtype)

        for n in (0, 1, 7, 10**5 + 1):
            everything = np.stack([values(n, r) for r in range(size)])
            for dtype in REDUCED if n < 8 else REDUCED[:4]:
                mine = tensor(n, rank, dtype)
                for op, how in [(hvd.Sum, everything.sum(0)), (hvd.Min, everything.min(0)),
                                (hvd.Max, everything.max(0)), (hvd.Product, everything.prod(0))]:
                    if n > 8 and op != hvd.Sum:
                        continue
                    if op == hvd.Product and dtype in (torch.int8, torch.uint8):
                        continue  # overflows
                    check(f"allreduce {op} {dtype} {n}", hvd.allreduce(mine, op=op),
                          torch.from_numpy(how).to(dtype))
            for dtype in MOVED if n < 8 else MOVED[:4]:
                mine = tensor(n, rank, dtype)
                check(f"broadcast {dtype} {n}", hvd.broadcast(mine, 2), tensor(n, 2, dtype))
                part = torch.cat([mine] * (rank % 3)) if rank % 3 else mine[:0]
                want = torch.cat([torch.cat([tensor(n, r, dtype)] * (r % 3) + [mine[:0]])
                                  for r in range(size)])
                check(f"allgather {dtype} {n}", hvd.allgather(part), want)

        # the mean, with factors; integers are cut off as Horovod does
        x = torch.arange(4.0) + rank
        check("average", hvd.allreduce(x), torch.arange(4.0) + 1.5)
        check("factors", hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
              (torch.arange(4.0) * 4 + 6) * 2)
        check("cut off", hvd.allreduce(torch.tensor([-3 - rank])), torch.tensor([-4]))
        check("half sums in float", hvd.allreduce(torch.tensor([40000.0 if rank < 2 else -40000.0],
              dtype=torch.half)), torch.zeros(1).half())
        check("fp16 compression", hvd.allreduce(x, compression=hvd.Compression.fp16),
              torch.arange(4.0) + 1.5)

        # in place keeps the tensor; a view that is not contiguous is written through
        base = torch.zeros(5, 3) + rank
        view = base.t()[1:]
        same = hvd.allreduce_(view, op=hvd.Sum) is view
        want = torch.zeros(5, 3) + rank
        want[:, 1:] = 6
        check("in place", base, want)
        same &= hvd.broadcast_(view, 3) is view
        check("broadcast in place", base, want)
        base[0, 1] = 100 + rank
        hvd.broadcast_(view, 3)
        check("broadcast in place, root's", base[0, 1], torch.tensor(103.0))
        check("0-dim", hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum), torch.tensor(6.0))
        check("0-dim broadcast", hvd.broadcast(torch.tensor(rank), 1), torch.tensor(1))
        check("inner", hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum,
              process_set=hvd.super_learner), torch.tensor([1.0 if rank < 2 else 5.0]))
        check("inner root", hvd.broadcast(torch.tensor([rank]), 1, process_set=hvd.super_learner),
              torch.tensor([1 if rank < 2 else 3]))

        # gradients, as Horovod defines them
        w = torch.full((2,), float(rank), requires_grad=True)
        (hvd.allreduce(w, op=hvd.Sum) * (rank + 1)).sum().backward()
        check("grad allreduce", w.grad, torch.full((2,), 10.0))
        w = torch.full((rank + 1, 2), float(rank), requires_grad=True)
        gathered = hvd.allgather(w)
        (gathered * torch.arange(10.0)[:, None] * (rank + 1)).sum().backward()
        start = sum(range(rank + 1))
        want = torch.arange(10.0)[start:start + rank + 1, None].expand(-1, 2) * 2.5
        check("grad allgather", w.grad, want.contiguous())
        w = torch.ones(3, requires_grad=True)
        (hvd.broadcast(w, 1) * (rank + 1)).sum().backward()
        check("grad broadcast", w.grad, torch.full((3,), 2.5 if rank == 1 else 0.0))
        torch.manual_seed(rank)
        shapes = [((3,), torch.float32), ((), torch.float64), ((2, 300), torch.bfloat16),
                  ((0,), torch.int64), ((70_001,), torch.float32), ((5,), torch.int64)]
        group = [torch.randint(0, 5, shape).to(dtype) for shape, dtype in shapes]
        copies = lambda: [t.clone() for t in group]
        each = [hvd.allreduce(t, op=hvd.Sum) for t in group]
        means = [hvd.allreduce(t) for t in group]
        big = [hvd.allreduce(t, op=hvd.Max) for t in group]
        check("grouped", hvd.grouped_allreduce(group, op=hvd.Sum), each)
        check("grouped max", hvd.grouped_allreduce(group, op=hvd.Max), big)
        small = hvd.grouped_allreduce(group[:2], op=hvd.Min)
        check("grouped small", small, [hvd.allreduce(t, op=hvd.Min) for t in group[:2]])
        inplace = copies()
        same &= hvd.grouped_allreduce_(inplace, op=hvd.Sum) is inplace
        check("grouped in place", inplace, each)
        rows = [t for t in group if t.dim()]
        gathered = [hvd.allgather(t) for t in rows]
        check("grouped gather", hvd.grouped_allgather(rows), gathered)
        w = [torch.full((2,), float(rank), requires_grad=True) for _ in range(2)]
        a, b = hvd.grouped_allreduce(w, op=hvd.Sum)
        ((a + 2 * b) * (rank + 1)).sum().backward()
        check("gradients", [v.grad for v in w], [torch.full((2,), 10.0), torch.full((2,), 20.0)])
        w = torch.full((1,), float(rank), requires_grad=True)
        (hvd.grouped_allgather([w, 2 * w])[1] * torch.arange(4.0)).sum().backward()
        check("gradient of a gather", w.grad, torch.tensor([2.0 * rank]))

        x = group[4]
        asked = [hvd.allreduce_async(t, op=hvd.Sum) for t in group]
        asked += [hvd.allgather_async(x), hvd.broadcast_async(x, 1), hvd.grouped_allreduce_async(group)]
        changed, root, several = x.clone(), x.clone(), copies()
        asked += [hvd.allreduce_async_(changed, op=hvd.Sum), hvd.broadcast_async_(root, 2)]
        asked += [hvd.grouped_allreduce_async_(several, op=hvd.Sum), hvd.grouped_allgather_async(rows)]
        between = hvd.allreduce(x, op=hvd.Sum)  # after all of them
        done = [hvd.poll(handle) for handle in asked]
        got = [hvd.synchronize(handle) for handle in reversed(asked)][::-1]
        check("asynchronous", got[:6], each)
        check("gather", got[6], gathered[3])
        check("broadcast", got[7], hvd.broadcast(x, 1))
        check("group", got[8], means)
        check("in place", changed, each[4])
        check("broadcast in place", root, hvd.broadcast(x, 2))
        check("group in place", several, each)
        check("grouped gather", got[12], gathered)
        check("between", between, each[4])
        same &= got[9] is changed and got[10] is root and got[11] is several
        again = hvd.synchronize(asked[0])
        check("again", again, each[0])
        inner = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, process_set=hvd.super_learner)
        check("inner", hvd.synchronize(inner), torch.tensor([2.0]))
        lost = hvd.allreduce_async(x)  # never waited for
        say(rank=rank, wrong=wrong, same=same, done=done)
        if rank < 3:
            handle = hvd.allreduce_async(torch.ones(3))
        hvd.shutdown()
        say(rank=rank, ends=True)
    """
    result = run_learners(4, program, env=TWO | {"HVD_ADPSGD_LEAVE_DEADLINE_S": "2"})
    said = result.by_rank()
    assert [facts["wrong"] for facts in said] == [[]] * 4
    assert all(facts["same"] and facts["done"] == [True] * 13 for facts in said), said
    assert [facts.get("ends") for facts in said] == [True] * 4, result.report()
    assert result.returncode == 75, result.report()
    assert "not all learners have called it" in result.stderr


STATES = """
    import torch
    import hvd_adpsgd.torch as hvd
    from tests.mpi.programs.learner import outcome
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    root = size - 1

    def trained(kind, steps, **options):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = kind(model.parameters(), lr=0.1 * (rank + 1), **options)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    def flat(value):
        if isinstance(value, dict):
            return [x for key in sorted(value, key=str) for x in flat(value[key])]
        if isinstance(value, (list, tuple)):
            return [x for one in value for x in flat(one)]
        return value.double().flatten().tolist() if torch.is_tensor(value) else [str(value)]

    facts = {}
    for name, kind, options in [("sgd", torch.optim.SGD, {"momentum": 0.9}),
                                ("adam", torch.optim.Adam, {"amsgrad": True})]:
        # only the root has stepped: the others' states are empty
        model, optimizer = trained(kind, 3 if rank == root else 0, **options)
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        facts[name] = flat(model.state_dict()) + flat(optimizer.state_dict())
        facts[name + " steps on"] = []
        for _ in range(2):
            torch.manual_seed(5)
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
        facts[name + " steps on"] = flat(model.state_dict())

    # wrapped: a class made by Horovod's DistributedOptimizer
    model, plain = trained(torch.optim.SGD, 2 if rank == root else 0, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(wrapped, root_rank=root)
    facts["wrapped"] = flat(wrapped.state_dict())
    named = list(model.named_parameters())
    hvd.broadcast_parameters(named, root_rank=0)
    hvd.broadcast_parameters([p.data for _, p in named], root_rank=1)
    facts["lists"] = flat([p.data for _, p in named])
    facts["object"] = flat(hvd.broadcast_object({"a": [rank], "b": "x" * 10000}, 1, name="o"))
    facts["objects"] = flat(hvd.allgather_object(("x" * rank, rank)))
    facts["in my super learner"] = hvd.broadcast_object(rank, 0, process_set=hvd.super_learner)
    facts["group"] = optimizer.param_groups[0]["lr"]

    class Odd(torch.nn.Module):
        def __init__(self, **buffers):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), 1.0 + rank))
            for name, buffer in buffers.items():
                self.register_buffer(name, buffer)

    def error(call):
        return list(outcome(call).values())

    class Extra(Odd):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    facts["extra state"] = error(lambda: hvd.broadcast_parameters(Extra().state_dict(), 0))
    sparse = Odd(buffer=torch.eye(2).to_sparse())
    facts["sparse"] = error(lambda: hvd.broadcast_parameters(sparse.state_dict(), 0))
    if hvd.super_size() > 1:  # Horovod refuses complex tensors
        twist = torch.tensor([1 + 2j]) * (1 + rank)
        odd = Odd(conj=twist.conj(), imag=twist.conj().imag)
        hvd.broadcast_parameters(odd.state_dict(), 1)
        facts["conj"] = [str(odd.conj.tolist()), odd.imag.tolist()]
        facts["sums"] = flat(hvd.allreduce(twist.conj().imag, op=hvd.Sum, name="negative"))
        facts["gathered"] = flat(hvd.allgather(twist.conj().imag, name="negatives"))
        grid = torch.full((2, 1), float(rank)).expand(2, 3)  # Horovod refuses these, too
        hvd.broadcast_parameters({"grid": grid}, 1)
        facts["expanded"] = flat(grid)
        odd = Odd(grid=torch.arange(3.0) if rank == 1 else torch.ones(1).expand(3))
        facts["not one number"] = error(lambda: hvd.broadcast_parameters(odd.state_dict(), 1))

    # vectors of either sign: their mean is 0
    normed = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3))
    hooked = torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3))
    both = torch.nn.Sequential(normed, hooked, torch.nn.BatchNorm1d(3))
    hvd.broadcast_parameters(both.state_dict(), 0)
    vectors = [b for name, b in both.named_buffers() if name[-2:] in ("_u", "_v")]
    for vector in vectors:
        vector.mul_(-1.0 if rank * 2 >= hvd.size() else 1.0)
    both[2].running_mean += hvd.super_rank()
    own = torch.cat(vectors).tolist()
    with hvd.averaged(both, buffers=True):
        facts["normed"] = bool(both.eval()(torch.ones(2, 3)).isfinite().all())
        facts["statistic"] = flat(both[2].running_mean)
        kept = torch.cat(vectors).tolist() == own
    hvd.average_model(both)
    facts["vectors"] = [len(vectors), kept and torch.cat(vectors).tolist() == own]

    scripted = torch.jit.script(torch.nn.BatchNorm1d(2))
    scripted.weight.data.fill_(1.0 + hvd.super_rank())
    with hvd.averaged(scripted, buffers=True):
        facts["scripted"] = flat(scripted.weight.data)
        scripted.half()
    facts["scripted back"] = [str(scripted.running_mean.dtype), float(scripted.weight[0]) - hvd.super_rank()]

    # the script may do with a tensor afterwards what it could before: resize, share, alias
    def allowed(tensors):
        return [(t.untyped_storage().resizable(), t.is_shared(), t.untyped_storage().data_ptr(), t.stride(),
                 t._base is None, t.untyped_storage().nbytes()) for t in tensors]

    def entered(context):
        with context:
            pass

    def async_(call, tensor):
        return hvd.synchronize(call(tensor))

    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    mine[0].weight.data.share_memory_()
    mine.register_buffer("mask", torch.full((2,), -torch.inf))
    view = torch.ones(4, 3).t()
    view = view if hvd.super_size() > 1 else view.contiguous()  # Horovod refuses strides
    mine[0].register_parameter("view", torch.nn.Parameter(view))
    wrapped = hvd.DistributedOptimizer(
        torch.optim.Adam(mine.parameters(), lr=0.5), named_parameters=mine.named_parameters(), buffers=mine
    )
    def step():
        wrapped.zero_grad()
        (mine(torch.ones(2, 3)).sum() + mine[0].view.sum()).backward()
        wrapped.step()

    def restored(how):
        import io
        file = io.BytesIO()
        with how:
            torch.save((mine.state_dict(), wrapped.state_dict()), file)

    x, y = torch.ones(4) * rank, torch.arange(200_000.0)
    OPERATIONS = {
        "allreduce": lambda: hvd.allreduce(x), "allreduce_": lambda: hvd.allreduce_(x),
        "large": lambda: hvd.allreduce(y), "allreduce_async": lambda: async_(hvd.allreduce_async, x),
        "allreduce_async_": lambda: async_(hvd.allreduce_async_, x),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([x, y]),
        "grouped_allreduce_": lambda: hvd.grouped_allreduce_([x, y]),
        "allgather": lambda: hvd.allgather(x), "large gather": lambda: hvd.allgather(y),
        "allgather_async": lambda: async_(hvd.allgather_async, x),
        "grouped_allgather": lambda: hvd.grouped_allgather([x, y]),
        "broadcast": lambda: hvd.broadcast(x, 1), "broadcast_": lambda: hvd.broadcast_(x, 1),
        "broadcast_async": lambda: async_(lambda t: hvd.broadcast_async(t, 1), x),
        "broadcast_async_": lambda: async_(lambda t: hvd.broadcast_async_(t, 1), x),
        "allgather_object": lambda: hvd.allgather_object(x),
        "broadcast_object": lambda: hvd.broadcast_object(x),
        "inner": lambda: hvd.allreduce_(x, process_set=hvd.super_learner),
        "inner broadcast": lambda: hvd.broadcast_(y, 0, process_set=hvd.super_learner),
        "inner gather": lambda: hvd.allgather(y, process_set=hvd.super_learner),
        "broadcast_parameters": lambda: hvd.broadcast_parameters(mine.state_dict(), 0),
        "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(wrapped, 0),
        "step": step, "averaged": lambda: entered(hvd.averaged(mine)),
        "averaged buffers": lambda: entered(hvd.averaged(mine, buffers=True)),
        "average_model": lambda: hvd.average_model(mine), "distance": lambda: hvd.consensus_distance(mine),
        "saved": lambda: restored(hvd.averaging_paused()), "saved mean": lambda: restored(hvd.averaged(mine)),
        "admit": lambda: hvd.admit(mine, wrapped) if hvd.super_size() > 1 else None,
        "metrics": hvd.metrics, "loaded": lambda: wrapped.load_state_dict(wrapped.state_dict()),
    }
    step()
    facts["changed"], facts["not their own"] = [], []
    for name, operation in OPERATIONS.items():
        tensors = [x, y, *mine.parameters(), *mine.buffers()]
        if name not in ("broadcast_optimizer_state", "loaded"):  # these may give the moments new tensors
            tensors += [t for its in wrapped.state.values() for t in its.values()]
        tensors += [p.grad for p in mine.parameters()]
        before = allowed(tensors)
        found = operation()
        facts["changed"] += [] if allowed(tensors) == before else [name]
        given = found if isinstance(found, list) else [found]
        for tensor in (t for t in given if torch.is_tensor(t)):
            storage = tensor.untyped_storage()
            if not storage.resizable() or storage.nbytes() != tensor.nbytes:
                facts["not their own"] += [name]

    # of a script that makes its tensors on a device by default, here on one without memory
    plain = Odd(buffer=torch.ones(2) * rank)
    plain.weight.data.fill_(1.0)
    data = torch.arange(2.0) + rank
    torch.set_default_device("meta")
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5), named_parameters=plain.named_parameters()
    )
    for _ in range(2):
        plain.weight.grad = torch.ones_like(plain.weight)
        wrapped.step()
    hvd.broadcast_parameters(plain.state_dict(), 0)
    hvd.broadcast_optimizer_state(wrapped, 0)
    with hvd.averaged(plain, buffers=True):
        hvd.consensus_distance(plain)
    hvd.average_model(plain)
    facts["default device"] = flat(hvd.allgather(data)) + flat(hvd.allreduce(data)) + flat(plain.buffer)
    torch.set_default_device(None)
    say(rank=rank, facts=facts)
"""


@pytest.mark.parametrize(("n", "k"), [(4, 2), (2, 2)])
def test_states_and_objects(n: int, k: int) -> None:
    """All learners end up with the root's; with one super learner through Horovod."""
    env = {"HVD_ADPSGD_SUPER_LEARNER_SIZE": str(k)}
    said = run_learners(n, STATES, env=env).checked().by_rank()
    facts = [one["facts"] for one in said]
    assert len(facts) == n
    assert [one.pop("in my super learner") for one in facts] == [
        k * (rank // k) for rank in range(n)
    ]
    for one in facts[1:]:
        assert one == facts[0]
    assert facts[0]["object"] == ["1", "x" * 10000]
    assert facts[0]["objects"] == [v for rank in range(n) for v in ("x" * rank, str(rank))]
    assert facts[0]["group"] == pytest.approx(0.1 * n)
    assert len(facts[0]["adam"]) > 100
    kind, text = facts[0]["extra state"]
    assert kind == "ConfigError" and "'_extra_state' is a dict" in text
    kind, text = facts[0]["sparse"]
    assert kind == "ConfigError" and "'buffer' has the layout torch.sparse_coo" in text
    if n > k:
        assert facts[0]["conj"] == ["[(2-4j)]", [-4.0]]
        assert facts[0]["sums"] == [-4.0 * n], "the root's wherever the memory is"
        assert facts[0]["gathered"] == [-4.0] * n
        assert facts[0]["expanded"] == [1.0] * 6
        kind, text = facts[0].pop("not one number")
        assert kind == "ModelMismatchError" and "grid of shape [3] is expanded" in text
    assert facts[0]["changed"] == [], "a tensor can no longer be resized, or is another one"
    assert facts[0]["not their own"] == [], "a result that cannot be resized, or is a part of more"
    assert facts[0]["normed"] and facts[0]["vectors"] == [4, True]
    assert facts[0]["statistic"] == [(n // k - 1) / 2] * 3
    assert facts[0]["scripted"] == [1 + (n // k - 1) / 2] * 2
    assert facts[0]["scripted back"] == ["torch.float32", 1.0]
    assert facts[0]["default device"][: 2 * n] == [i + rank for rank in range(n) for i in (0, 1)]


def test_misuse_is_an_error_on_all_learners() -> None:
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        rank = hvd.rank()
        odd = rank == 3

        # a model that no optimizer averages, but a plain one trains; then one that is not trained
        own, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        for model in (own, copy):
            model.weight.data.fill_(float(hvd.super_rank()))
        with hvd.averaged(copy):
            pass
        plain = torch.optim.SGD(own.parameters(), lr=0.1)
        with hvd.averaged(own, copy):
            pass

        def error(call):
            try:
                call()
            except Exception as error:
                base = isinstance(error, hvd.HorovodInternalError), isinstance(error, ValueError)
                return [type(error).__name__, str(error), *base]
        x = torch.ones(4)
        facts = {
            "shape": error(lambda: hvd.allreduce(torch.ones(5 if odd else 4), name="loss")),
            "dtype": error(lambda: hvd.allreduce_(x.double() if odd else x)),
            "op": error(lambda: hvd.allreduce(x, op=hvd.Max if odd else hvd.Min)),
            "kind": error(lambda: hvd.barrier() if odd else hvd.broadcast(x, 0)),
            "rows": error(lambda: hvd.allgather(torch.ones(2, 3 if odd else 4))),
            "root": error(lambda: hvd.broadcast(x, 1 if odd else 0)),
            "range": error(lambda: hvd.broadcast_(x, 4)),
            "number": error(lambda: hvd.broadcast_parameters([x, x] if odd else [x], 0)),
            "no rows": error(lambda: hvd.allgather(torch.tensor(1.0))),
            "bool": error(lambda: hvd.allreduce(torch.tensor([True]))),
            "adasum": error(lambda: hvd.allreduce(x, op=hvd.Adasum)),
            "lbfgs": error(lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([x]), 0)),
            "params": error(lambda: hvd.broadcast_parameters("x", 0)),
            "set": error(lambda: hvd.allreduce(x, process_set=hvd.ProcessSet([0, 1]))),
            "async": error(lambda: hvd.synchronize(hvd.allreduce_async(x.double() if odd else x))),
            "grouped": error(lambda: hvd.grouped_allreduce([x, x[:2 - odd]], op=hvd.Sum)),
            "none": error(lambda: hvd.grouped_allreduce_async([])),
            "alltoall": error(lambda: hvd.alltoall_async(x)),
            "scatter": error(lambda: hvd.reducescatter(x)),
            "timeline": error(lambda: hvd.start_timeline("nowhere")),
            "elastic": error(lambda: hvd.elastic.ElasticSampler(range(4))),
        }
        handle = hvd.allreduce_async(x * rank, op=hvd.Sum, process_set=hvd.super_learner)
        facts["inner"] = hvd.synchronize(handle).tolist()
        facts["split"] = [t.tolist() for t in hvd.alltoall(
            torch.arange(4) + 10 * rank, torch.tensor([1, 3], dtype=torch.int32),
            process_set=hvd.super_learner)]
        last = 2
        if rank != last:
            hvd.barrier(hvd.global_process_set)
        else:
            hvd.barrier()
            clock = time.time
            time.time = lambda: clock() + 3600  # joins last by the clocks of the hosts
        facts["join"] = hvd.join()
        say(rank=rank, facts=facts)
        if rank == 0:  # the others end: there is one model left
            with hvd.averaged(torch.nn.Linear(2, 1)):
                pass
    """
    result = run_learners(4, program, env=TWO).checked()
    assert result.stderr.count("the models differ, and SGD, which trains them,") == 1, (
        result.report()
    )
    assert "averaged: the mean is that of 1 of 2 models" in result.stderr, result.report()
    facts = [one["facts"] for one in result.by_rank()]
    mismatches = {
        "shape": ("allreduce", "[4] on learner 0", "[5] on learner 3"),
        "dtype": ("float32", "float64", "learner 3"),
        "op": ("Min", "Max", "learner 3"),
        "kind": ("broadcast", "barrier", "learner 3"),
        "rows": ("[4]", "[3]", "learner 3"),
        "root": ("root", "0 on learner 0", "1 on learner 3"),
        "number": ("1 on learner 0", "2 on learner 3"),
        "async": ("allreduce", "float32", "float64", "learner 3"),
        "grouped": ("grouped_allreduce", "tensor 1", "[2] on learner 0", "[1] on learner 3"),
    }
    for what, words in mismatches.items():
        for one in facts:
            kind, text, is_horovods, is_value_error = one[what]
            assert kind == "CollectiveMismatchError" and is_horovods and is_value_error
            assert all(word in text for word in words), text
    refusals = {
        "range": ("ConfigError", "< 4"),
        "no rows": ("ConfigError", "unsqueeze"),
        "bool": ("ConfigError", "torch.bool"),
        "adasum": ("InnerOnlyError", "Adasum"),
        "lbfgs": ("ConfigError", "LBFGS"),
        "params": ("ConfigError", "str"),
        "set": ("InnerOnlyError", "hvd.super_learner"),
        "none": ("ConfigError", "at least one tensor"),
        "alltoall": ("InnerOnlyError", "process_set=hvd.super_learner"),
        "scatter": ("InnerOnlyError", "HVD_ADPSGD_AVERAGING=synchronous"),
        "timeline": ("InnerOnlyError", "HVD_ADPSGD_AVERAGING=synchronous"),
        "elastic": ("InnerOnlyError", "hvd.admit()"),
    }
    for what, (kind, word) in refusals.items():
        for one in facts:
            assert one[what][0] == kind and word in one[what][1], one[what]
            assert one[what][3], "a ValueError, as in Horovod"
    assert [one["inner"] for one in facts] == [[1.0] * 4] * 2 + [[5.0] * 4] * 2
    assert facts[0]["split"][0] == [0, 10] and facts[3]["split"][0] == [21, 22, 23, 31, 32, 33]
    assert [one["join"] for one in facts] == [2] * 4


@needs_horovod_inside("calls of horovod.torch alone, and process sets")
def test_one_super_learner_is_plain_horovod() -> None:
    """The same calls through both modules give the same bits, also those that only Horovod has."""
    program = """
        import torch
        import horovod.torch as horovod
        import hvd_adpsgd.torch as hvd
        hvd.init(process_sets=[horovod.ProcessSet([1])])
        rank = hvd.rank()
        torch.manual_seed(rank)
        x = torch.randn(1000)
        y = torch.randn(rank + 2, 3)
        def run(m):
            hvd.barrier()
            s = m.global_process_set
            return [m.allreduce(x, name="a"), m.allreduce_(x.clone(), op=m.Sum, process_set=s),
                    m.allgather(y), m.broadcast(x, 1, process_set=s), m.grouped_allreduce([x, y[:2]])[1],
                    m.reducescatter(x), m.synchronize(m.allreduce_async(x, op=m.Adasum, process_set=s)),
                    m.alltoall(x)]
        say(rank=rank, same=[torch.equal(a, b) for a, b in zip(run(horovod), run(hvd))],
            place=[hvd.rank(), hvd.size(), horovod.rank(), horovod.size()])
    """
    for facts in run_learners(2, program).checked().by_rank():
        assert facts["same"] == [True] * 8
        assert facts["place"] == [facts["rank"], 2] * 2


def test_gradients_that_horovod_alone_does_not_reduce() -> None:
    program = """
        import torch
        import hvd_adpsgd.torch as hvd
        hvd.init()
        rank, same = hvd.rank(), []
        for groups in (None, 1):
            ps = [torch.nn.Parameter(torch.ones(6, 5).t()), torch.nn.Parameter(torch.ones(7).bfloat16())]
            o = hvd.DistributedOptimizer(torch.optim.SGD(ps, lr=1.0), groups=groups,
                named_parameters=[("strided", ps[0]), ("brain", ps[1])])
            for _ in range(2):
                o.zero_grad(set_to_none=False)
                ((ps[0] * torch.arange(30.).view(5, 6)).sum() * (1 + rank) + ps[1].sum() * rank).backward()
                o.step()
            same += [torch.equal(ps[0], 1 - 3 * torch.arange(30.).view(5, 6)),
                     torch.equal(ps[1], torch.zeros(7).bfloat16()), ps[1].grad.dtype == torch.bfloat16]
        say(rank=rank, same=same, ranks=hvd.global_process_set.ranks, join=hvd.join() in (0, 1),
            isinstance=isinstance(hvd.global_process_set, hvd.ProcessSet))
    """
    for facts in run_learners(2, program).checked().by_rank():
        assert facts["same"] == [True] * 6
        assert facts["ranks"] == [0, 1]
        assert facts["join"] and facts["isinstance"]
