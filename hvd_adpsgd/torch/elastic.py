"""Counterpart of horovod.torch.elastic, for jobs of one super learner.

TorchState, ElasticSampler and run raise InnerOnlyError with several super learners, because Horovod
synchronizes the learners of one super learner only.
"""

import functools
from collections.abc import Callable
from typing import Any

from hvd_adpsgd.inner import elastic as inner_elastic
from hvd_adpsgd.inner.elastic import run_fn, sampler, state
from hvd_adpsgd.torch.basics import init, shutdown
from hvd_adpsgd.torch.horovod_ops import require_one_super_learner

# Of a job with several super learners.
_CURE = (
    " Super learners that fail do not stop the others, and hvd.admit() replaces them and adds new ones, "
    "without Horovod's elastic state. Or start"
)

__all__ = ["ElasticSampler", "TorchState", "init", "run", "sampler", "shutdown", "state"]


class TorchState(inner_elastic.TorchState):
    """Horovod's TorchState, which synchronizes one super learner; raises if there are several."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_one_super_learner("elastic.TorchState", _CURE)
        super().__init__(*args, **kwargs)


class ElasticSampler(inner_elastic.ElasticSampler):
    """Horovod's ElasticSampler, which partitions data over one super learner; raises if there are several."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_one_super_learner("elastic.ElasticSampler", _CURE)
        super().__init__(*args, **kwargs)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an elastic training function as Horovod does; with several super learners a call raises."""
    elastic = run_fn(func, _reset)

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        require_one_super_learner("elastic.run", _CURE)
        return elastic(*args, **kwargs)

    return checked


def _reset() -> None:
    shutdown()
    init()
