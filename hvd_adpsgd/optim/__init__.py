"""Optimizers and schedules in plain torch."""
