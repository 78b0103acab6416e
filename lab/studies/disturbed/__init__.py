"""The parts of `studies/cluster.py`: learners, measurements, tables and figures.

They form a package, so that they can be imported: `cluster.py` is only run as a script.
"""
