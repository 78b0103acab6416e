"""When MPI starts with its failure detector."""

import sys
from types import SimpleNamespace

import pytest

from hvd_adpsgd.launch import communicators
from hvd_adpsgd.launch.deadline import Deadline

DETECTOR = "OMPI_MCA_mpi_ft_detector"
SILENCE = {f"{DETECTOR}_thread": "1"}  # set by horovodrun for several hosts
PROPAGATOR = "OMPI_MCA_mpi_ft_propagator_with_rbcast"


class Library(SimpleNamespace):
    """mpi4py.MPI that says how it was started."""

    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)

    def __init__(self, running):
        super().__init__(running=running, detector=None, propagator=None)

    def Is_initialized(self):
        return self.running

    def Is_finalized(self):
        return False

    def Init_thread(self, _):
        self.running, self.detector = True, communicators.os.environ.get(DETECTOR)
        self.propagator = communicators.os.environ.get(PROPAGATOR)

    def Query_thread(self):
        return self.THREAD_MULTIPLE


@pytest.fixture
def start(monkeypatch):
    """Loads MPI in an environment, twice. Returns the library, and whether heartbeats were missed."""

    def load(running=False, **variables):
        library = Library(running)
        monkeypatch.setattr(communicators, "_missed_heartbeats", None)
        monkeypatch.setattr(communicators, "_library", lambda: library)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", library)
        for name in (DETECTOR, f"{DETECTOR}_thread", PROPAGATOR):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        communicators.load_mpi(Deadline(60))
        communicators.load_mpi(Deadline(60))
        for name in (DETECTOR, PROPAGATOR):
            assert communicators.os.environ.get(name) == variables.get(name)
        assert library.propagator == variables.get(PROPAGATOR, "1" if library.detector else None)
        return library.detector, communicators.misses_heartbeats()

    return load


def test_mpi_starts_with_heartbeats_where_their_thread_is_set_up(start):
    assert start(**SILENCE) == ("1", False)


def test_without_their_thread_nothing_is_changed(start):
    assert start() == (None, False)


@pytest.mark.parametrize("value", ["0", "1"])
def test_who_has_chosen_keeps_the_choice(start, value):
    assert start(**SILENCE, **{DETECTOR: value, PROPAGATOR: value}) == (value, False)
    assert start(**SILENCE, **{PROPAGATOR: value}) == ("1", False)


def test_it_is_noticed_that_mpi_runs_without(start):
    assert start(running=True, **SILENCE) == (None, True)
    assert start(running=True) == (None, False)
