"""Builds the compiled simulator; everything else about the laboratory is in pyproject.toml.

Each ext/hvd_adpsgd_lab/PACKAGE/NAME.pyx becomes hvd_adpsgd_lab.PACKAGE.NAME. They cimport the engine's .pxd:
those of the checkout around this folder, else those beside the installed hvd_adpsgd.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

import hvd_adpsgd

PYX_DIR = Path("ext")
PACKAGE = Path(hvd_adpsgd.__file__).parent
CHECKOUT = PACKAGE.parent / "ext"
CONTRACTS = CHECKOUT if (CHECKOUT / "hvd_adpsgd").is_dir() else PACKAGE.parent
# The engine's (see its setup.py), for the same reasons: a simulated exchange rounds as a real one.
COMPILE_FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-pthread"]
COMPILE_FLAGS += ["-g0"] * ("-g" not in os.environ.get("CFLAGS", ""))
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
IN_PLACE = "ADPSGD_IN_PLACE" in os.environ
ABI_MACROS = [("Py_LIMITED_API", "0x030b0000")] if STABLE_ABI else []


class BuildExtensions(build_ext):
    """Cythonizes and compiles, as many modules at once as there are cores."""

    def run(self) -> None:
        if not self.extensions or (IN_PLACE and self.editable_mode):
            return
        from Cython.Build import cythonize

        cythonize(
            [Extension(e.name, list(e.sources)) for e in self.extensions],
            include_path=[str(PYX_DIR), str(CONTRACTS)],
            language_level=3,
            compiler_directives={"show_performance_hints": False},
            quiet=True,
        )
        for extension in self.extensions:
            extension.sources = [source.replace(".pyx", ".c") for source in extension.sources]
            extension.extra_compile_args += COMPILE_FLAGS
            extension.extra_link_args += ["-pthread"]
            extension.define_macros += ABI_MACROS
            extension.py_limited_api = STABLE_ABI
        self.parallel = self.parallel or min(len(self.extensions), os.cpu_count() or 1)
        super().run()


setup(
    ext_modules=[
        Extension(".".join(source.relative_to(PYX_DIR).with_suffix("").parts), [str(source)])
        for source in sorted(PYX_DIR.rglob("*.pyx"))
    ],
    install_requires=[f"hvd_adpsgd=={hvd_adpsgd.__version__}", "numpy", "psutil"],
    cmdclass={"build_ext": BuildExtensions},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
