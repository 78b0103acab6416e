"""The laboratory of hvd_adpsgd: its engine simulated, explored, trained in virtual time, and measured.

    python -m hvd_adpsgd simulate        jobs in virtual time (simulate, simulation, learning)
    python -m hvd_adpsgd bench           what averaging costs (bench)

It depends on hvd_adpsgd, and hvd_adpsgd never on it.
"""

from hvd_adpsgd import __version__

__all__ = ["__version__"]
