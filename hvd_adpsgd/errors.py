"""Every exception of the library, and what to do when one is caught.

All derive from `AdpsgdError`, and from the builtin a Python programmer would expect in that place
(a wrong value is also a ValueError), so that `except ValueError` of an existing script keeps
working. Messages have four parts: what, where, the value against its bound, the cure.
"""

from __future__ import annotations

__all__ = [
    "AdpsgdError",
    "AlreadyInitializedError",
    "CollectiveMismatchError",
    "ConfigError",
    "CopyError",
    "DeviceMovedError",
    "GradientOrderError",
    "InnerOnlyError",
    "LaunchError",
    "LearnerFailedError",
    "MissingRequirementError",
    "ModelMismatchError",
    "NonFiniteModelError",
    "NotInitializedError",
    "PeerFailedError",
    "QuorumLostError",
    "StrategyMismatchError",
    "TopologyError",
    "TransportError",
    "UnsupportedOptimizerError",
    "WorldError",
]


class AdpsgdError(Exception):
    """Base of every exception raised by this library.

    Catch it to tell our failures from those of torch, Horovod or the script itself.
    """


class ConfigError(AdpsgdError, ValueError):
    """An option or an argument has an unknown name or a value out of its range.

    Raised when a Config is made, when the environment is read, and when a strategy is parsed or
    constructed: before training, on every learner alike. Correct the named variable or argument.
    """


class MissingRequirementError(AdpsgdError, ImportError):
    """torch, Horovod or MPI is not installed, or does not load.

    Raised when `hvd_adpsgd.torch` is imported, and by init() for MPI. The message names the command
    that installs what is missing.
    """


class TopologyError(AdpsgdError, ValueError):
    """A rank, a number of super learners or a matrix does not fit the graph asked for.

    Raised by the pure functions of `topology`, `mixing` and `strategies`. Correct the argument.
    """


class WorldError(AdpsgdError, RuntimeError):
    """The learners' worlds are not in the state that the call needs.

    Base of the errors of init and shutdown. Read the message of the kind actually raised.
    """


class NotInitializedError(WorldError, ValueError):
    """A function that needs the worlds was called before init() or after shutdown().

    Call hvd.init() first. It is also a ValueError because Horovod raises one in this place.
    """


class AlreadyInitializedError(WorldError):
    """init() was called a second time without a shutdown() between.

    Call shutdown() first, or drop the second call.
    """


class LaunchError(WorldError):
    """The processes were started in a way in which the worlds cannot be built.

    For instance with another version of hvd_adpsgd on one host, or with an MPI that lacks
    MPI_THREAD_MULTIPLE.
    Start the job again as the message says.
    """


class ModelMismatchError(AdpsgdError, ValueError):
    """Super learners, or two calls of one learner, disagree about the model's layout.

    Number, shapes, dtypes and order of the averaged tensors must be the same everywhere. Build
    the same model on every learner, and wrap it in the optimizer in the same order.
    """


class CollectiveMismatchError(ModelMismatchError):
    """Learners called different operations over all learners, or with tensors that do not fit.

    Or one waits in an operation for another, which waits for a step of it. Raised on all learners in the
    operation or the step, and also a HorovodInternalError. Call the same operation with the same name,
    dtype and shape everywhere, after the same number of steps.
    """


class StrategyMismatchError(AdpsgdError, ValueError):
    """Learners were given different arguments or strategies, or a strategy that this call cannot serve.

    Give every learner the same, such as `averaging` (spec and seed), in the script or the environment.
    """


class UnsupportedOptimizerError(AdpsgdError, TypeError):
    """The object to wrap is not an optimizer that can be wrapped.

    Pass an instance of torch.optim.Optimizer that is not wrapped already.
    """


class NonFiniteModelError(AdpsgdError, ArithmeticError):
    """The local model holds NaN or infinity, and `nonfinite` is "raise".

    Such a model must not reach peers. Lower the learning rate, warm it up or clip gradients; set
    `nonfinite="skip"` to train on without exchanging until the model is finite again.
    """


class DeviceMovedError(AdpsgdError, RuntimeError):
    """A parameter changed device or storage after the optimizer was wrapped.

    Move the model first (`model.to(device)`), then wrap the optimizer.
    """


class GradientOrderError(AdpsgdError, AssertionError):
    """Gradients were changed, or computed once more, at a moment when they are being averaged.

    Without it the learners of a super learner would step with different numbers. It is also an AssertionError
    because Horovod raises one in such places. Nothing was applied to the model unless the message says
    so. Call `optimizer.synchronize()` before gradients are changed, and `optimizer.zero_grad()` before new
    ones are computed.
    """


class TransportError(AdpsgdError, RuntimeError):
    """The network layer between super learners failed in a way that ends averaging.

    Raised at the next step or at the end of training, never from the engine's thread. The local
    model is whole: save it, and start the job again.

    Attributes:
        code: error code or class of the transport (MPI's error class), None if there is none.
        peer: outer rank of the super learner at the other end, None if not about one.
    """

    def __init__(
        self, message: str = "", *, code: int | None = None, peer: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.peer = peer


class PeerFailedError(TransportError):
    """A super learner that this one cannot do without has failed.

    A failed peer is only logged; this is raised where an operation needs it (an allreduce over all
    learners, say). Catch it to save the model and continue alone, or restart.
    """


class LearnerFailedError(PeerFailedError):
    """A learner of this super learner failed, so the whole super learner leaves.

    Raised on its other learners at their next step; the other super learners train on without it. The
    model of this one is whole, but for the step under way. Save what only this process has, and end.
    """


class QuorumLostError(PeerFailedError):
    """Half or more of the super learners have failed, and `quorum` is "majority".

    After a cut network only the larger side trains on. Raised on all learners of a super learner after the
    same step, by every later step too, and by operations over all learners. The model is whole: save a
    checkpoint, and end.
    """


class InnerOnlyError(AdpsgdError, ValueError):
    """A Horovod operation that works only inside a super learner was called on all learners.

    Call it with `process_set=hvd.super_learner`, or start the job as one super learner.
    """


class CopyError(AdpsgdError, TypeError):
    """A wrapped optimizer was deep-copied or pickled, which would duplicate a live engine.

    Copy `optimizer.state_dict()` instead, and wrap a new optimizer around the new model.
    """
