"""The command `python -m hvd_adpsgd`: benchmarks, simulation, tables of a run, checks, the Horovod build."""

from __future__ import annotations

import argparse
import sys

from hvd_adpsgd import __version__


def main() -> int:
    # build-horovod and doctor must run where requirements are missing: bench, which imports NumPy, comes last
    if sys.argv[1:2] == ["build-horovod"]:
        from hvd_adpsgd.tools import build_horovod

        return build_horovod.main(sys.argv[2:])
    if sys.argv[1:2] == ["doctor"]:
        from hvd_adpsgd.tools import doctor

        return doctor.main(sys.argv[2:])
    if sys.argv[1:2] == ["run"]:
        from hvd_adpsgd.tools import run

        return run.main(sys.argv[2:])
    if sys.argv[1:2] == ["simulate"]:
        from hvd_adpsgd.tools import simulate

        return simulate.main(sys.argv[2:])
    if sys.argv[1:2] == ["top"]:
        from hvd_adpsgd.tools import top

        return top.main(sys.argv[2:])
    if sys.argv[1:2] == ["report"]:
        from hvd_adpsgd.tools import report

        return report.main(sys.argv[2:])
    if sys.argv[1:2] == ["timeline"]:
        from hvd_adpsgd.tools import timeline

        return timeline.main(sys.argv[2:])
    return _measure()


def _measure() -> int:
    from hvd_adpsgd.tools import bench

    parser = argparse.ArgumentParser(prog="python -m hvd_adpsgd", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_arguments(commands.add_parser("bench", help="measure exchanges or training steps"))
    commands.add_parser(
        "run", help="start a job on one or several hosts, without MPI", add_help=False
    )
    commands.add_parser("doctor", help="examine this environment, suggest cures", add_help=False)
    commands.add_parser("top", help="a table of a run, while it lasts", add_help=False)
    commands.add_parser("report", help="an HTML page of a run, from its record", add_help=False)
    commands.add_parser("timeline", help="merge the timelines of all learners", add_help=False)
    commands.add_parser(
        "simulate",
        help="many engines in one process: replay a seed, plan a cluster",
        add_help=False,
    )
    commands.add_parser(
        "build-horovod", help="build Horovod 0.28.1 for the installed torch and MPI", add_help=False
    )
    return bench.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
