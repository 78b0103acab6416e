"""The exception tree: bases, and what survives pickling (learners send errors to each other)."""

import pickle

import pytest

from hvd_adpsgd import errors
from hvd_adpsgd.engine import failures
from hvd_adpsgd.engine.failures import ulfm_advice

BASES = {
    "AdpsgdError": (Exception,),
    "ConfigError": (ValueError,),
    "MissingRequirementError": (ImportError,),
    "TopologyError": (ValueError,),
    "WorldError": (RuntimeError,),
    "NotInitializedError": (errors.WorldError, ValueError),
    "AlreadyInitializedError": (errors.WorldError,),
    "LaunchError": (errors.WorldError,),
    "ModelMismatchError": (ValueError,),
    "CollectiveMismatchError": (errors.ModelMismatchError,),
    "StrategyMismatchError": (ValueError,),
    "UnsupportedOptimizerError": (TypeError,),
    "NonFiniteModelError": (ArithmeticError,),
    "DeviceMovedError": (RuntimeError,),
    "GradientOrderError": (AssertionError,),
    "TransportError": (RuntimeError,),
    "PeerFailedError": (errors.TransportError,),
    "LearnerFailedError": (errors.PeerFailedError,),
    "QuorumLostError": (errors.PeerFailedError,),
    "InnerOnlyError": (ValueError,),
    "CopyError": (TypeError,),
}


def test_table_names_every_error():
    assert set(BASES) == {name for name in vars(errors) if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(BASES))
def test_bases_and_docstring(name):
    error = getattr(errors, name)
    assert all(issubclass(error, base) for base in BASES[name])
    assert issubclass(error, errors.AdpsgdError)
    assert len(error.__doc__.strip().splitlines()) >= 3


@pytest.mark.parametrize("error", [errors.TransportError, errors.PeerFailedError])
def test_transport_error_keeps_code_and_partner(error):
    raised = error("no answer", code=54, peer=3)
    for one in (raised, pickle.loads(pickle.dumps(raised))):
        assert (type(one), str(one), one.code, one.peer) == (error, "no answer", 54, 3)


@pytest.mark.parametrize(
    ("enabled", "mpi", "advised"),
    [("", True, True), ("0", True, True), ("1", True, False), ("", False, False)],
)
def test_ulfm_is_advised_where_it_is_off(monkeypatch, enabled, mpi, advised):
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", enabled)
    monkeypatch.setattr(failures, "is_under_mpi", lambda: mpi)
    assert ("--with-ft ulfm" in ulfm_advice()) == advised
