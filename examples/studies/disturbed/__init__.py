"""The parts of `make bench-cluster`: what its learners do, what it measures, tables and figures.

A package, so that its modules have names of their own: `cluster.py` is only run, never
imported.
"""
