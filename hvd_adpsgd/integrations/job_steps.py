"""Steps of the job, in which frameworks count: how they divide the samples of its epochs."""

from typing import NamedTuple


class JobSteps(NamedTuple):
    """Steps and samples are counted from the first epoch on; an epoch's last step may be short."""

    length: int  # samples of an epoch
    rows_of_step: int  # of all learners together
    of_epoch: int

    def made(self, rows: int) -> int:
        """Return how many steps the job has made with its first `rows` samples."""
        return rows // self.length * self.of_epoch + rows % self.length // self.rows_of_step

    def rows(self, step: int) -> int:
        """Return with how many samples it has made `step` steps."""
        rest = step % self.of_epoch * self.rows_of_step
        return step // self.of_epoch * self.length + min(self.length, rest)
