"""The law of exchange_share="auto" against plants that know what an exchange costs, with seeded noise."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import cast

import pytest

from hvd_adpsgd.config import FIRST_SHARE, Config
from hvd_adpsgd.engine.engine import Engine
from hvd_adpsgd.formats import BY_NAME, OWN, Format
from hvd_adpsgd.strategies.share_control import FLOOR, LINK, ShareControl, Spent
from hvd_adpsgd.training.auto_share import AutoShare, Used, cost_s
from hvd_adpsgd.training.timeline import Counters

BOUND = 0.03
# bytes of an exchange in so many bits, of those in float32: with every 16th offer in 16 bits
BYTES = {0: 1.0, 8: 0.267, 4: 0.15}
GB, MB = 1.25e9, 1.25e6  # bytes/s of 10 Gb/s and of 10 Mb/s


@dataclasses.dataclass
class Plant:
    """A super learner: steps of `step_s`, exchanges of a model of `nbytes`, each with noise.

    Attributes:
        model_s: what an exchange of the whole model costs its steps.
        fixed_s: what an exchange costs whatever its share.
        noise: standard deviation of the logarithm of each cost.
        square: squared distance of the models in an exchange.
        peers: the share that peers want.
        bits: whether bits are chosen, too.
        few_cost: by how much few bits raise what an exchange costs.
        few_s: time that an exchange of the whole model takes at least in few bits.
        on_host: all exchanges have all bits.
    """

    step_s: float = 0.1
    model_s: float = 0.04
    fixed_s: float = 0.0
    nbytes: float = 4e7
    bytes_per_s: float = GB
    due: float = 1.0
    noise: float = 0.3
    square: float = 1.0
    peers: float = 1.0
    bits: bool = False
    few_cost: float = 1.0
    few_s: float = 0.0
    on_host: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.control = ShareControl(BOUND, self.due, chooses_bits=self.bits)
        self.draw = random.Random(self.seed)
        self.spent = Spent()
        self.credit, self.sends_s = 0.0, 0.0
        self.costs: list[float] = []  # of each step, as a part of it
        self.used: list[float] = []  # of the link in each step
        self.shares: list[float] = []  # after each decision
        self.widths: list[int] = []  # the bits
        self.whole_nbytes = self.nbytes  # of a whole model in the bits of the exchange under way

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        now, cost = self.spent, 0.0
        finished, busy, left, moved = 0, 0.0, self.step_s, 0.0
        self.credit = min(self.credit + self.due, max(self.due, 1.0))
        while left > 0 and (self.sends_s > 0 or self.credit >= 1 - 1e-9):
            if self.sends_s <= 0:  # an exchange keeps the share with which it began
                self.credit -= 1
                noise = math.exp(self.noise * self.draw.gauss(0, 1))
                share = min(self.control.share, self.peers)
                bits = 0 if self.on_host else self.control.wire_format.bits
                dearer = self.few_cost if bits else 1.0
                cost += noise * (self.fixed_s + dearer * self.model_s * share)
                least = self.few_s * self.bytes_per_s if bits else 0.0
                self.whole_nbytes = max(least, self.nbytes * BYTES[bits])
                self.sends_s = self.whole_nbytes * share / self.bytes_per_s
            passed = min(left, self.sends_s)
            self.sends_s, left, busy = self.sends_s - passed, left - passed, busy + passed
            moved += passed * self.bytes_per_s / self.whole_nbytes
            finished += self.sends_s <= 1e-12
        self.spent = Spent(
            now.steps + 1,
            now.seconds + self.step_s,
            now.overhead_s + cost,
            now.busy_s + busy,
            now.link_s + busy,
            now.exchanges + finished,
            now.models + moved,
            now.compared + finished,
            now.square + finished * self.square * math.exp(0.5 * self.draw.gauss(0, 1)),
        )
        self.costs.append(cost / self.step_s)
        self.used.append(busy / self.step_s)
        if self.spent.steps % 8 == 0:
            made = self.control.decisions
            self.control.decide(self.spent)
            if self.control.decisions > made:
                self.shares.append(self.control.share)
                self.widths.append(self.control.wire_format.bits)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_the_cost_settles_under_its_bound(seed: int, noise: float) -> None:
    plant = Plant(seed=seed, noise=noise)
    plant.steps(200)
    plant.steps(2000)
    assert BOUND / 2 < mean(plant.costs[200:]) < BOUND
    late = plant.shares[25:]
    assert max(late) / min(late) < {0.0: 1.6, 0.3: 2.5, 1.0: 10}[noise]  # it does not swing
    assert mean(plant.used[200:]) < LINK


def test_where_exchanges_are_cheap_they_are_whole() -> None:
    plant = Plant(model_s=1e-4)
    plant.steps(200)
    assert plant.shares[-20:] == [1.0] * 20


def test_where_no_share_is_cheap_enough_the_floor_holds() -> None:
    plant = Plant(fixed_s=0.05)
    plant.steps(400)
    assert plant.shares[-20:] == [FLOOR] * 20
    plant.fixed_s = 0.0  # nothing has wound up meanwhile
    plant.steps(80)
    assert plant.shares[-1] > 8 * FLOOR


def test_an_exchange_that_takes_all_day_is_waited_for() -> None:
    """What it was decided by is not seen before it ends, so the share falls 16 times at most until then."""
    plant = Plant(noise=0.0, model_s=1e-4)
    plant.steps(400)
    assert plant.control.share == 1
    plant.bytes_per_s = 1e4  # the exchange that begins now takes more than an hour
    plant.steps(400)
    share = plant.control.share
    assert 1 / 32 < share < 1 / 8
    plant.steps(4000)
    assert plant.control.share == share


def test_a_rising_distance_may_spend_more_and_a_falling_one_less() -> None:
    shares = {}
    for per_step in (0.98, 1.0, 1.02):
        plant = Plant(noise=0.0)
        for _ in range(600):
            plant.steps(1)
            plant.square *= per_step
        shares[per_step] = plant.shares[-1]
        assert plant.control.budget == pytest.approx(
            0.75 + 0.25 * ((per_step > 1) - (per_step < 1)), abs=0.1
        )
        assert mean(plant.costs[300:]) < 1.1 * BOUND
    assert shares[0.98] < shares[1.0] < shares[1.02]


def test_no_peer_is_no_news() -> None:
    """All others have failed, or averaging pauses: no exchange begins, and none costs anything."""
    plant = Plant()
    plant.steps(400)
    share, made = plant.control.share, plant.control.decisions
    now = plant.spent
    for k in range(1, 100):
        plant.control.decide(now._replace(steps=now.steps + 8 * k, seconds=now.seconds + 0.8 * k))
    assert (plant.control.share, plant.control.decisions) == (share, made)


def test_counters_that_begin_anew_are_no_decision() -> None:
    """An engine is replaced when a super learner joins: its counters begin at 0."""
    plant = Plant()
    plant.steps(400)
    share, made = plant.control.share, plant.control.decisions
    assert plant.control.decide(Spent(8, 0.8, 0.01, 0.1, 0.1, 8, 1.0, 8, 1.0)) == share
    assert plant.control.decisions == made
    plant.control.decide(Spent(16, 1.6, 0.02, 0.2, 0.2, 16, 2.0, 16, 2.0))
    assert plant.control.decisions == made + 1


def test_a_peer_that_wants_less_decides() -> None:
    """The share does not run away from what exchanges move, and is back soon after the peer recovers."""
    plant = Plant(model_s=0.01, peers=1 / 64)
    plant.steps(800)
    assert min(plant.shares[-50:]) >= 1 / 64 and max(plant.shares[-50:]) < 4.1 / 64
    plant.peers = 1.0
    plant.steps(80)
    assert plant.shares[-1] > 1 / 8


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_link_gets_few_bits_before_a_small_share(seed: int) -> None:
    """A link of 10 Gb/s becomes one of 10 Mb/s, and recovers."""
    alone, plant = (Plant(seed=seed, nbytes=1e7, model_s=0.02, bits=bits) for bits in (False, True))
    for each in (alone, plant):
        each.steps(400)
    assert set(plant.widths) == {0}
    before = plant.shares[-1]
    for each in (alone, plant):
        each.bytes_per_s = MB
        each.steps(800)
    assert plant.widths[-40:] == [4] * 40
    assert mean(plant.shares[-40:]) > 4 * mean(alone.shares[-40:])
    assert mean(plant.used[600:]) < LINK
    first = plant.widths.index(4)
    count = len(plant.widths)
    assert min(plant.shares[:first]) > before / 4, "bits fell first"
    plant.bytes_per_s = GB
    plant.steps(400)
    assert plant.widths[count + 16 :] == [0] * len(plant.widths[count + 16 :])
    assert before / 2 < plant.shares[-1] < 2 * before


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("link", [0.3, 1.5, 3.0, 5.0, 8.0])
def test_bits_do_not_swing(seed: int, link: float) -> None:
    """Links on which whole models, in all bits, take so many steps."""
    plant = Plant(
        seed=seed, nbytes=1e7, model_s=1e-3, fixed_s=1e-5, bits=True, bytes_per_s=1e8 / link
    )
    plant.steps(400)
    count = len(plant.widths)
    plant.steps(4000)
    late = plant.widths[count:]
    assert sum(a != b for a, b in itertools.pairwise(late)) <= len(late) // 50
    assert mean(plant.used[400:]) < LINK
    assert late[-1] == {0.3: 0, 1.5: 8, 3.0: 4, 5.0: 4, 8.0: 4}[link]


def compared(**how: object) -> tuple[Plant, float]:
    """A plant whose bits are chosen, late; its share beside that of one that has all bits."""
    alone, plant = (Plant(bits=bits, **how) for bits in (False, True))  # type: ignore[arg-type]
    for each in (alone, plant):
        each.steps(400)
        each.shares, each.widths = [], []
        each.steps(4000)
    return plant, mean(plant.shares) / mean(alone.shares)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "how",
    [
        {"on_host": True},
        {"few_s": 0.24},  # the round trips of its chunks
        {"few_cost": 2.0, "model_s": 0.009},  # with all bits 0.9 of what the link uses
        {"few_cost": 1.6, "model_s": 0.009},
    ],
)
def test_bits_that_gain_nothing_are_given_back(seed: int, how: dict[str, float]) -> None:
    """They are tried now and then; the share suffers little."""
    plant, share = compared(seed=seed, nbytes=3e7, bytes_per_s=1.25e8, noise=0.1, **how)
    assert plant.widths.count(0) > 0.9 * len(plant.widths)
    assert share > 0.9


def test_bits_are_neither_tried_nor_kept_while_nothing_is_merged() -> None:
    """The link is full, and the chunks of a model are not finite: nobody knows what a model costs."""
    control, steps, models = ShareControl(0.05, 1.0, chooses_bits=True), 0, 0.0

    def decide(moved: float) -> int:
        nonlocal steps, models
        steps, models = steps + 8, models + moved
        control.decide(Spent(steps, 0.1 * steps, 0.0, 0.1 * steps, 0.1 * steps, steps, models))
        return control.wire_format.bits

    assert [decide(0.0) for _ in range(8)] == [0] * 8
    assert decide(1.0) == 8, "not on trial"
    assert [decide(0.0) for _ in range(8)] == [8] * 8
    assert decide(1.0) == 0, "it has gained nothing"


def test_models_of_the_host_are_no_gain_of_few_bits() -> None:
    """The link takes as long for a model as before; meanwhile exchanges on the host have moved many."""
    control, spent = ShareControl(0.05, 1.0, chooses_bits=True), Spent()

    def decide(shared: float) -> int:
        nonlocal spent
        more = Spent(8, 0.8, 0.0, 0.8, 0.8, 8, 1.0 + shared, shared=shared)
        spent = Spent(*map(sum, zip(spent, more, strict=True)))
        control.decide(spent)
        return control.wire_format.bits

    while decide(1.0) == 0:
        assert spent.steps < 200, "no trial"
    decide(9.0)  # its exchanges may have begun before the trial
    assert decide(9.0) == 0


def test_a_peer_that_wants_less_is_no_reason_for_few_bits() -> None:
    plant = Plant(nbytes=1e7, model_s=1e-6, bits=True, bytes_per_s=MB)  # less than the link's use
    plant.steps(400)
    assert plant.control.wire_format.bits == 4
    plant.bytes_per_s, plant.peers = GB, 1 / 16
    plant.steps(400)
    assert plant.control.wire_format.bits == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("after", range(8))
def test_what_fewer_bits_are_compared_with_is_of_the_slow_link(seed: int, after: int) -> None:
    """The link becomes slow between two decisions: else they would be given back for 256 steps."""
    plant = Plant(seed=seed, nbytes=1e7, model_s=0.02, bits=True)
    plant.steps(400 + after)
    plant.bytes_per_s = MB
    plant.steps(160)
    assert plant.control.wire_format.bits == 4


def test_the_leader_tells_its_engine() -> None:
    clock = [0.0]

    def tick(seconds: float) -> None:
        clock[0] += seconds
        engine.found["busy_s"] += 0.9 * seconds
        engine.found["link_s"] += 0.9 * seconds

    counters, engine = Counters(lambda: clock[0]), FakeEngine()
    auto = AutoShare(Config(exchange_share="auto", wire_dtype="auto"), 1, lambda: 0.0)
    trained(auto, engine, counters, tick, 100)
    assert BY_NAME["int8"] in engine.formats  # on trial: here the link stays as full
    assert engine.formats[-1] == auto.control.wire_format == OWN


def test_an_overhead_takes_no_bits() -> None:
    """Few bits cost the CPU more, so a share that is small for its sake is no reason for them."""
    plant = Plant(model_s=0.4, bits=True)
    plant.steps(800)
    assert plant.shares[-1] < 1 / 16
    assert set(plant.widths) == {0}


def test_cost_by_hand() -> None:
    used = Used(steps=10, seconds=1.0, pass_s=0.06, models=10, engine_s=0.02, training_s=0.5)
    # all chunks corrected: half of the pass; two learners per core: the engine takes twice its time
    assert cost_s(used, 0.5) == pytest.approx(0.03 + 0.04)
    # a quarter of the chunks: 1/4 of 5/4
    assert cost_s(used._replace(models=2.5), 0.5) == pytest.approx(0.06 * 0.2 + 0.04)
    # four cores per learner, of which training uses an eighth
    assert cost_s(used, 4.0) == pytest.approx(0.03 + 0.02 / 4 / 8)
    assert cost_s(used._replace(steps=0), 1.0) == 0.0
    # an eighth of the chunks has corrections, an eighth of the rest is copied: 2/8 + 7/64 in place of 1/8
    rarely = used._replace(models=used.steps / 8)
    assert cost_s(rarely, 0.5, 8, 8) == pytest.approx(used.pass_s * (23 - 8) / 23 + 0.04)


class FakeEngine:
    """Counters of an engine, set by hand."""

    def __init__(self, chunks: int = 64):
        self.shares: list[float] = []
        self.formats: list[Format] = []
        self.found = dict.fromkeys(
            ("chunks", "exchanges_active", "exchanges_passive", "compared", "bytes_shared"), 0
        ) | {"busy_s": 0.0, "link_s": 0.0, "square": 0.0}
        self.cpu_s = 0.0
        layout = type("Layout", (), {"nchunks": chunks, "element_nbytes": 4.0, "parts": ()})
        turns = staticmethod(lambda: (1, 1))
        own = type("Shard", (), {"turns": turns, "moves": None, "layout": layout})
        self.memory = type("Memory", (), {"own": own})

    def counters(self) -> dict[str, float]:
        return self.found

    def move_share(self, share: float, wire_format: Format) -> None:
        self.shares.append(share)
        self.formats.append(wire_format)


def trained(
    auto: AutoShare,
    engine: FakeEngine,
    counters: Counters,
    tick: Callable[[float], None],
    steps: int,
    step_s: float = 0.1,
) -> None:
    for _ in range(steps):
        tick(step_s)
        counters.add("collect", 0.004)
        engine.found["chunks"] += 64 * auto.control.share
        engine.found["exchanges_active"] += 1
        engine.found["busy_s"] += 1e-3
        engine.found["link_s"] += 1e-3
        engine.cpu_s += 0.02 * auto.control.share
        counters.end_step()
        auto.after_step(cast(Engine, engine), counters)


def test_a_leader_chooses_and_an_evaluation_does_not_count() -> None:
    clock = [0.0]

    def tick(seconds: float) -> None:
        clock[0] += seconds

    counters, engine = Counters(lambda: clock[0]), FakeEngine()
    # training keeps all cores busy
    auto = AutoShare(Config(exchange_share="auto"), 1, lambda: 1000 * clock[0])
    assert (auto.control.wire_format, Config(exchange_share="auto").chooses_bits) == (OWN, False)
    trained(auto, engine, counters, tick, 400)
    assert engine.shares[0] == FIRST_SHARE and engine.shares[-1] == auto.control.share
    before, made = auto.control.share, auto.control.decisions
    assert made > 30 and 0 < auto.control.overhead < 0.06 and before < 1
    for _ in range(10):
        tick(60.0)  # an evaluation
        engine.cpu_s += 0.5  # the engine looks for messages meanwhile
        trained(auto, engine, counters, tick, 40)
    assert auto.control.decisions > made + 20
    assert before / 1.3 < auto.control.share < 1.3 * before
    made = auto.control.decisions
    trained(auto, engine, counters, tick, 200, step_s=2.0)  # from now on steps are 20 times as long
    assert auto.control.decisions > made + 15 and auto.control.share > before
    other = FakeEngine()  # a super learner has joined
    trained(auto, other, counters, tick, 1)
    assert other.shares == [auto.control.share]
