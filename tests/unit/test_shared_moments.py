"""Adaptive optimizers under gossip: shared moments, against their law and on gradients of known noise."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from hvd_adpsgd.engine.shard_memory import NONE, Arrivals
from hvd_adpsgd.errors import ModelMismatchError
from hvd_adpsgd.training import moment_passes, shared_moments
from hvd_adpsgd.training.shared_moments import Adaptive, SharedMoments, adaptive
from tests.lagging import Lagging, Scheduler

Made = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
SIZE, WEIGHT = 7, 0.5
OPTIMIZERS: dict[str, Made] = {
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "Adam, L2": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.9)),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "AdamW, maximize": lambda ps: torch.optim.AdamW(ps, lr=0.01, maximize=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "NAdam, L2": lambda ps: torch.optim.NAdam(ps, lr=0.01, weight_decay=0.1),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, weight_decay=0.1),
}


class Peer:
    """A super learner: two parameters, their optimizer, and the rule."""

    def __init__(self, made: Made, training: int, dtype: torch.dtype = torch.float64):
        self.parameters = [torch.nn.Parameter(torch.ones(SIZE, dtype=dtype)) for _ in range(2)]
        self.optimizer = made(self.parameters)
        kind = adaptive(self.optimizer)
        assert isinstance(kind, Adaptive)
        self.kind, self.arrivals = kind, NONE
        self.rule = SharedMoments(
            [("a", self.parameters[0]), ("b", self.parameters[1])],
            lambda: self.optimizer,
            kind,
            lambda: WEIGHT,
            lambda: training,
            lambda: self.arrivals,
        )
        self.rule.start()
        self.moments = [m for name, m in self.rule.averaged() if name.startswith("moment.")]

    @torch.no_grad()
    def step(
        self, gradients: list[torch.Tensor], added: list[torch.Tensor] | None = None, r: float = 1
    ) -> None:
        """A step with these gradients, in which exchanges add so much to the moments."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.rule.before_update()
        self.optimizer.step()
        self.rule.after_update()
        self.rule.pass_time(0)
        self.rule.before_corrections()
        self.arrivals = NONE if added is None else Arrivals(r, 1.0)
        if added is not None:
            torch._foreach_add_(self.moments, added)
        self.rule.after_corrections()

    def state(self, name: str) -> list[torch.Tensor]:
        return [self.optimizer.state[p][name] for p in self.parameters]


def drawn(random: torch.Generator, count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(SIZE, generator=random, dtype=torch.float64) for _ in range(count)]


def floats(random: torch.Generator) -> list[torch.Tensor]:
    return [t.float() for t in drawn(random)]


def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def decays(peer: Peer) -> tuple[float, float]:
    group = peer.optimizer.param_groups[0]
    return peer.kind.first_decay(group), peer.kind.second_decay(group)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_steps_with_the_second_moment_of_the_law(name: str) -> None:
    """The optimizer, given the law's v by hand, makes the same steps."""
    random, n = torch.Generator().manual_seed(1), 4
    peer, plain = Peer(OPTIMIZERS[name], n), Peer(OPTIMIZERS[name], n)
    first, second = decays(peer)
    own = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(2)]
    moment, cross, lacking = copy.deepcopy(own), copy.deepcopy(own), 1.0
    seen = not plain.kind.first
    for step in range(1, 30):
        gradients, added = drawn(random), drawn(random) if step % 3 else None
        for p, g in zip(plain.parameters, gradients, strict=True):
            p.grad = g.clone()
        group = plain.optimizer.param_groups[0]
        offered = copy.deepcopy(moment)
        wanted = []
        for i, (p, g) in enumerate(zip(plain.parameters, gradients, strict=True)):
            l2 = 0 if group.get("decoupled_weight_decay") else group["weight_decay"]
            g = g + l2 * p.detach()
            own[i] = second * own[i] + (1 - second) * g**2
            moment[i] = first * moment[i] + (1 - first) * (-g if group["maximize"] else g)
            weight = lacking ** max(1.0, math.log(0.95) / math.log(second))
            known = (1 - second**step) * (1 - weight) / (1 - lacking) if lacking < 1 else 0.0
            bound = (
                (1 - first) ** 2 / (1 - second) * sum((first**2 / second) ** k for k in range(step))
            )
            if plain.kind.first and step > 1:
                received = (moment[i] ** 2 > bound * own[i]) & bool(known)
                least = moment[i] ** 2 / bound / (known or 1)
                cross[i] = torch.where(received, torch.maximum(cross[i], least), cross[i])
                seen |= bool(received.any())
            x = known * cross[i] + weight * own[i]
            v = own[i] / n + (1 - 1 / n) * x.clamp(min=0)
            wanted.append(v if step > 1 else own[i])
            if step > 1:
                before = (v - (1 - second) * g**2) / second
                plain.optimizer.state[p][plain.kind.second].copy_(before)
                if plain.kind.first:
                    plain.optimizer.state[p][plain.kind.first].copy_(offered[i])
        plain.optimizer.step()
        for v, used in zip(wanted, plain.state(plain.kind.second), strict=True):
            torch.testing.assert_close(used, v)
        peer.step(gradients, added, r=1.5)
        torch.testing.assert_close(peer.parameters, plain.parameters)
        torch.testing.assert_close(peer.state(peer.kind.second), own)
        if added is not None:
            for i, c in enumerate(added):
                moment[i] = moment[i] + c
                if step > 1:
                    product = (
                        offered[i]
                        * (offered[i] + c / (1.5 * WEIGHT))
                        / (1 - first ** (step - 1)) ** 2
                    )
                    cross[i] = second * cross[i] + (1 - second) * product
            lacking *= second if step > 1 else 1
        torch.testing.assert_close(peer.moments, moment)
        if peer.kind.first:
            assert all(
                a is b for a, b in zip(peer.moments, peer.state(peer.kind.first), strict=True)
            )

    assert seen  # moments that only peers can have given


@pytest.mark.parametrize("q", [1.0, 0.9, 0.3, 0.0])
@pytest.mark.parametrize("bound", [1.3, math.inf])
def test_the_compiled_passes_compute_what_torchs_do(q: float, bound: float) -> None:
    """With torch's on tensors that have gaps."""
    random, results = torch.Generator().manual_seed(9), []
    drawn_once = [torch.randn(50, generator=random, dtype=torch.float64) for _ in range(9)]
    for gap in (1, 2):
        second, own, cross, g, p, m, before, offered, x = (
            [torch.zeros(50 * gap, dtype=torch.float64)[::gap].copy_(t)] for t in drawn_once
        )
        second[0].abs_()
        m[0][::3] = before[0][::3]
        lacking = [torch.tensor(q, dtype=torch.float64)]
        law = moment_passes.Second(0.999, 0.3, 1 / 8, 0.1, 0.9, bound, 51.0)
        moment_passes.correct(law, second, own, g, p, m, cross, lacking)
        product = moment_passes.Product(0.05, 2.0, 0.7)
        moment_passes.multiply(product, x, lacking, m, before, offered)
        results.append([t[0].clone() for t in (second, own, cross, x, lacking)])
    torch.testing.assert_close(*results)
    assert is_finite(results[0])


def test_without_peers_nothing_changes() -> None:
    """One super learner: the steps of the plain optimizer, to rounding."""
    random = torch.Generator().manual_seed(2)
    peer = Peer(OPTIMIZERS["AdamW"], 1)
    plain = [p.detach().clone().requires_grad_() for p in peer.parameters]
    optimizer = OPTIMIZERS["AdamW"](plain)  # type: ignore[arg-type]
    for _ in range(20):
        gradients = drawn(random)
        for p, g in zip(plain, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
        peer.step(gradients)
        torch.testing.assert_close(list(peer.parameters), plain)


def gossip(n: int, steps: int, gradient: float, noise: float) -> Iterator[list[Peer]]:
    """Train n super learners on constant gradients with noise; random pairs average their moments."""
    random = torch.Generator().manual_seed(n)
    peers = [
        Peer(lambda ps: torch.optim.AdamW(ps, lr=1e-3, betas=(0.9, 0.95)), n) for _ in range(n)
    ]
    for _ in range(steps):
        shown = [[m.clone() for m in peer.moments] for peer in peers]
        order = torch.randperm(n, generator=random).tolist()
        partner = {
            a: b
            for pair in zip(order[::2], order[1::2], strict=True)
            for a, b in (pair, pair[::-1])
        }
        for i, peer in enumerate(peers):
            added = [WEIGHT * (b - a) for a, b in zip(shown[i], shown[partner[i]], strict=True)]
            peer.step([gradient + noise * g for g in drawn(random)], added)
        yield peers


@pytest.mark.parametrize("n", [2, 8])
def test_products_estimate_the_square_of_the_mean_gradient(n: int) -> None:
    """E[x] is between G^2 and G^2 + k s^2 / n, with averaged moments, a step old; see SharedMoments."""
    steps, skipped, g, s = 300, 100, 0.5, 1.0
    found = torch.cat(
        [
            torch.stack([torch.cat(peer.rule.tensors()["cross"]) for peer in peers]).mean(0)[None]
            for step, peers in enumerate(gossip(n, steps, g, s))
            if step >= skipped
        ]
    )
    mean = found.mean().item()
    k = (1 - 0.9) / (1 + 0.9)
    # the mean moment has the variance k s^2 / n, so its square the standard deviation 2 g s sqrt(k / n); over
    # 14 elements and every 20th step (moments correlate over 10) the mean is within six of its own, but for
    # one time in 5e8
    error = 6 * 2 * g * s * (k / n / (14 * (steps - skipped) / 20)) ** 0.5
    assert g**2 - error <= mean <= g**2 + k * s**2 / n + error, (mean, error)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_loaded_moment_of_another_shape_is_named(key: str) -> None:
    """One of a single element, too, which torch would spread over all elements."""
    peer = Peer(OPTIMIZERS["AdamW"], 2)
    peer.step(drawn(torch.Generator().manual_seed(3)))
    state = copy.deepcopy(peer.optimizer.state_dict())
    state["state"][1][key] = torch.zeros(1)
    peer.optimizer.load_state_dict(state)
    with pytest.raises(ModelMismatchError, match=rf"{key} of 'b' has the shape \[1\], .* \[7\]"):
        peer.rule.reload()


def test_a_loaded_state_is_averaged_and_a_received_moment_stays() -> None:
    random = torch.Generator().manual_seed(3)
    peer, other = Peer(OPTIMIZERS["AdamW"], 2), Peer(OPTIMIZERS["AdamW"], 2)
    for _ in range(3):
        peer.step(drawn(random), drawn(random))
        other.step(drawn(random), drawn(random))
    state = copy.deepcopy(other.optimizer.state_dict())
    peer.optimizer.load_state_dict(state)
    peer.rule.reload()
    torch.testing.assert_close(peer.moments, other.moments)
    assert all(a is b for a, b in zip(peer.moments, peer.state("exp_avg"), strict=True))
    received = drawn(random)
    for moment, value in zip(peer.moments, received, strict=True):
        moment.copy_(value)
    peer.rule.received = True
    peer.optimizer.load_state_dict(state)
    peer.rule.reload()
    torch.testing.assert_close(peer.moments, received)
    torch.testing.assert_close(peer.state("exp_avg"), received)


def test_parameters_are_added() -> None:
    peer, random = Peer(OPTIMIZERS["AdamW"], 2), torch.Generator().manual_seed(4)
    peer.step(drawn(random), drawn(random))
    added = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    names = [name for name, _ in peer.rule.extend([("c", added)])]
    assert names == ["c", "moment.exp_avg.c"]
    peer.optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(3, dtype=torch.float64)
    peer.step(drawn(random), drawn(random))
    assert peer.optimizer.state[added]["exp_avg"] is peer.rule.averaged()[-1][1]
    assert len(peer.rule.tensors()["cross"]) == 3


def test_a_step_that_grad_scaler_skips_changes_no_state() -> None:
    """A fused optimizer unscales itself, and skips the update if GradScaler has found infinity."""
    random = torch.Generator().manual_seed(5)
    peer, scaled = (Peer(OPTIMIZERS["AdamW, fused"], 2, torch.float32) for _ in range(2))
    for _ in range(4):
        gradients, added = floats(random), floats(random)
        peer.step(gradients, added)
        scaled.optimizer.grad_scale = torch.tensor(8.0)
        scaled.optimizer.found_inf = torch.tensor(0.0)
        scaled.step([8 * g for g in gradients], added)
        torch.testing.assert_close(scaled.parameters, peer.parameters)
        torch.testing.assert_close(scaled.state("exp_avg_sq"), peer.state("exp_avg_sq"))

    def held() -> list[list[float]]:
        return [
            t.tolist() for t in (*scaled.parameters, *scaled.state("exp_avg_sq"), *scaled.moments)
        ]

    before = held()
    scaled.optimizer.found_inf = torch.tensor(1.0)
    scaled.step([torch.full((SIZE,), torch.inf) for _ in range(2)])
    assert held() == before


def test_a_state_that_was_emptied_begins_anew() -> None:
    random = torch.Generator().manual_seed(6)
    peer, fresh = Peer(OPTIMIZERS["AdamW"], 2), Peer(OPTIMIZERS["AdamW"], 2)
    for _ in range(3):
        peer.step(drawn(random), drawn(random))
    peer.optimizer.state.clear()
    with torch.no_grad():
        torch._foreach_copy_(peer.parameters, fresh.parameters)
    for _ in range(5):
        gradients, added = drawn(random), drawn(random)
        peer.step(gradients, added)
        fresh.step(gradients, added)
        torch.testing.assert_close(peer.parameters, fresh.parameters)


@pytest.mark.parametrize(
    "made",
    [
        lambda ps: torch.optim.Adam(ps, betas=(0.9, 0.0)),
        lambda ps: torch.optim.RMSprop(ps, alpha=0.0),
        lambda ps: torch.optim.Adam(ps, betas=(0.9, 0.5)),  # the bound grows without end
        lambda ps: torch.optim.Adam(ps, betas=(0.0, 0.9)),
    ],
)
def test_extreme_decays(made: Made) -> None:
    peer, random = Peer(made, 4, torch.float32), torch.Generator().manual_seed(7)
    for step in range(5):
        if step == 2:
            for its in peer.optimizer.state.values():
                its["step"] = torch.tensor(100_000.0)
        gradients, added = floats(random), floats(random)
        peer.step(gradients, added)
        assert is_finite(peer.parameters)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("AdamW", True), ("AdamW, fused", True), ("RMSprop", True), ("AdamW", False)],
)
def test_a_moment_of_a_peer_whose_square_is_infinite(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter stays, as in synchronous training with such a gradient; others train on."""
    if not compiled:
        monkeypatch.setattr(moment_passes, "_COMPILED", ())
    peer, random = Peer(OPTIMIZERS[name], 4, torch.float32), torch.Generator().manual_seed(8)
    for scale in (1, 1, 1e25, 1, 1, -1e28, 1, 1):
        gradients, added = floats(random), floats(random)
        for tensor in added:
            tensor[0] *= scale
        before = [p.detach().clone() for p in peer.parameters]
        peer.step(gradients, added)
        for p, old in zip(peer.parameters, before, strict=True):
            assert bool((p - old).abs().max() < 1) and bool((p - old)[1:].abs().min() > 0)
    assert is_finite(peer.state(peer.kind.second))


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((n, True) for n in ("AdamW", "AdamW, fused", "Adam, amsgrad", "RMSprop")), ("AdamW", False)],
)
def test_one_gradient_out_of_all_proportion(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second moments are torch's; the other super learner soon steps as before; one is named, once."""
    if not compiled:
        monkeypatch.setattr(moment_passes, "_COMPILED", ())
    monkeypatch.setattr(shared_moments, "_LOOK_EVERY", 16)
    random = torch.Generator().manual_seed(10)

    def made(ps: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](ps)
        decay = {"alpha": 0.97} if "RMS" in name else {"betas": (0.9, 0.97)}
        optimizer.param_groups[0].update(decay)
        return optimizer

    peers = [Peer(made, 2, torch.float32) for _ in range(2)]
    plain = [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(2)]
    torchs = made(plain)
    for step in range(800):
        shown = [[m.clone() for m in peer.moments] for peer in peers]
        for i, peer in enumerate(peers):
            gradients = floats(random)
            if i == 0 and step == 20:
                gradients[1][2] = 1e20
            if i == 0:
                for p, g in zip(plain, gradients, strict=True):
                    p.grad = g.clone()
                torchs.step()
            added = [WEIGHT * (b - a) for a, b in zip(shown[i], shown[1 - i], strict=True)]
            before = [p.detach().clone() for p in peer.parameters]
            peer.step(gradients, added)
            moved = [p.detach() - old for p, old in zip(peer.parameters, before, strict=True)]
            assert max(float(m.abs().max()) for m in moved) < 0.5
        if name != "RMSprop" and step % 10 == 0:  # whose weight decay depends on the parameters
            of_torch = [torchs.state[p]["exp_avg_sq"] for p in plain]
            torch.testing.assert_close(peers[0].state("exp_avg_sq"), of_torch, rtol=1e-4, atol=1e-5)
    assert all(is_finite(peer.rule.tensors()["cross"]) for peer in peers)
    cross, own = peers[1].rule.tensors()["cross"][1], peers[1].state(peers[1].kind.second)[1]
    assert bool((cross.abs() < 5 * own).all()), (cross, own)
    if "amsgrad" in name:
        assert bool((peers[1].state("max_exp_avg_sq")[1] < 5).all())
    (told,) = [record.getMessage() for record in caplog.records]
    assert "the second moment of b is" in told


def test_products_that_overflow_are_forgotten() -> None:
    for gap in (1, 2):
        tensors = [torch.zeros(3 * gap)[::gap] for _ in range(4)]
        cross, moment, before, offered = tensors
        offered.copy_(torch.tensor([1e25, -1e25, 0.0]))
        moment.copy_(torch.tensor([1e30, 1e30, 3e38]))
        for _ in range(3):
            law = moment_passes.Product(0.05, 2.0, 0.7)
            moment_passes.multiply(law, [cross], [torch.tensor(1.0)], [moment], [before], [offered])
        assert bool(torch.isfinite(cross).all()), cross
        assert cross[0] > 1e36 and cross[1] < -1e36


def test_amsgrad_remembers_no_more_of_peers_than_the_own_second_moment() -> None:
    """One overflow of a peer stops the element in that step only."""
    peer = Peer(OPTIMIZERS["Adam, amsgrad"], 4, torch.float32)
    random = torch.Generator().manual_seed(12)
    for step in range(60):
        added = floats(random)
        if step == 5:
            added[0][0] = 1e25
        if step == 6:
            added[0][0] = -peer.moments[0][0]
        peer.step(floats(random), added)
    assert all(bool((v < 10).all()) for v in peer.state("max_exp_avg_sq"))


def test_a_loaded_step_is_read_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when hvd.join() writes another learner's step into the tensor of this one's."""
    monkeypatch.setattr(shared_moments, "_is_on_device", lambda step: True)
    peer, random = Peer(OPTIMIZERS["AdamW"], 2), torch.Generator().manual_seed(13)
    for _ in range(3):
        peer.step(drawn(random), drawn(random))
    for step in peer.state("step"):
        step.fill_(6)
    peer.rule.reload()
    assert peer.rule._steps == [6, 6]


def test_a_step_that_a_device_skips_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule does not read the step of a fused optimizer on a GPU, where GradScaler's skips end."""
    monkeypatch.setattr(shared_moments, "_is_on_device", lambda step: True)
    lagging = Lagging(Scheduler(3))
    monkeypatch.setattr(shared_moments, "device_of", lambda tensor: lagging)
    random = torch.Generator().manual_seed(14)
    peer = Peer(OPTIMIZERS["AdamW, fused"], 2, torch.float32)
    peer.optimizer.grad_scale = torch.tensor(1.0)
    for skips in (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0):
        peer.optimizer.found_inf = torch.tensor(skips)
        peer.step(floats(random), floats(random))
    peer.rule.before_update()
    assert peer.rule._steps == [4, 4]
    assert [int(step) for step in peer.state("step")] == [3, 3]


def test_without_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.AdamW([parameter])
    kind = adaptive(optimizer)
    assert isinstance(kind, Adaptive)
    rule = SharedMoments(
        [], lambda: optimizer, kind, lambda: 0.5, lambda: 2, lambda: Arrivals(1, 1)
    )
    rule.start()
    rule.before_update()
    rule.after_update()
    rule.before_corrections()
    rule.after_corrections()


class Stepping(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    pass


class Hooked(torch.optim.AdamW):
    """As a subclass is when no AdamW was made before: torch puts its hooks into the class itself."""

    step = torch.optim.Optimizer.profile_hook_step(torch.optim.AdamW.step)
    step.hooked = True  # type: ignore[attr-defined]


def test_which_optimizers_can_share_their_moments() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    half = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    assert isinstance(adaptive(Renamed(parameters)), Adaptive)
    assert isinstance(adaptive(Hooked(parameters)), Adaptive)
    for optimizer, why in [
        (torch.optim.SGD(parameters, lr=0.1), "SGD is none of"),
        (torch.optim.Adamax(parameters), "Adamax is none of"),
        (Stepping(parameters), "a step() of its own"),
        (torch.optim.RMSprop(parameters, centered=True), "centered=True"),
        (torch.optim.AdamW(half), "16 bits"),
    ]:
        assert why in str(adaptive(optimizer))
