"""A training step: gradients, averaged tensors, corrections from exchanges, rounds, checkpoints, metrics."""
