"""Watching a run: reports of super learners, their record on disk, dashboard, alerts and exports."""
