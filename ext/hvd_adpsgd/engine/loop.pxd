# The engine's turns, for its thread and for a simulator.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass

cdef enum Rest:             # until the next turn
    AGAIN = 0
    POLL = 1                # sleep: transfers are under way
    SLEEP = 2               # sleep, but wake when the trainer wants something
    OVER = 3                # it has left: no more turns

cdef struct Rhythm:
    double pause_s          # how long to sleep
    double polls_s          # the next pause between polls, 0: none yet
    double moved            # when something last moved
    double pace             # seconds per chunk, lately; paced_at, paced: since when, from how many
    double paced_at
    int64_t paced

cdef Rest turn(Core* e, Rhythm* r) noexcept nogil
cdef void begin_turns(Core* e, Rhythm* r) noexcept nogil
cdef void end_turns(Core* e) noexcept nogil

cdef class Loop:
    cdef Core core
    cdef pthread_t thread
    cdef bint running           # the thread
    cdef bint open
    cdef object keep            # wire, clock and store stay alive as long as the thread may
