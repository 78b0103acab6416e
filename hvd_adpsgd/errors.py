"""Every exception of the library, and what to do when one is caught.

All exceptions derive from `AdpsgdError`, and from the builtin exception that a Python programmer would expect
(a wrong value is also a ValueError), so that `except ValueError` of an existing script keeps working.
Messages have four parts: what is wrong, where, the value against its bound, the cure.
"""


class AdpsgdError(Exception):
    """Base of every exception raised by this library.

    Catch it to distinguish this library's errors from those of torch, Horovod or the script itself.
    """


class ConfigError(AdpsgdError, ValueError):
    """An option or an argument has an unknown name or a value out of its range.

    Raised when a Config is made, when the environment is read, and when a strategy is parsed or
    constructed: before training, on every learner. Correct the named variable or argument.
    """


class MissingRequirementError(AdpsgdError, ImportError):
    """torch, Horovod or MPI is not installed, or does not load.

    Raised when `hvd_adpsgd.torch` is imported, and by init() for MPI. The message names the command
    that installs what is missing.
    """


class TopologyError(AdpsgdError, ValueError):
    """A rank, a number of super learners or a matrix does not fit the requested communication graph.

    Raised by the pure functions of `theory` and `strategies`, and if an engine finds no network address on
    which peers can reach it. Correct the argument, or do what the message says.
    """


class WorldError(AdpsgdError, RuntimeError):
    """The communicators that hvd.init() makes (the worlds) are not in the state that the call needs.

    Base class of the errors of init() and shutdown(). Read the message: it says what to do.
    """


class NotInitializedError(WorldError, ValueError):
    """A function that needs hvd.init() was called before init() or after shutdown().

    Call hvd.init() first. The exception is also a ValueError because Horovod raises a ValueError then.
    """


class AlreadyInitializedError(WorldError):
    """init() was called a second time without a shutdown() between.

    Call shutdown() first, or drop the second call.
    """


class LaunchError(WorldError):
    """The processes were started in such a way that hvd.init() cannot connect them.

    For instance with another version of hvd_adpsgd on one host, or with an MPI that lacks
    MPI_THREAD_MULTIPLE.
    Start the job again as the message says.
    """


class ModelMismatchError(AdpsgdError, ValueError):
    """Averaged tensors differ, in number, order, shape or dtype, between super learners or between two calls.

    Number, shapes, dtypes and order of the averaged tensors must be equal on all learners. Build
    the same model on every learner, and wrap it in the optimizer in the same order.
    """


class CollectiveMismatchError(ModelMismatchError):
    """Learners called different operations over all learners, or one operation with tensors that do not fit.

    Or one learner waits in an operation for another, which waits in a step for the first. Raised on all
    learners in the operation or the step. It is also a HorovodInternalError. Call the same operation with the
    same name, dtype and shape on all learners, after the same number of steps.
    """


class StrategyMismatchError(AdpsgdError, ValueError):
    """Learners were given different arguments or strategies, or a strategy with which this call cannot work.

    Give every learner the same arguments, such as `averaging` (spec and seed), in the script or environment.
    """


class UnsupportedOptimizerError(AdpsgdError, TypeError):
    """The object to wrap is not an optimizer that can be wrapped.

    Pass an instance of torch.optim.Optimizer that is not wrapped already.
    """


class NonFiniteModelError(AdpsgdError, ArithmeticError):
    """The local model holds NaN or infinity, and `nonfinite` is "raise".

    Such a model must not reach peers. Lower the learning rate, warm it up or clip gradients; set
    `nonfinite="skip"` to continue training without exchanges until the model is finite again.
    """


class DeviceMovedError(AdpsgdError, RuntimeError):
    """A parameter changed device or storage after the optimizer was wrapped.

    Move the model first (`model.to(device)`), then wrap the optimizer.
    """


class GradientOrderError(AdpsgdError, AssertionError):
    """Gradients were changed, or computed once more, while they are being averaged.

    Without this error the learners of one super learner would step with different gradients. It is also an
    AssertionError because Horovod raises an AssertionError then. The model is unchanged, or the message
    says which update was applied. Call `optimizer.synchronize()` before gradients are changed, and
    `optimizer.zero_grad()` before new gradients are computed.
    """


class TransportError(AdpsgdError, RuntimeError):
    """The network layer between super learners failed in a way that ends averaging.

    Raised at the next step or at the end of training, never from the engine's thread. The local
    model is intact: save it, and start the job again.

    Attributes:
        code: error code of the transport, such as MPI's error class; None without one.
        peer: super_rank of the super learner at the other end; None if the error concerns no peer.
    """

    def __init__(self, message: str = "", *, code: int | None = None, peer: int | None = None):
        super().__init__(message)
        self.code = code
        self.peer = peer


class PeerFailedError(TransportError):
    """A super learner that this one cannot do without has failed.

    Failures of other peers are only logged. Raised when an operation needs the failed super learner (an
    allreduce over all learners, say). Catch it to save the model and continue alone, or restart.
    """


class LearnerFailedError(PeerFailedError):
    """A learner of this super learner failed, so the whole super learner leaves.

    Raised on the remaining learners of the super learner at their next step; other super learners continue
    without it, and replace it if they call hvd.admit. The model in this process is intact, except for the
    current step. Save what exists only in this process, and exit.
    """


class QuorumLostError(PeerFailedError):
    """Half or more of the super learners have failed, and `quorum` is "majority".

    When a network fault divides the job, only the larger side continues to train. Raised on all learners of a
    super learner after the same step, by every later step too, and by operations over all learners. The model
    is intact: save a checkpoint, and exit.
    """


class InnerOnlyError(AdpsgdError, ValueError):
    """A Horovod operation that works only inside a super learner was called for all learners.

    Call it with `process_set=hvd.super_learner`, or start the job as one super learner.
    """


class CopyError(AdpsgdError, TypeError):
    """A wrapped optimizer was deep-copied or pickled, which would duplicate a live engine.

    Copy `optimizer.state_dict()` instead, and wrap a new optimizer around the new model.
    """
