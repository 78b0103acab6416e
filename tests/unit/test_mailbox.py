"""Shared memory of a node, where one process stands for all."""

from hvd_adpsgd import mailbox


class TwoLearners:
    """What a mailbox asks of a communicator, as the leader of two sees it."""

    def Get_size(self):
        return 2

    def Get_rank(self):
        return 0

    def bcast(self, value):
        return value

    def allgather(self, value):
        return [value, value]


def test_a_model_with_nothing_to_average_has_a_mailbox_too():
    empty = mailbox.Mailbox(0, 0, TwoLearners())
    assert [slot.size for slot in empty.slots] == [0, 0]
    assert [flags.size for flags in empty.flags] == [0, 0]


def test_slots_and_flags_lie_apart_and_start_at_zero():
    box = mailbox.Mailbox(5000, 3, TwoLearners())
    for i, part in enumerate([*box.slots, *box.flags]):
        assert not part.any()
        part[:] = i + 1
    for i, part in enumerate([*box.slots, *box.flags]):
        assert (part == i + 1).all()
