"""A super learner whose model peers may read, in one process."""

import numpy as np
from hvd_adpsgd_lab.simulation import engine_calls

from hvd_adpsgd.engine.layout import TensorSpec
from hvd_adpsgd.engine.shard_memory import ShardMemory
from tests.elements import encode, raw, wide

CHUNK_NBYTES = 4096


class Shown:
    """A super learner of one learner whose model peers may read."""

    def __init__(self, values, dtype="float32", inner=None, later=0, chunk_nbytes=CHUNK_NBYTES):
        self.dtype = dtype
        self.model = encode(np.asarray(values), dtype)
        self.memory = ShardMemory(chunk_nbytes, inner, True, True)
        self.memory.extend([TensorSpec("model", self.model.shape, dtype)])
        self.addresses = [self.model.ctypes.data]
        if later:
            self.more = encode(np.zeros(later), dtype)
            self.memory.extend([TensorSpec("more", self.more.shape, dtype)])
            self.addresses.append(self.more.ctypes.data)
        self.step = 0
        self.offer()

    @property
    def store(self):
        return self.memory.store

    @property
    def place(self):
        front = self.memory._shown[0].front.ctypes.data
        return front, front + self.memory._shown[1]

    def offer(self):
        self.memory.absorb(np.array(self.addresses, np.uintp), self.step)
        self.step += 1

    def apply(self):
        if not self.memory.published:
            self.memory.publish()
        self.memory.all_met()
        self.offer()

    def state(self):
        """The model with all that is owed to it."""
        parts = [np.zeros(c.count, wide(self.dtype)) for c in self.memory.layout.parts[0].chunks]
        assert all(engine_calls.share(self.store, i, raw(part)) for i, part in enumerate(parts))
        return np.concatenate(parts).astype(np.float64)
