"""An optimizer and learning-rate schedules in plain torch, usable without averaging."""
