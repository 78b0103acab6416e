"""Training in virtual time: super learners of a simulated job train a user's model with torch.

Only this part of the simulation needs torch. Begin with `task` (what the user gives), `run` (super learners
under real engines) and `baselines` (synchronous training and DiLoCo, which have no engines).

Engine and torch share the memory of a model (`memory`). A gradient is computed at the end of its step, from
the model that the step began with.
"""

from hvd_adpsgd_lab.learning.outcome import Outcome, Point
from hvd_adpsgd_lab.learning.task import Task
from hvd_adpsgd_lab.learning.train import train

__all__ = ["Outcome", "Point", "Task", "train"]
