# cython: language_level=3
# Why compiled: it frees what compiled engines have allocated.
"""Buffers that an engine keeps because its wire may still use them: after a simulation they can be freed."""

from libc.stdlib cimport free

from hvd_adpsgd.engine.core cimport Core, Exchange, Letter, Sums


cdef void take_back(Core* e) noexcept:
    """Free the buffers that an ended engine has kept for its wire, which uses none any more."""
    cdef Exchange* x
    cdef Sums* sums
    while e.pairs.running != NULL:
        x = e.pairs.running
        e.pairs.running = x.next_one
        free(x.buffers)
        free(x)
    while e.mean.abandoned != NULL:
        sums = e.mean.abandoned
        e.mean.abandoned = sums.next_one
        free(sums)
    free_letters(&e.control.outgoing)
    free_letters(&e.mean.letters)
    e.control.listening.in_use = e.mean.listening.in_use = e.mean.running = False


cdef void free_letters(Letter** link) noexcept:
    cdef Letter* letter
    while link[0] != NULL:
        letter = link[0]
        link[0] = letter.next_one
        free(letter)
