"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A failing example prints the line that reproduces it; no deadline, for the machine may be busy.
settings.register_profile("hvd_adpsgd", print_blob=True, deadline=None)
