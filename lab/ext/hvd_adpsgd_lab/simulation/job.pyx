# cython: language_level=3
# Why compiled: it takes the turns of the engines, and reads their state after each.
"""A simulated job of many engines in one process and in virtual time: trainers, faults, checks of promises.

Each event is an entry of the network's calendar: a message arrives, an engine takes a turn, a trainer acts, a
fault happens. All run in one thread and without real time: the same seed gives the same run on every machine.
"""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

import dataclasses

import numpy as np

from hvd_adpsgd.config import Config
from hvd_adpsgd.engine.layout import DTYPE_CODES

from hvd_adpsgd_lab.simulation.bounds import in_bound
from hvd_adpsgd_lab.simulation.coverage import MESSAGES, STATES
from hvd_adpsgd_lab.simulation.faults import FAULTS

from hvd_adpsgd.engine.loop cimport OVER, SLEEP, Rest, begin_turns, end_turns, turn
from hvd_adpsgd.engine.mailbox cimport FAULT_FENCED, FAULT_GONE, FAULT_LAYOUT, FAULT_MPI, HISTOGRAM, MET, count_of
from hvd_adpsgd.engine.store cimport Store
from hvd_adpsgd_lab.simulation.admission cimport come, read_letter
from hvd_adpsgd_lab.simulation.chance cimport between, draw
from hvd_adpsgd_lab.simulation.coverage cimport NMESSAGES, NSTATES, cover, phase_of
from hvd_adpsgd_lab.simulation.faults cimport dialed_again, notice, report, struck
from hvd_adpsgd_lab.simulation.ledger cimport Ledger
from hvd_adpsgd_lab.simulation.leftovers cimport take_back
from hvd_adpsgd_lab.simulation.network cimport ARRIVAL, Entry, Envelope, Network, arrive, bytes_sent, enter, leave
from hvd_adpsgd_lab.simulation.newcomers cimport Admission, Newcomers, open_next
from hvd_adpsgd_lab.simulation.promises cimport add_model, check_end, check_over, check_turn
from hvd_adpsgd_lab.simulation.seats cimport make_engine, share_memory
from hvd_adpsgd_lab.simulation.state cimport ACT, COME, LETTER, NEVER, REPORT, STRIKE, Actor, JobState
from hvd_adpsgd_lab.simulation.streams cimport COUNT, REDIAL, came, read_count
from hvd_adpsgd_lab.simulation.trainers cimport act, give_up, watch

CONFIG = Config()
DOINGS = ("step", "meet", "wait", "rest", "done", "mean", "fresh", "come", "take in", "await all")


cdef class Job(JobState):
    """A simulated job: n engines with their trainers.

    Args:
        network: the network of n engines.
        seed: seed of the random times of trainers and turns.
        slack: an engine's pauses between turns take up to this many times as long as it wants.
        tables: for each engine an array (rounds, 2): the peer that it asks, and the peer that asks it; None:
            no rounds.
        period: steps from round to round.
        means: rounds are means of all models: "replace" replaces the models, "add" adds the difference; None:
            no means.
        after: whether a trainer waits for its round at once; else after the computation of its next step.
        warm_up: steps before the first round.
        detect_s: longest time until an engine notices a failure, s.
        still: trainers do not update their models, so that only exchanges change them.
        look_s: shortest pause between polls while nothing arrives, s; messages wake an engine earlier.
        checks: check after every turn that the promises hold.
        trace: record events, for `story` and `timeline`.
        chunk_s: how long an engine works on a chunk, s.
        config: the options of training, a Config, of what trainers do; engines have their EngineOptions.
        local: an object that updates models in place of random updates. For the trainer of a process these methods
            are called, in this order: `update(process, step)`, which changes the model in place;
            `after_corrections(process)`; if the step waits for a round, `before_round(process)`, and once the
            correction of the round is applied, `after_round(process)`. At an admission `before_pause(process)` and
            `after_pause(process)` are called before and after the corrections are applied, `gives(process)` when the
            giver's state is copied for the newcomer, and `joins(process)` when the newcomer has received it;
            `stays_out(rank)` if a newcomer with that rank is not admitted.
        rare, rare_period: numbers of chunks that move in every `rare_period`th exchange only.
        every: steps between two copies of a chunk without a correction to the mirror.
    """

    def __cinit__(self, Network network, uint64_t seed, double slack=8.0, tables=None, int period=1,
                  means=None, bint after=False, int warm_up=0, double detect_s=0.5, bint still=False, double look_s=1e-3,
                  bint checks=True, bint trace=False, double chunk_s=0.0, config=CONFIG,
                  local=None, rare=(), int rare_period=1, int every=1):
        self.network = network
        self.net = &network.net
        self.n = self.living = network.size
        self.chance = seed
        self.slack = slack
        self.actors = <Actor*>calloc(self.net.n, sizeof(Actor))
        self.loops, self.stores, self.models, self.areas, self.faults = [], [], [], [], []
        self.kept, self.given, self.seats = [], [], [*range(self.n)]
        self.processes = self.n
        self.admits_at = -1
        self.followers, self.late = [], []
        self.lives = self.hosts = None
        self.tables = None if tables is None else list(tables)
        self.period = period
        self.warm_up = warm_up
        self.means = means
        self.after = after
        self.met, self.left_at, self.parked_at, self.asked, self.suspected = {}, {}, {}, {}, set()
        self.ledger = Ledger()
        self.detect_s = detect_s
        self.still = still
        self.local = local
        self.look_s = look_s
        self.checks = checks
        self.chunk_s = chunk_s
        self.config = config
        self.every, self.moved = every, {}
        self.rare, self.rare_period = set(rare), rare_period
        self.story = [] if trace else None
        self.timeline = [] if trace else None

    def __dealloc__(self):
        free(self.actors)

    def add(self, schedule, options, model, int64_t steps, double step_s, double spread=0.0, double node_s=0.0, int later=0):
        """Add the engine of the next rank; the fault extend adds the last `later` chunks of `model` later.

        Args:
            schedule: ranks of the peers to ask.
            options: an EngineOptions.
            model: array (chunks, elements).
            steps, step_s, spread, node_s: see scenario.Learner.
        """
        cdef int rank = len(self.loops)
        cdef Actor* a = &self.actors[rank]
        options = dataclasses.replace(options, timeline=self.checks)    # promises are checked event by event
        self.leave_deadline_s = options.leave_deadline_s
        self.nchunks = len(model) - later
        self.later = later
        self.dtype = DTYPE_CODES[model.dtype.name]
        self.given.append((options, node_s > 0))
        make_engine(self, schedule, model, options, node_s > 0)
        a.steps, a.step_s, a.spread, a.node_s = steps, step_s, spread, node_s
        if self.checks:
            self.expected = model + (np.zeros(model.shape, np.float64) if self.expected is None else self.expected)

    def share(self, hosts, int64_t lane_nbytes):
        """Let engines with the same number in `hosts` share memory."""
        self.hosts = list(hosts)
        self.lives = []
        share_memory(self, 0, self.n, lane_nbytes)

    def expect(self, plan, model=None, int most=1, bint own_steps=False):
        """Allow more super learners to join the job, one after the other, each at a fault "join" (see `strike`).

        Args:
            plan: function of (ranks, size): ranks of the super learners after the admission, and size of the
                job; returns for each of them (schedule, weight, table of rounds), with peers as indices of
                `ranks`.
            model: function of (process, rank) that returns an array for the model of the joining super learner,
                like those of `add`; None: a new array.
            most: number of super learners that join; the network needs room for the engines of all in each
                admission.
            own_steps: whether members come to an admission before their own next step, and not while one of
                them is stopped (unless it stops after the first has come), as with hvd.admit(blocking=False);
                else before the same step.
        """
        self.own_steps = own_steps
        self.processes = self.n + most
        self.seats += [-1] * most
        self.newcomers = Newcomers(self.n, most, plan, model)
        self.admission = Admission([*range(self.n)], self.n)

    def strike(self, double at, kind, int who, *arguments):
        """Schedule a fault of process `who`, `at` seconds from now.

        Kinds, with their arguments: crash; stop (seconds); slow (factor of the step's time); leave; fail:
        leave as failed; pause: pause averaging before the next step; unfit: offer a model that is not finite;
        extend (number of chunks): add so many of the later chunks, each as a parameter group; all, as one group,
        if 0; cut (peer, seconds): messages to it are late; sever (peer, seconds):
        messages in both directions are late; partition (others, seconds): messages between `who` with the
        others and the rest are late; suspect (peer): take a living peer for failed; break (peer, seconds), in
        a network with streams: the connections with the peer end, and are dialed again; join (see `expect`):
        a super learner joins with the rank `who`, that of a failed one or the next one, as soon as those are
        admitted that have waited for longer.

        Raises:
            ConfigError: if there is no such process.
        """
        in_bound("strike: the engine", who, (0, self.processes - 1))
        self.faults.append((FAULTS.index(kind), who, arguments))
        enter(self.net, self.net.now_s + at, STRIKE, len(self.faults) - 1, NULL)

    def run(self, double seconds, int64_t limit=2000000):
        """Run the job until all engines have ended, at most for `seconds` of virtual time and `limit` events.

        Raises:
            BrokenPromise: as soon as a promise is broken.
        """
        cdef int i
        if not self.checks:
            raise RuntimeError("a job without checks runs by run_for")
        self.begin()
        self.ends = self.net.now_s + seconds
        while self.net.entries and self.living > 0:
            if self.net.calendar[0].at > self.ends or self.happened > limit:
                self.fail("promise 6 (ends)", f"still running after {self.happened} events: {self.describe()}")
            self.next_happening()
        check_end(self)
        for i in range(self.n):
            take_back(self.actors[i].core)

    def run_for(self, double seconds):
        """Run the job for `seconds` more of virtual time, or until `halted`; then `run_for(0)` continues."""
        if self.ends == 0:
            self.begin()
            self.ends = self.net.now_s
        self.ends += seconds
        while not self.halted and self.net.entries and self.net.calendar[0].at <= self.ends:
            self.next_happening()

    cdef void begin(self):
        cdef int i
        for i in range(self.n):
            begin_turns(self.actors[i].core, &self.actors[i].rhythm)
            self.turn_at(i, self.net.now_s + between(&self.chance, 0, 1e-3))
            self.again(i, between(&self.chance, 0, self.actors[i].step_s))

    cdef int next_happening(self) except -1:
        cdef Entry entry = leave(self.net)
        cdef int who
        self.net.now_s = max(self.net.now_s, entry.at)
        self.happened += 1
        self.happen(&entry)
        while self.net.nwoken:              # engines of which transfers have completed
            self.net.nwoken -= 1
            who = self.net.woken[self.net.nwoken]
            self.net.links[who].woken = False
            self.turn_soon(who)
        return 0

    cdef int happen(self, Entry* entry) except -1:
        cdef int i = entry.who
        if entry.kind == ARRIVAL:
            self.arrival(<Envelope*>entry.what)
        elif entry.kind == STRIKE:
            struck(self, i)
        elif entry.kind == LETTER:
            read_letter(self, i, <int><uintptr_t>entry.what)
        elif entry.kind == COUNT:
            if not read_count(self.net, i, <uint64_t><uintptr_t>entry.what):
                self.fail("invariant (counts)", f"an engine confirms messages that were not sent, stream {i}")
        elif entry.kind == REDIAL:
            dialed_again(self, i)
        elif entry.kind == REPORT:
            if not self.actors[i].dead:
                notice(self, i, <int><uintptr_t>entry.what)
        elif self.actors[i].dead or self.actors[i].over:
            return 0
        elif entry.kind == ACT:
            if self.actors[i].stopped:
                self.actors[i].act_missed = True
            elif self.actors[i].doing >= COME:
                come(self, i)
            else:
                act(self, i)
        elif <int64_t><uintptr_t>entry.what == self.actors[i].turns and not self.actors[i].stopped:
            self.take_turn(i)
        return 0

    cdef void arrival(self, Envelope* message):
        cdef int i = message.dst
        if message.lost or self.actors[i].dead:
            return
        if message.post != NULL and self.actors[i].over:
            message.lost = True             # the receiver has ended
            return
        if message.post != NULL:
            came(self.net, message)
        arrive(self.net, message)
        self.turn_soon(i)

    cdef int take_turn(self, int i) except -1:
        cdef Actor* a = &self.actors[i]
        cdef Rest rest
        cdef double pause
        cdef int64_t chunks
        if self.checks:
            cover(self.coverage, &self.net.links[i], a.core)
        a.turn_at = NEVER
        chunks = a.core.mailbox.counters.chunks
        held = self.hold(i) if self.lives is not None else None
        self.net.ntorn = 0
        rest = turn(a.core, &a.rhythm)
        if held is not None:
            held[0] -= 1
        a.busy_until = self.net.now_s + self.chunk_s * (a.core.mailbox.counters.chunks - chunks)
        pause = a.rhythm.pause_s
        if self.checks:
            check_turn(self, i)
        if a.core.mailbox.fault in (FAULT_GONE, FAULT_FENCED, FAULT_LAYOUT) and not a.gave_up:
            give_up(self, i)
        if a.watches:
            watch(self, i)
        if rest == OVER or a.core.mailbox.fault == FAULT_MPI:
            self.ended(i)
        elif rest == SLEEP:
            if not self.checks:
                pause = max(pause, self.look_s)
            self.turn_at(i, self.net.now_s + pause * between(&self.chance, 0.1, 1.5))
        elif pause == 0:
            self.turn_at(i, self.net.now_s + 2e-6 * between(&self.chance, 1, self.slack))
        else:                               # a message that arrives wakes the engine earlier
            self.turn_at(i, self.net.now_s + max(pause, self.look_s) * between(&self.chance, 1, self.slack))
        return 0

    def hold(self, int i):
        """In some turns let a trainer on the same host be changing a chunk: make its version odd.

        Return a view of the version; None in other turns."""
        cdef int j = draw(&self.chance) % self.n
        if j == i or self.hosts[i] != self.hosts[j] or self.actors[i].first != self.actors[j].first or draw(&self.chance) % 2:
            return None
        versions = self.lives[j].view(np.int64)[::Store.live_nbytes(1) // 8]
        version = versions[draw(&self.chance) % self.nchunks:][:1]
        version[0] += 1
        return version

    cdef int ended(self, int i) except -1:
        """Process the end of an engine that has left; its process ends unless it uses another engine."""
        end_turns(self.actors[i].core)
        self.actors[i].over = True
        self.actors[i].over_at = self.net.now_s
        self.living -= 1
        check_over(self, i)
        if self.seats[self.actors[i].process] == i:
            report(self, i)                 # its process ends, too
        elif self.actors[i].successor >= 0:
            self.again(self.actors[i].successor, between(&self.chance, 20e-6, 200e-6))
        open_next(self)
        return 0

    def covering(self):
        """Return how often each message, silence or failure came in each state of an exchange."""
        return {(STATES[i // NMESSAGES], MESSAGES[i % NMESSAGES]): self.coverage[i]
                for i in range(NSTATES * NMESSAGES) if self.coverage[i]}

    def describe(self):
        """Return the state of each engine as text."""
        out = []
        for i in range(self.n):
            a = self.actors[i]
            state = "dead" if a.dead else "over" if a.over else "absent" if a.absent else phase_of(a.core)
            out.append(f"{i}: {state}, step {a.step} of {a.steps}, "
                       f"doing {DOINGS[a.doing]}")
        return "; ".join(out)

    def summary(self):
        """Return a dict of the run's virtual time, events, exchanges, chunks, and steps by process."""
        cdef int i
        names = ("exchanges", "chunks", "parked", "broken", "void", "means", "turns")
        total = dict.fromkeys(names, 0)
        for i in self.made():
            c = &self.actors[i].core.mailbox.counters
            for name, count in zip(names, (c.exchanges_active, c.chunks, c.parked, c.broken, c.void_chunks, c.means, c.turns)):
                total[name] += count
        return {"seconds": self.net.now_s - 1.0, "events": self.happened, **total,
                "steps": [self.actors[i].step for i in self.seats if i >= 0],
                "dead": [bool(self.actors[i].dead) for i in self.seats if i >= 0]}

    def made(self):
        """Return the indices of all engines; without those that were freed, of which others have the counts."""
        return [i for i in range(self.n) if self.actors[i].core != NULL]

    def exchanges_of(self):
        """Return how many exchanges each engine has finished, active and passive ones."""
        cdef int i
        return [self.actors[i].core.mailbox.counters.exchanges_active + self.actors[i].core.mailbox.counters.exchanges_passive
                for i in self.made()]

    def staleness(self):
        """Return the histogram of staleness: chunks merged 0 to 62 steps after their snapshot, and more."""
        cdef int i, k
        found = [0] * HISTOGRAM
        for i in self.made():
            for k in range(HISTOGRAM):
                found[k] += self.actors[i].core.mailbox.counters.staleness[k]
        return found

    def traffic(self):
        """Return (bytes sent, messages sent, peers with which it has exchanged) for each engine."""
        cdef int i, j, peers
        out = []
        for i in range(self.n):
            peers = 0
            for j in range(self.actors[i].size if self.actors[i].core != NULL else 0):
                peers += count_of(&self.actors[i].core.mailbox, MET, j)[0] != 0
            out.append((bytes_sent(self.net, i), self.net.links[i].sent_messages, peers))
        return out

    def model(self, int i):
        """Return the model of an engine, with the corrections that it lacks added."""
        total = np.zeros(self.models[i].shape, np.float64)
        add_model(self, i, total)
        return total

    def seat_of(self, int process):
        """Return the index of the engine of a process; -1: the process has none yet."""
        return self.seats[process]

    def arrivals(self, int i):
        """Return Store.arrivals and Store.covered of an engine."""
        return self.stores[i].arrivals, self.stores[i].covered

    def is_running(self, int process):
        """Whether a process has an engine that has neither crashed nor left."""
        cdef int i = self.seats[process]
        return i >= 0 and not (self.actors[i].dead or self.actors[i].over or self.actors[i].absent)

    @property
    def now_s(self):
        """Virtual time since the start of the job, s."""
        return self.net.now_s - 1.0

    def loop_of(self, int i):
        """Return the Loop of engine `i`."""
        return self.loops[i]
