"""Fault scripts of the simulator, played on real processes: python -m tests.storm."""
