"""What happened while a script was played."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.storm.script import Script

ERROR_LINES = 200
SHOWN = ("kind", "place", "total", "failed")  # of the facts of a note


@dataclass
class Story:
    """What happened.

    Attributes:
        script: that was played.
        statuses: of the processes that were started here, by rank under srun; of mpirun alone.
        notes: of all learners, in the order of their writing.
        models: by checkpoint and super learner.
        left: the model of each super learner that has left, with all that was owed to it.
        errors: what they have written to standard error.
        broken: promises that did not hold.
    """

    script: Script
    statuses: list[int | None] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    models: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    left: dict[int, np.ndarray] = field(default_factory=dict)
    errors: str = ""
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)

    def of(self, what: str) -> list[dict[str, Any]]:
        """The notes of one kind."""
        return [note for note in self.notes if note["what"] == what]

    def __str__(self) -> str:
        began = self.notes[0]["at"] if self.notes else 0.0
        lines = [str(self.script), "what happened:"]
        for note in self.notes:
            if note["what"] == "checkpoint":
                continue
            who = f"{note.get('who', '?')} (learner {note.get('rank', '?')}{', new' * note['new']})"
            shown = " ".join(f"{k}={note[k]}" for k in SHOWN if k in note)
            lines.append(
                f"  {note['at'] - began:7.3f} s  {who}: {note['what']} at step {note['step']} {shown}"
            )
        lines.append(f"statuses {self.statuses}, {self.seconds:.1f} s")
        lines += [f"BROKEN: {what}" for what in self.broken] or ["all promises hold"]
        if self.broken:
            lines += ["--- standard error", *self.errors.splitlines()[-ERROR_LINES:]]
        return "\n".join(lines)
