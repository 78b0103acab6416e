"""A cheaper start and end for the learners of the tests: torch comes in for 1.0 CPU s instead of 2.5.

A test's learner lives a few seconds, most of which Python would spend on three things that change
nothing in it. The tests of `run_learners(launcher="horovodrun")`, of the doctor and of the examples go
without: there learners start as users' do.
"""

import contextlib
import ctypes
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace


class Torch:
    """Finds torch where it is; while torch is imported, nothing is garbage yet, so nothing is collected."""

    @staticmethod
    def find_spec(name: str, path: None = None, target: None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torch" else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_at_rest(module: ModuleType) -> None:
            gc.disable()
            try:
                load(module)
            finally:
                gc.freeze()
                gc.enable()
            with contextlib.suppress(AttributeError):  # idle.c is not preloaded
                ctypes.CDLL(None).leave_the_rest()

        spec.loader.exec_module = load_at_rest  # type: ignore[method-assign]
        return spec


def compiler() -> ModuleType:
    """What torch.optim asks of torch's compiler where nothing is compiled: to stay away.

    The real one is imported by the first optimizer, with all of sympy.
    """
    module = ModuleType("torch._dynamo")
    module.disable = lambda fn, *args, **how: fn  # type: ignore[attr-defined]
    module.graph_break = lambda *args: None  # type: ignore[attr-defined]
    # init_process_group and DistributedDataParallel ask for these
    module.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # type: ignore[attr-defined]
    module.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # type: ignore[attr-defined]
    return module


sys.meta_path.insert(0, Torch)  # type: ignore[arg-type]
if "TEST_IMPORTS" not in os.environ:  # modules that need the compiler
    sys.modules["torch._dynamo"] = compiler()
