"""Watching a run: reports of super learners, their record on disk, alerts and exports."""
