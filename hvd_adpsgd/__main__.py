"""python -m hvd_adpsgd: measure, examine this machine, and build Horovod."""

from __future__ import annotations

import argparse
import sys

from hvd_adpsgd import __version__


def main() -> int:
    # What these two are for may be missing where they run, so bench, which needs it, comes after.
    if sys.argv[1:2] == ["build-horovod"]:
        from hvd_adpsgd.tools import build_horovod

        return build_horovod.main(sys.argv[2:])
    if sys.argv[1:2] == ["doctor"]:
        from hvd_adpsgd.tools import doctor

        return doctor.main(sys.argv[2:])
    return _measure()


def _measure() -> int:
    from hvd_adpsgd.tools import bench

    parser = argparse.ArgumentParser(prog="python -m hvd_adpsgd", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_arguments(commands.add_parser("bench", help="measure exchanges or training steps"))
    commands.add_parser("doctor", help="is this environment fit? what cures it?", add_help=False)
    commands.add_parser(
        "build-horovod", help="build Horovod 0.28.1 for the installed torch and MPI", add_help=False
    )
    return bench.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
