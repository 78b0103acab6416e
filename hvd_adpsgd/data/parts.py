"""Which super learner takes which positions of an epoch, without a master: a state machine without a clock.

An epoch is cut into as many parts as the job had super learners at its start. Part p is *served* by super
learner p: it alone decides which super learner takes which of these positions, and takes them itself from the
front. A super learner with few positions left asks the servers of the other parts, while it still computes:

    a super learner that runs low       the server of part p
    Ask(number, epoch, p, wanted)  ->
                                   <-   Give(number, p, positions, left)

First it asks all for 0 positions, then for some the one with most left. A grant is left v / (2 V): v is the
rate of the asking super learner, V that of all. So a slow one never gets what takes it longer than the rest
takes the others. An epoch ends when all parts have 0 left. A part whose server does not answer for ten usual
times of an answer is not waited for: its rest stays with its server, which may be stopped and come back, or
is granted in a later epoch as left over.

Servers change. If a server fails, the next living super learner in the ring of super_ranks serves its part;
if it is replaced, the replacement does. The new server asks all living ones (Recover) what they have been
granted of the part (Holds). From its answer on, a super learner accepts no grant of the part from an earlier
server. What no super learner holds or has consumed is free.

At most once among the living: the grants of two servers of a part are disjoint, as those of the earlier
server either were accepted before the answer, and are not free, or are refused. Failures are final, so two
living super learners never serve one part: each Recover comes from further on in the ring than the one
before, until all make new connections, after which all count the living alike.
A super learner that says that it leaves counts as failed from then on: its process may run on for long.
At least once: what a failed super learner held and has not reported as consumed is free again. One that
leaves an epoch early gives back (Ask) what it was granted and has not taken, and what it is granted later.
The rest of an epoch that a super learner has ended is granted in later ones; if all left it early, nobody
wants the rest.

Messages arrive in order. With new connections, some may be lost: questions and facts are sent again.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_adpsgd.data.ranges import EPOCH, Ranges, add, count, merged, split, without

# between two reports of what was consumed: the interval per super learner, so that one sends 20 messages per
# second at most, and the longest
_REPORT_S, _LONGEST_REPORT_S = 0.05, 1.0
LEAST_PATIENCE_S, PATIENCE = 1.0, 10.0  # waits for a silent server: at least, in usual answers
_FIRST_ANSWER_S = 0.05  # estimate of the time of an answer before the first
_NEWEST = 0.2  # weight of the newest answer in the estimate


class Ask(NamedTuple):
    """A request for at least `wanted` positions of a part, in multiples of `step`."""

    number: int
    epoch: int
    part: int
    wanted: int
    step: int
    rate: float
    back: Ranges  # positions of the part that were granted to the sender, which has not taken them


class Give(NamedTuple):
    """The answer to Ask `number`; so many positions of the part can still be granted in that epoch."""

    number: int
    part: int
    ranges: Ranges
    left: int


class Consumed(NamedTuple):
    """Positions that were consumed, by any super learner; and facts about the sender."""

    ranges: Ranges
    rate: float  # in positions per second; 0 if it is not known yet
    parts: int | None  # number of parts of an epoch, if the sender knows it
    ended: Ranges  # epochs that a super learner has ended
    leaves: bool = False  # whether the sender answers no more questions


class Recover(NamedTuple):
    """The sender serves this part from now on, and asks which positions of it the receiver holds."""

    part: int


class Holds(NamedTuple):
    """The answer to Recover: positions granted to the sender, positions known as consumed, epochs."""

    part: int
    granted: Ranges
    consumed: Ranges
    begun: set[int]


@dataclass
class _Served:
    """A part that this super learner serves; it can once there is nobody in `awaited`."""

    awaited: set[int]  # super learners whose Holds is still to come
    since: float | None = None  # when this super learner first waited for them
    opened: set[int] = field(default_factory=set)  # epochs whose positions were made free
    free: Ranges = field(default_factory=list)  # positions that no super learner holds
    granted: dict[int, Ranges] = field(default_factory=dict)  # by super learner, this one included
    answers: dict[int, Give] = field(default_factory=dict)  # by super learner, the last one


class Parts:
    """The side of one super learner.

    Args:
        me: super_rank of this super learner.
        parts: number of super learners at the job's start; None on one that has joined since.
        size: returns the number of positions of an epoch; the same on all.

    Attributes:
        epoch, ended: the epoch that this super learner is in; whether nothing is left of it here.
        step, lead: positions per step; it asks when it has fewer than `lead`.
        rate: positions that it consumes per second; 0 if that is not known yet.
        consumed, samples: positions known as consumed by any super learner; how many these are.
        answer_s: usual time until an answer.
    """

    def __init__(self, me: int, parts: int | None, size: Callable[[int], int]) -> None:
        self.me, self.parts, self._size = me, parts, size
        self.epoch: int | None = None
        self.ended, self.rate = False, 0.0
        self.step = self.lead = 1
        self.consumed: Ranges = []
        self.samples = 0
        self.answer_s = _FIRST_ANSWER_S
        self._founds = parts is not None
        self._begun: set[int] = set()  # epochs known to be begun; none before the job's first
        self._entered: set[int] = set()  # epochs that this one has begun
        self._ended: Ranges = []  # epochs that a super learner has ended
        self._living, self._ring = frozenset((me,)), me + 1
        self._servers: dict[int, int] = {}  # by part
        self._served: dict[int, _Served] = {}
        self._granted: Ranges = []  # by servers to this super learner
        self._ready: Ranges = []  # granted and not taken
        self._back: dict[int, Ranges] = {}  # to give back with the next question, by part
        self._left: dict[int, int] = {}  # by part, how many positions its server had left
        self._asks: dict[int, tuple[Ask, float]] = {}  # open ones, by part
        self._number = 0
        self._ignorant: set[int] = set()  # super learners that do not know the first epoch
        self._silent: set[int] = set()  # super learners that have not answered in time
        self._departed: set[int] = set()  # super learners that have said that they leave
        self._rates: dict[int, float] = {}
        self._news: Ranges = []  # consumed, not reported
        self._reported = 0.0
        self._queue: list[tuple[int, Any]] = []  # questions that cannot be answered yet
        self._out: list[tuple[int, Any]] = []

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.ended = epoch, False
        self._entered.add(epoch)
        if self._founds:  # another may have begun a later one already
            self._begun.add(epoch)
        if self._begun or any(self._settled()):  # servers have asked the living
            self._learn({epoch})
        self._left.clear()
        self._granted = without(self._granted, self.consumed)  # else it grows with each epoch
        for served in self._served.values():
            served.granted = {r: without(g, self.consumed) for r, g in served.granted.items()}
        self._asks = {
            p: asked for p, asked in self._asks.items() if asked[0].wanted or asked[0].back
        }
        self.report()

    def leave(self, untaken: Ranges) -> None:
        """Leave the epoch: the others get what is granted and not taken, and what was taken and not used."""
        self.ended = True
        self._give_back(merged(self._ready, untaken))
        self._ready = []

    def take(self, number: int) -> Ranges:
        """Return at most `number` of the positions available here."""
        if self.ended or self.epoch is None:  # what comes after the last step is for the next epoch
            return []
        taken, self._ready = split(self._ready, number)
        for served in self._settled():
            if (missing := number - count(taken)) > 0:
                own = self._grant(served, self.me, self.epoch, missing)
                add(self._granted, own)
                taken = taken + own
        return taken

    def available(self) -> int:
        """Return how many positions this super learner can take now."""
        return count(self._ready) + sum(count(self._free(s, self.epoch)) for s in self._settled())

    def consume(self, ranges: Ranges) -> None:
        """Note positions that the optimizer has stepped with."""
        self.note(ranges)
        add(self._news, ranges)

    def note(self, ranges: Ranges) -> None:
        """Note positions that a super learner has consumed."""
        self.samples += add(self.consumed, ranges)

    def members(
        self, living: Collection[int], ring: int, joined: Collection[int] = (), anew: bool = False
    ) -> None:
        """Note which super learners live, this one included, of `ring` super_ranks.

        `joined`: those that have joined since the last call, also in the place of failed ones; `anew`:
        whether all have made new connections since then.
        """
        self._departed -= set(joined)
        living = set(living) - self._departed
        for rank in self._living.difference(living).union(self._living.intersection(joined)):
            self._lose(rank)
        self._living, self._ring = frozenset(living), ring
        if anew:
            for former in (self._queue, self._out, self._ignorant):
                former.clear()
        for part in range(self.parts or 0):
            self._choose_server(part, anew)
        if anew:
            self._send_again()

    def _send_again(self) -> None:
        """Send all again that may have been lost with the former connections."""
        self._news = self.consumed.copy()
        self.report()
        for ask, _ in self._asks.values():
            self._out.append((self._servers[ask.part], ask))
        for part, served in self._served.items():
            for rank in sorted(served.awaited):
                self._out.append((rank, Recover(part)))

    def receive(self, rank: int, message: Any, now: float) -> None:
        """Handle a message of super learner `rank`; `now` in seconds."""
        if rank not in self._living:
            return
        self._silent.discard(rank)
        if isinstance(message, Consumed):
            self._note(rank, message)
        elif isinstance(message, Give):
            self._accept(rank, message, now)
        elif isinstance(message, Holds):
            self._recover(rank, message)
        elif isinstance(message, Recover) and self.parts is not None:
            self._give_up(rank, message.part)
        elif message.part in self._served and not self._served[message.part].awaited:
            self._answer(rank, self._served[message.part], message)
        else:
            self._queue.append((rank, message))

    def poll(self, now: float) -> list[tuple[int, Any]]:
        """Return the messages to send, with the super_ranks of their receivers; `now` in seconds."""
        if self.epoch is not None:
            for part in [p for p in self._back if p not in self._asks]:
                self._ask(self.epoch, part, 0, now)
            if not self.ended:
                self._seek(self.epoch, now)
        interval = min(_REPORT_S * len(self._living), _LONGEST_REPORT_S)
        if self._news and now - self._reported > interval:
            self._reported = now
            self.report()
        out, self._out = self._out, []
        return out

    def report(self, leaves: bool = False) -> None:
        """Report with the next `poll` what was consumed; `leaves`: and that this super learner leaves."""
        report = Consumed(self._news, self.rate, self.parts, self._ended, leaves)
        self._out += [(rank, report) for rank in sorted(self._living - {self.me})]
        self._news = []

    def _seek(self, epoch: int, now: float) -> None:
        """Ask for positions if few are left; end the epoch if none are."""
        if self.parts is None and self._living <= self._ignorant | {self.me}:
            self._cut(self._ring)  # who knew the first epoch has failed
        if self.parts is None or self.available() >= self.lead:
            return
        others = [p for p in range(self.parts) if self._servers[p] != self.me]
        for part in others:
            if part not in self._asks and part not in self._left:
                self._ask(epoch, part, 0, now)
        if any(self._is_awaited(part, now) for part in others):
            return
        usable = [p for p in others if p not in self._asks and self._servers[p] not in self._silent]
        best = max(usable, key=lambda p: (self._left[p], -p), default=None)
        if best is not None and self._left[best]:
            self._ask(epoch, best, max(self.step, self.lead - self.available()), now)
        elif not self.available() and not any(
            self._recovers(s, now) for s in self._served.values()
        ):
            self.ended, self._ended = True, merged(self._ended, [(epoch, epoch + 1)])

    def _is_awaited(self, part: int, now: float) -> bool:
        """Whether the server of a part is to answer a question; notes servers that have been silent."""
        if part in self._asks and self._is_over(self._asks[part][1], now):
            self._silent.add(self._servers[part])
        return part in self._asks and self._servers[part] not in self._silent

    def _recovers(self, served: _Served, now: float) -> bool:
        """Whether to wait until it is known who holds what of a part that is served here."""
        served.since = now if served.since is None else served.since
        return bool(served.awaited) and not self._is_over(served.since, now)

    def _is_over(self, since: float, now: float) -> bool:
        return now - since > max(LEAST_PATIENCE_S, PATIENCE * self.answer_s)

    def _ask(self, epoch: int, part: int, wanted: int, now: float) -> None:
        self._number += 1
        back = self._back.pop(part, [])
        ask = Ask(self._number, epoch, part, wanted, self.step, self.rate, back)
        self._asks[part] = ask, now
        self._out.append((self._servers[part], ask))

    def _accept(self, rank: int, message: Give, now: float) -> None:
        ask, asked_at = self._asks.get(message.part, (None, 0.0))
        if ask is None or ask.number != message.number or self._servers[message.part] != rank:
            return  # repeated, or of a server before this one
        del self._asks[message.part]
        self.answer_s += _NEWEST * (now - asked_at - self.answer_s)
        add(self._granted, message.ranges)
        if self.ended or ask.epoch != self.epoch:
            self._give_back(message.ranges)
        else:
            self._left[message.part] = message.left
            self._ready = self._ready + message.ranges

    def _give_back(self, ranges: Ranges) -> None:
        """Let the servers of positions that were granted and not used grant them anew."""
        self._granted = without(self._granted, ranges)
        for part in range(self.parts or 0):
            if part in self._served:
                self._free_again(self._served[part], self.me, ranges)
            elif back := self._of_part(part, ranges):
                self._back[part] = merged(self._back.get(part, []), back)

    def _free_again(self, served: _Served, rank: int, ranges: Ranges) -> None:
        """Make positions free that are granted to super learner `rank`, which does not use them."""
        held = served.granted.get(rank, [])
        served.granted[rank] = kept = without(held, ranges)
        back = [pair for pair in without(held, kept) if pair[0] // EPOCH in served.opened]
        served.free = merged(served.free, back)

    def _note(self, rank: int, message: Consumed) -> None:
        self.note(message.ranges)
        self._ended = merged(self._ended, message.ended)
        self._rates[rank] = message.rate
        if message.parts is None:
            self._ignorant.add(rank)
            if self.parts is not None:
                self._out.append((rank, Consumed([], self.rate, self.parts, self._ended)))
        elif self.parts is None:
            self._cut(message.parts)
        if message.leaves:  # the sender may run on for long
            self._departed.add(rank)
            self.members(self._living, self._ring)

    def _cut(self, parts: int) -> None:
        """Note into how many parts the job cuts its epochs."""
        self.parts = parts
        for part in range(parts):
            self._choose_server(part, True)
        self._repeat()

    def _learn(self, begun: set[int]) -> None:
        """Note epochs that a super learner has begun, and make their positions free that nobody holds."""
        self._begun |= {epoch for epoch in begun if epoch >= min(self._begun, default=epoch)}
        for part, served in self._served.items():
            for epoch in self._begun - served.opened if not served.awaited else ():
                taken = merged(self.consumed, *served.granted.values())
                served.opened.add(epoch)
                served.free = merged(served.free, without([self._bounds(part, epoch)], taken))

    def _settled(self) -> Iterator[_Served]:
        """The parts served here of which it is known who holds what."""
        return (served for served in self._served.values() if not served.awaited)

    def _answer(self, rank: int, served: _Served, ask: Ask) -> None:
        self._learn({ask.epoch})
        self._rates[rank] = ask.rate
        answer = served.answers.get(rank)
        if answer is None or answer.number != ask.number:
            self._free_again(served, rank, ask.back)
            number = self._guided(ask, count(self._free(served, ask.epoch))) if ask.wanted else 0
            given = self._grant(served, rank, ask.epoch, number)
            answer = Give(ask.number, ask.part, given, count(self._free(served, ask.epoch)))
            served.answers[rank] = answer
        self._out.append((rank, answer))

    def _guided(self, ask: Ask, left: int) -> int:
        rates = {**self._rates, self.me: self.rate}
        known = [rates[r] for r in self._living if rates.get(r)]
        usual = sum(known) / len(known) if known else 1.0
        total = sum(rates.get(r) or usual for r in self._living)
        number = int(left * (ask.rate or usual) / (2 * total))
        return max(ask.wanted, number // ask.step * ask.step)

    def _grant(self, served: _Served, rank: int, epoch: int, number: int) -> Ranges:
        """Take free positions for super learner `rank`, which is in `epoch`: those of older epochs first."""
        given, _ = split(self._free(served, epoch), number)
        served.free = without(served.free, given)
        add(served.granted.setdefault(rank, []), given)
        return given

    def _free(self, served: _Served, epoch: int | None) -> Ranges:
        """Return the free positions for a super learner that is in `epoch`."""
        return [
            pair
            for pair in served.free
            if (e := pair[0] // EPOCH) == epoch
            or (e < (epoch or 0) and any(a <= e < b for a, b in self._ended))
        ]

    def _bounds(self, part: int, epoch: int) -> tuple[int, int]:
        assert self.parts is not None
        size, first = self._size(epoch), EPOCH * epoch
        return first + size * part // self.parts, first + size * (part + 1) // self.parts

    def _of_part(self, part: int, ranges: Ranges) -> Ranges:
        """Return the positions that lie in a part, of all epochs."""
        bounds = [self._bounds(part, start // EPOCH) for start, _ in ranges]
        cut = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(ranges, bounds, strict=True)]
        return [(a, b) for a, b in cut if a < b]

    def _choose_server(self, part: int, anew: bool) -> None:
        """Find the server of a part: the first one that lives, from the present one on in the ring."""
        server = part if anew else self._servers.get(part, part)
        while server not in self._living:
            server = (server + 1) % self._ring
        self._appoint(part, server)

    def _appoint(self, part: int, server: int) -> None:
        if server != self._servers.get(part):
            self._servers[part] = server
            for former in (self._asks, self._left, self._back):
                former.pop(part, None)
        if server != self.me:
            self._served.pop(part, None)
        elif part not in self._served:
            is_first = part == self.me and self._founds
            awaited = set() if is_first else set(self._living - {self.me})
            self._served[part] = served = _Served(awaited)
            for rank in sorted(awaited):
                self._out.append((rank, Recover(part)))
            if not awaited:
                self._serve(part, served)

    def _give_up(self, rank: int, part: int) -> None:
        """Answer the new server of a part; one that comes before the present one in the ring has failed."""
        if (rank - part) % self._ring >= (self._servers[part] - part) % self._ring:
            self._appoint(part, rank)
            self._back.pop(part, None)  # is not held
            held, consumed = (self._of_part(part, r) for r in (self._granted, self.consumed))
            # where nobody knows the job's first epoch, all that knew have failed
            self._out.append((rank, Holds(part, held, consumed, self._begun or self._entered)))

    def _recover(self, rank: int, message: Holds) -> None:
        served = self._served.get(message.part)
        if served is not None and rank in served.awaited:
            served.granted[rank] = message.granted
            self.note(message.consumed)
            self._learn(message.begun)
            self._has_answered(rank, message.part, served)

    def _has_answered(self, rank: int, part: int, served: _Served) -> None:
        served.awaited.discard(rank)
        if not served.awaited:
            self._serve(part, served)

    def _serve(self, part: int, served: _Served) -> None:
        """Serve a part of which it is known who holds what."""
        served.granted[self.me] = self._of_part(part, self._granted)
        self._learn(self._entered)
        self._repeat()

    def _repeat(self) -> None:
        """Handle again the questions that could not be answered."""
        queue, self._queue = self._queue, []
        for rank, message in queue:
            self.receive(rank, message, 0.0)

    def _lose(self, rank: int) -> None:
        """Free what a failed super learner held and has not consumed."""
        self._silent.discard(rank)
        self._rates.pop(rank, None)
        for part, served in list(self._served.items()):
            served.answers.pop(rank, None)
            held = served.granted.get(rank, [])
            self._free_again(served, rank, without(held, self.consumed))
            served.granted.pop(rank, None)
            if rank in served.awaited:
                self._has_answered(rank, part, served)
