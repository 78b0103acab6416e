# cython: language_level=3
# Why compiled: it sets fields of the engines' C structs.
"""Creation of the engines of a simulated job: wire, clock and store of each, and memory shared on a host."""

from libc.stdint cimport int64_t

import numpy as np

from hvd_adpsgd.engine.loop cimport Loop
from hvd_adpsgd.engine.store cimport Live, Neighbour, Store
from hvd_adpsgd_lab.simulation.chance cimport happens
from hvd_adpsgd_lab.simulation.network cimport MOST_TORN, Link, Net, SimulatedClock, SimulatedWire
from hvd_adpsgd_lab.simulation.state cimport NEVER, Actor, JobState
from hvd_adpsgd_lab.simulation.streams cimport StreamWire


cdef int make_engine(JobState job, schedule, model, options, bint in_node, int before=-1) except -1:
    """Make the engine of the next index; the network must already have its place.

    `in_node`: its super learner has several learners.
    If it replaces the engine `before` it uses the memory of that, so that a chunk which the old engine merges
    before it ends is not lost."""
    cdef int at = len(job.loops)
    cdef Actor* a = &job.actors[at]
    cdef Link* link = &job.net.links[at]
    cdef int nslots = 3 if in_node else 2
    wire = StreamWire if job.net.streams != NULL else SimulatedWire
    cdef Loop loop = Loop(wire(job.network, at), SimulatedClock(job.network),
                          Store(nslots) if before < 0 else job.stores[before],
                          np.ascontiguousarray(schedule, dtype=np.intc), options)
    job.late.append(None)
    job.models.append(model)
    job.stores.append(loop.keep[2])
    job.loops.append(loop)
    if before < 0:
        job.areas.append((*job.area_for(model, nslots), np.zeros((nslots, len(model)), np.uint8)))
        job.followers.append(Store(nslots) if in_node and job.checks else None)
        job.add_chunks(at, 0, job.nchunks)
    else:
        job.areas.append(job.areas[before])
        job.followers.append(job.followers[before])
    job.lay_out(loop, job.nchunks, 17)
    if job.means is not None:
        loop.average_all()
        job.gossips |= len(schedule) > 0    # none if all neighbours in the ring have failed
    a.core = &loop.core
    a.first, a.size, a.process = link.first, link.size, link.process
    a.successor = -1
    a.slowed = 1
    a.extend_at = -1
    a.turn_at = NEVER
    return 0


cdef int share_memory(JobState job, int first, int size, int64_t lane_nbytes) except -1:
    """Let the engines on one host share memory, among the `size` engines from index `first` on."""
    cdef int i, j
    own = [np.zeros(Loop.shared_nbytes(lane_nbytes), np.uint8) for _ in range(size)]
    job.kept.append(own)
    for i in range(first, first + size):
        before = job.stores.index(job.stores[i])
        job.lives.append(job.lives[before] if before < i else np.zeros(Store.live_nbytes(job.nchunks), np.uint8))
    outboxes = [each.ctypes.data for each in own]
    lives = [each.ctypes.data for each in job.lives[first:]]
    areas = [mirror.ctypes.data for mirror, *_ in job.areas[first:]]
    for i in range(size):
        near = near_by(job, first, i, size)
        if any(near):
            if not (<Store>job.stores[first + i]).memory.shown:
                job.stores[first + i].show(lives[i], areas[i])
            maps = [[at * there for at, there in zip(each, near)] for each in (outboxes, lives, areas)]
            job.loops[first + i].share(outboxes[i], *maps)
            for j in range(size):
                job.actors[first + i].core.pairs.neighbours[j].meanwhile = change_while_read
                job.actors[first + i].core.pairs.neighbours[j].simulated = job.net
    return 0


cdef void change_while_read(Neighbour* peer, int chunk) noexcept nogil:
    """Change the version of a chunk while it is read, sometimes, as the peer's trainer may do."""
    cdef Net* net = <Net*>peer.simulated
    if net.ntorn < MOST_TORN and happens(&net.chance, 0.05):
        (<Live*>peer.lives)[chunk].version += 2
        net.torn[net.ntorn] = [peer.lives, chunk]
        net.ntorn += 1


cdef list near_by(JobState job, int first, int i, int size):
    """Return for each engine from `first` on whether it is another one on the host of engine `first + i`."""
    return [j != i and job.hosts[first + j] == job.hosts[first + i] for j in range(size)]
