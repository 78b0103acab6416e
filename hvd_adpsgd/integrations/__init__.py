"""Doors for training frameworks: each module imports the face (hvd_adpsgd.torch) and its framework."""
