# The turns of an engine, which its thread takes, or a simulator.
from libc.stdint cimport int64_t

from hvd_adpsgd.engine.core cimport Core

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass

cdef enum Rest:             # what the thread does until the next turn
    AGAIN = 0               # nothing: take the next turn at once
    POLL = 1                # sleep shortly: transfers are under way
    SLEEP = 2               # sleep longer; the trainer wakes the thread when it wants something
    OVER = 3                # the engine has left: no more turns

cdef struct Rhythm:
    double pause_s          # how long to sleep until the next turn
    double polls_s          # the next pause between polls; 0: the last turn did something
    bint woken              # each event that the last turn waits for wakes the thread
    double moved            # when a turn last did something
    double pace             # seconds per chunk, smoothed
    double paced_at         # when `pace` was last updated
    int64_t paced           # ... and how many chunks had been merged or left out by then

cdef char* mapped(Core* e, int peer) noexcept nogil
cdef Rest turn(Core* e, Rhythm* r) noexcept nogil
cdef void begin_turns(Core* e, Rhythm* r) noexcept nogil
cdef void end_turns(Core* e) noexcept nogil

cdef class Loop:
    cdef Core core
    cdef pthread_t thread
    cdef bint running           # the thread runs
    cdef bint open
    cdef object keep            # references that keep wire, clock and store alive
