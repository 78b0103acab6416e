"""A training step: its gradients, the averaged tensors, corrections, rounds, checkpoints and metrics."""
