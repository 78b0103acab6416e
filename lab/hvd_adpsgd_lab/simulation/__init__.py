"""Simulation of whole jobs: many real engines in one process, over a simulated network, in virtual time."""
