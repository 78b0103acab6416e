"""Faults put into the engine on purpose: after how many seeds does the simulator find each?

    python -m tests.lab.mutants [NAME ...] [--seeds N]
    python -m tests.lab.mutants [NAME ...] --explored      # by which exhaustive exploration?

Each mutant is one replacement in one source of the engine, or in how the simulator lets a
newcomer in or opens a connection again. It is made in a copy of the project,
built there, and run seed by seed until a promise breaks, the process dies, or a seed takes longer than a
minute.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = Path("ext/hvd_adpsgd/engine")
SIMULATOR = "../../../lab/ext/hvd_adpsgd_lab/simulation"
ADMISSION = f"{SIMULATOR}/admission.pyx"  # of the simulator itself ...
# ... and the decision, which the library shares
ADMITTED = "../../../hvd_adpsgd/joining/decision.py"
STREAMS = (
    f"{SIMULATOR}/streams.pyx"  # ... beside the rule of matching.pyx, which the library shares
)
SECONDS_PER_SEED = 60

# Runs in the copy: one line per seed before it begins, so that one that hangs or dies is known.
RUNNER = """
import signal, sys
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
from hvd_adpsgd_lab.simulation.scenario import Scenario, run
signal.signal(signal.SIGALRM, signal.SIG_DFL)
for seed in range(int(sys.argv[1])):
    print(seed, flush=True)
    signal.alarm(int(sys.argv[2]))
    try:
        run(Scenario.random(seed))
    except BrokenPromise as broken:
        print("FOUND", broken)
        break
"""

EXPLORER = """
import sys
from hvd_adpsgd_lab.simulation.exploration import IN_BRIEF
from hvd_adpsgd_lab.simulation.ledger import BrokenPromise
for number, job in enumerate(IN_BRIEF):
    print(number, flush=True)
    try:
        job.run()
    except BrokenPromise as broken:
        print("FOUND", job.name + ", " + str(broken).splitlines()[0])
        break
"""


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` (found once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str


# fmt: off
MUTANTS = (
    Mutant("a NO is not matched by its number", "exchange.pxi",
        "x.number != m.exchange:\n        return\n    add(", "False:\n        return\n    add("),
    Mutant("after CUT the asker's number of chunks stands", "exchange.pxi",
        "min(x.nchunks, max(m.nchunks, x.next))", "min(x.nchunks, m.nchunks)"),
    Mutant("chunks are begun between CUT and its answer", "exchange.pxi", "x.cut = x.held = True",
        "x.cut = True"),
    Mutant("a passive exchange takes no credit", "exchange.pxi",
        "    spend_credit(&e.mailbox, x.peer if active else NOBODY)",
        "    if active:\n        spend_credit(&e.mailbox, x.peer)"),
    Mutant("a NO takes credit", "exchange.pxi", "    add(&e.mailbox.counters.refused, 1)\n",
        "    add(&e.mailbox.counters.refused, 1)\n    spend_credit(&e.mailbox, NOBODY)\n"),
    Mutant("buffers of a broken exchange are recycled while the wire uses them", "pairs.pxi",
        "    if not done:\n        return False\n    return_buffers", "    return_buffers"),
    Mutant("shared buffers are recycled before the peer has read them", "exchange.pxi",
        "    if x.set == NOBODY:\n        return True\n    received", "    return True\n    received"),
    Mutant("both sides merge the difference with the same sign", "store.pyx",
        "c.slot[c.open], half, -weight,", "c.slot[c.open], half, weight,"),
    Mutant("a difference is sent before an older one", "lanes.pxi",
        " and not (comes_second(lane) and waits.compare):", ":"),
    Mutant("a lane is taken up again before older ones have had their turn", "lanes.pxi",
        "if lane.busy and lane.index < next_one and", "if lane.busy and"),
    Mutant("a trainer does not know that its peer reads the model", "lanes.pxi",
        "lane.step = NO_STEP if lane.way == COMPARES else e.mailbox.orders.step", "lane.step = NO_STEP"),
    Mutant("the passive side begins at another chunk than the active side", "exchange.pxi",
        "x.number, x.first, x.aimed = m.exchange, m.first, m.aimed",
        "x.number, x.aimed = m.exchange, m.aimed"),
    Mutant("the active side keeps its own bits", "exchange.pxi", "    x.wire_format = m.wire_format\n", ""),
    Mutant("the passive side keeps its own bits", "exchange.pxi",
        "    send_window(e, peer, YES, x, total, window, m.generation)\n",
        "    send_window(e, peer, YES, x, total, window, m.generation)\n"
        "    x.wire_format = e.mailbox.orders.wire_format\n"),
    Mutant("an exchange through shared memory counts as use of the link", "exchange.pxi",
        "x.nbytes == 0 or x.set != NOBODY:", "x.nbytes == 0:"),
    Mutant("an exchange with other tensors begins", "exchange.pxi",
        "        give_up_ask(e, x)\n        send_no(e, peer, m)\n        return\n", "        pass\n"),
    Mutant("lanes share a buffer for differences", "lanes.pxi",
        "(x.set * LANES + lane.index % LANES) // 2", "x.set * LANES // 2"),
    Mutant("a lane is used again before its chunk is sent", "lanes.pxi", "    if lane.merged and lane.sent:",
        "    if lane.merged:"),
    Mutant("a lane sends from its neighbour's buffer", "lanes.pxi",
        "0 if lane.void else <int>nbytes\n    send(e.wire, &lane.sending, lane.out,",
        "0 if lane.void else <int>nbytes\n"
        "    send(e.wire, &lane.sending, x.lanes[(lane.chunk + 1) % LANES].out,"),
    Mutant("crossing ASKs both stand", "exchange.pxi", "x.phase == ASKED and e.wire.rank > peer",
        "x.phase == ASKED"),
    Mutant("an engine serves two at once", "exchange.pxi", "and e.pairs.serving == NOBODY\n", "\n"),
    Mutant("an engine answers YES to one that has left", "exchange.pxi",
        "and e.membership.states[peer] < LEFT\n            and", "\n            and"),
    Mutant("an answer of a suspect does not renew its exchange", "exchange.pxi",
        "    if x != NULL:\n        x.moved = now(e)\n\n\ncdef void handle_bye",
        "\n\ncdef void handle_bye"),
    Mutant("exchange numbers repeat after four", "exchange.pxi", "(p.number + 1) & 0x3FFFFFFF",
        "(p.number + 1) & 3"),
    Mutant("an engine answers YES while it is paused", "exchange.pxi", "and not orders.paused and", "and"),
    Mutant("an ASK of another round gets a YES", "exchange.pxi", "m.round == e.mailbox.orders.round and ",
        ""),
    Mutant("a layout that has grown: the larger number of chunks is taken", "exchange.pxi",
        "min(m.nchunks, generation(e).nchunks)", "m.nchunks"),
    Mutant("a side whose snapshot was void merges", "lanes.pxi", "if lane.void or nbytes == 0 or",
        "if nbytes == 0 or"),
    Mutant("a late chunk is merged between the share in a mean and the mean", "exchange.pxi",
        "x.phase != IDLE and not rests(e, x):", "x.phase != IDLE:"),
    Mutant("merging subtracts what is in the mirror now, not what was sent", "lanes.pxi",
        "e.pairs.weight, lane.inp, lane.out)",
        "e.pairs.weight, lane.inp, e.memory.blocks[0][lane.chunk].mirror)"),
    Mutant("snapshots in flight are not told to the trainer", "exchange.pxi",
        "        if x.phase == RUNNING and not x.parked:\n            oldest",
        "        if x.phase == CLOSING and not x.parked:\n            oldest"),
    Mutant("a side is not free after its exchange", "exchange.pxi",
        "    release_side(e, x.peer)\n    if x.active:", "    if x.active:"),
    Mutant("a suspect peer that answers stays suspect", "exchange.pxi",
        "    set_peer(&e.membership, peer, ALIVE)\n    if x != NULL:\n        x.moved",
        "    if x != NULL:\n        x.moved"),
    Mutant("the exchange with a peer that leaves is dropped at once", "exchange.pxi",
        "    elif x.phase != BROKEN:\n        x.parked = True",
        "    elif x.phase == RUNNING:\n        become(e, x, BROKEN)\n    elif x.phase != BROKEN:\n"
        "        x.parked = True"),
    Mutant("the end of a peer that has left breaks its exchange at once", "pairs.pxi",
        "        if e.membership.states[peer] == LEFT:\n            note_end",
        "        if False:\n            note_end"),
    Mutant("a farewell is not awaited", "loop.pyx",
        "return departure_is_known(e) and not owes_answers(e)", "return True"),
    Mutant("an engine leaves while its exchanges run", "loop.pyx", "    if finishes(e, t) or (", "    if ("),
    Mutant("rest is told with exchanges under way", "loop.pyx",
        "e.mailbox.orders.paused and not any_under_way(e) and", "e.mailbox.orders.paused and"),
    Mutant("an engine that reaches its deadline of leaving says no BYE", "loop.pyx",
        "            announce_departure(e)\n        return True",
        "            m.departing = True\n        return True"),
    Mutant("a BYE is taken for a failure", "membership.pxi", "    set_peer(m, peer, LEFT)",
        "    set_peer(m, peer, FAILED)"),
    Mutant("a BYE is not answered", "exchange.pxi", "    send_control(e, peer, BYE_SEEN, 0, 0)\n", ""),
    Mutant("an engine that leaves waits for the answer of one peer only", "departures.pxi",
        "            return 2 * now(e) > m.said_at + m.leave_by\n    return True",
        "            return peer > 1 or 2 * now(e) > m.said_at + m.leave_by\n    return True"),
    Mutant("a correction that the mirror has is in the snapshot again", "store.pyx",
        "if c.full[before][0] and not c.absorbed:", "if c.full[before][0]:"),
    Mutant("a slot is filled again while a late learner reads it", "store.pyx",
        "            m.open = (published + 1) % m.nslots\n", "            m.open = (published + 1) % 2\n"),
    Mutant("sums of an old epoch are taken", "butterfly.pxi",
        "return SUMS + (n.epoch % EPOCHS) * NUMBERS * STAGES", "return SUMS"),
    Mutant("a broken sum votes yes", "mean.pxi", "    vote(e, False)", "    vote(e, True)"),
    Mutant("buffers of a sum given up are used by the next one", "mean.pxi",
        "    m.sums.next_one = m.abandoned\n    m.abandoned = m.sums\n    m.sums = NULL\n", ""),
    Mutant("a failed member does not end the attempt at a mean", "mean.pxi",
        "            send_letters(e)\n            ended = True", "            send_letters(e)"),
    Mutant("a mean's patience for one that leaves began before it left", "mean.pxi",
        "        m.moved = now(e)        # restart the patience: a super learner that has just left "
        "has yet to end\n", ""),
    Mutant("a mean is given up while its agreement waits for a slow vote", "mean.pxi",
        "states[peer] == LEFT and not is_gone(&e.membership, peer)", "states[peer] >= LEFT"),
    Mutant("a commit is told to some only", "agreement.pyx",
        "out.targets[i] = i != a.me and not a.last.failed[i]     #",
        "out.targets[i] = i != a.me and i != a.n - 1     #"),
    Mutant("a commit does not wait for every acknowledgement", "agreement.pyx",
        "if i != a.me and not a.suspected[i] and not a.heard[i]:",
        "if i == 0 and i != a.me and not a.suspected[i] and not a.heard[i]:"),
    Mutant("a new coordinator does not adopt what was accepted", "agreement.pyx",
        "        if header.accepted > a.best:", "        if False:"),
    Mutant("a member that asks for an old decision is not told", "agreement.pyx",
        "if header.kind in (VOTE, ASK, PREPARE):     # the peer", "if False:     # the peer"),
    Mutant("a version is not raised", "store.pyx",
        "    if c.live != NULL:\n        set_version(&c.live.version, c.live.version + 1)\n        fence()\n",
        "    pass\n"),
    Mutant("a chunk that has changed while it was read is merged", "store.pyx",
        "    if version_of(&live.version) != version:\n", "    if False:\n"),
    Mutant("a newcomer gets the model of one member, not the mean", ADMISSION, "for q in m.members], axis=0)",
        "for q in m.members[:1]], axis=0)"),
    Mutant("a member goes over without the decision", ADMISSION,
        "        return say(job, p, not refused)\n",
        "        say(job, p, not refused)\n"
        "        if m.states[p] == VOTED:\n"
        "            m.states[p] = OVER\n"
        "            go_over(job, p)\n"
        "        return 0\n"),
    Mutant("members go over although one has voted no", ADMITTED,
        "    return all_made and set(voted) == set(asked)\n", "    return set(voted) == set(asked)\n"),
    Mutant("members go over although one of them was lost", ADMITTED,
        "    return all_made and set(voted) == set(asked)\n", "    return all_made\n"),
    Mutant("an old engine is left while its exchanges run", ADMISSION, "        begin_rest(job, i)\n",
        "        a.doing = TAKE_IN\n        job.again(i, 0)\n"),
    Mutant("a newcomer whose giver is lost waits for its model", ADMISSION,
        "(kind == LOST and m.joiner != TRAINS)", "(kind == LOST and m.joiner < IN)"),
    Mutant("what was lost with a connection is not sent again", "matching.pyx",
        "    u.resumes = u.first != u.unsent\n", "    u.resumes = False\n"),
    Mutant("what the peer has is sent again", "matching.pyx", "    while more > 0:\n",
        "    while more > 0 and not u.resumes:\n"),
    Mutant("a message that came in part is confirmed", STREAMS,
        "        m.lost |= m.src == s.src and not m.arrived\n",
        "        if m.src == s.src and not m.arrived and not m.lost:\n"
        "            s.received = counted(s.received)\n"
        "            m.lost = True\n"),
    Mutant("a send is complete before it is confirmed", "matching.pyx",
        "    if post.owned:\n        post.status = DONE\n    u.unsent = post.after",
        "    post.status = DONE\n    u.unsent = post.after"),
    Mutant("new messages are sent before those that were lost", STREAMS,
        "    if not s.is_open or s.outgoing.resumes:\n", "    if not s.is_open:\n"),
    Mutant("a count of an earlier connection is obeyed", STREAMS,
        "    if what >> 32 != s.connection or not s.is_open:\n", "    if not s.is_open:\n"),
    Mutant("an answer in few bits is merged with the sign of the other side", "store.pyx",
        "merge_answer(c, wire, -weight, answer)", "merge_answer(c, wire, weight, answer)"),
    Mutant("a correction waits for the turn of its chunk", "store.pyx",
        "        counts = corrected or c.step < 0 or has_turn(r, chunk, r.checked)\n",
        "        counts = c.step < 0 or has_turn(r, chunk, r.checked)\n"),
    Mutant("a peer is asked while an exchange with it is under way", "partners.pxi",
        "            and find(e, peer) == NULL and has_room(e, peer))", "            and has_room(e, peer))"),
    Mutant("a peer is asked after it has left", "partners.pxi",
        "peer != e.wire.rank and e.membership.states[peer] == ALIVE\n", "peer != e.wire.rank\n"),
)
# fmt: on


def copied(folder: Path) -> Path:
    """A copy of the project that can be built, with what is built already."""
    copy = folder / "project"
    for part in ("ext", "hvd_adpsgd", "build", "lab"):
        if (ROOT / part).exists():
            shutil.copytree(ROOT / part, copy / part)
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / part, copy / part)
    for setup in (copy / "setup.py", copy / "lab" / "setup.py"):  # compiling is most of the time
        setup.write_text(setup.read_text().replace('"-O3"', '"-O1"'))
    return copy


def build(copy: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    for folder in (copy, copy / "lab"):
        env = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"mutants: the copy does not build:\n{done.stdout[-500:]}{done.stderr[-2000:]}"
            )


def applied(mutant: Mutant, source: str) -> str:
    """The source with the fault.

    Raises:
        SystemExit: if the text to replace is not there once: the source has changed.
    """
    if source.count(mutant.old) != 1:
        raise SystemExit(
            f"mutants: {mutant.name!r} replaces text that is {source.count(mutant.old)} times in "
            f"{ENGINE / mutant.file}, needed is once. Adapt it to the source."
        )
    return source.replace(mutant.old, mutant.new)


def seeds_until_found(copy: Path, seeds: int) -> tuple[int | None, str]:
    """How many seeds it takes, None if they do not suffice; and what is found. 0 seeds: explorations."""
    numbers = map(str, (seeds, SECONDS_PER_SEED))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER if seeds else EXPLORER, *numbers],
        env={
            "PYTHONPATH": f"{copy}:{copy / 'lab'}",
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        cwd=copy,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    found = next((line for line in lines if line.startswith("FOUND")), "")
    count = sum(line.isdigit() for line in lines)
    if found:
        return count, found.removeprefix("FOUND ").partition(":")[0]
    if done.returncode:
        return count, f"the process ends ({done.returncode}) {done.stderr[-100:]}"
    return None, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants with one of these words")
    parser.add_argument("--seeds", type=int, default=1000, help="at most so many per mutant")
    parser.add_argument(
        "--shard", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every N-th only"
    )
    parser.add_argument(
        "--explored", action="store_true", help="explore every interleaving, not seeds"
    )
    args = parser.parse_args()
    seeds, unit = (0, "explorations") if args.explored else (args.seeds, "seeds")
    chosen = [m for m in MUTANTS if not args.names or any(n in m.name for n in args.names)]
    chosen = chosen[args.shard[0] :: args.shard[1]]
    counts: list[int] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        build(copy)
        if seeds_until_found(copy, min(seeds, 50))[0] is not None:
            raise SystemExit("mutants: the engine itself breaks a promise. Run: make simulate")
        print("| fault | found after | by |\n|---|---|---|", flush=True)
        for mutant in chosen:
            path = copy / ENGINE / mutant.file
            source = path.read_text()
            path.write_text(applied(mutant, source))
            build(copy)
            count, what = seeds_until_found(copy, seeds)
            path.write_text(source)
            print(
                f"| {mutant.name} | {count or ('no' if args.explored else f'not in {seeds}')} | {what} |",
                flush=True,
            )
            counts.append(count or seeds)
            missed += [] if count else [mutant.name]
    print(
        f"\n{len(chosen) - len(missed)} of {len(chosen)} found, median {statistics.median(counts)} {unit}"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
