"""Shared memory of a super learner, where one process stands for all."""

import errno
import os

import numpy as np
import pytest

from hvd_adpsgd.engine import shared_memory
from hvd_adpsgd.errors import PeerFailedError, TransportError
from tests.gathers import Mates
from tests.holdings import holdings


def test_a_model_with_nothing_to_average_has_a_mailbox_too():
    empty = shared_memory.SharedSlots(0, 0, Mates(0, 2))
    assert [slot.size for slot in empty.slots] == [0, 0, 0]
    assert [flags.size for flags in empty.flags] == [0, 0, 0]


@pytest.mark.parametrize("step", ["bcast", "allgather"])
def test_memory_of_which_a_learner_is_lost_leaves_nothing(step, monkeypatch):
    def lost(*args, **options):
        raise PeerFailedError("a learner has ended")

    monkeypatch.setattr(Mates, step, lost)
    before = holdings()
    with pytest.raises(PeerFailedError):
        shared_memory.SharedSlots(5000, 3, Mates(0, 2))
    assert not holdings() - before


def test_a_learner_alone_has_two_slots():
    assert len(shared_memory.SharedSlots(5000, 3).slots) == 2


def test_memory_never_has_a_name():
    """A process killed while the others map its memory leaves nothing behind."""
    before = set(os.listdir(shared_memory.SHARED_FOLDER))
    file = shared_memory._reserve(2**20)
    area = shared_memory._map(file, 2**20)
    assert set(os.listdir(shared_memory.SHARED_FOLDER)) == before
    again = shared_memory._map(file, 2**20)
    os.close(file.handle)
    area[5] = 7
    assert again[5] == 7


@pytest.mark.parametrize("what", ["inode", "device", "folder", "closed", "replaced"])
def test_memory_of_somebody_else_is_not_mapped(what, monkeypatch, tmp_path):
    file = shared_memory._reserve(4096)
    if what == "closed":
        os.close(file.handle)
    elif what == "folder":  # theirs is another one
        monkeypatch.setattr(shared_memory, "SHARED_FOLDER", str(tmp_path))
    elif what == "replaced":  # when it is opened, its number is that of another file
        real, other = os.open, f"/proc/self/fd/{shared_memory._reserve(4096).handle}"
        monkeypatch.setattr(os, "open", lambda path, *how: real(other, *how))
    else:
        file = file._replace(**{what: getattr(file, what) + 1})
    with pytest.raises(OSError, match="another|No such file"):
        shared_memory._map(file, 4096)
    assert shared_memory.try_map(file, 4096) is None


def test_a_host_that_cannot_be_identified_is_told_with_its_cure(monkeypatch):
    def refused(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(shared_memory, "open", refused, raising=False)
    with pytest.raises(TransportError, match=r"Too many open files.*ulimit -n"):
        shared_memory.host_name()


@pytest.mark.parametrize("touch", [True, False])
def test_pages_that_are_not_touched_cost_nothing_when_they_are_mapped(touch):
    file = shared_memory._reserve(2**20)
    area = np.frombuffer(shared_memory.try_map(file, 2**20, touch=touch), dtype=np.uint8)
    os.close(file.handle)
    assert _resident_kib(area) == (1024 if touch else 0)
    area[5] = 7
    assert area[5] == 7


def _resident_kib(memory):
    """Return the KiB of an area's pages that are mapped."""
    with open("/proc/self/smaps") as file:
        areas = file.read().split("VmFlags:")
    (area,) = [a for a in areas if f"\n{memory.ctypes.data:x}-" in a]
    (line,) = [line for line in area.splitlines() if line.startswith("Rss:")]
    return int(line.split()[1])


def test_private_memory_may_have_huge_pages_and_is_not_copied_for_children():
    memory = shared_memory.private_memory(4 << 20)
    memory[:] = 3
    with open("/proc/self/smaps") as file:
        areas = file.read().split("VmFlags:")
    (area,) = [a for a in areas if f"\n{memory.ctypes.data:x}-" in a]
    assert " rw-p " in area and "/dev/zero" not in area
    child = os.fork()
    if child == 0:
        os._exit(int(memory.any()))  # a worker of a data loader
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (memory == 3).all()
