"""The command `python -m hvd_adpsgd`: start a job, watch it, check the environment, build Horovod."""

import argparse
import importlib
import sys

from hvd_adpsgd import __version__

# Command: its module, whose main() takes the arguments, and one line of help. Only the module of the command
# is imported: build-horovod and doctor must run where requirements are missing.
_COMMANDS = {
    "run": ("hvd_adpsgd.tools.run", "start a job on one or several hosts, without MPI"),
    "doctor": ("hvd_adpsgd.tools.doctor", "examine this environment, suggest cures"),
    "top": ("hvd_adpsgd.tools.top", "a table of a run, while it lasts"),
    "report": ("hvd_adpsgd.tools.report", "an HTML page of a run, from its record"),
    "build-horovod": (
        "hvd_adpsgd.tools.build_horovod",
        "build Horovod 0.28.1 for the installed torch and MPI",
    ),
    "simulate": (
        "hvd_adpsgd_lab.simulate",
        "many engines in one process: replay a seed, plan a cluster (laboratory)",
    ),
    "bench": ("hvd_adpsgd_lab.bench", "measure exchanges or training steps (laboratory)"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hvd_adpsgd", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, told) in _COMMANDS.items():
        commands.add_parser(name, help=told, add_help=False)
    chosen = sys.argv[1:2]
    if not (chosen and chosen[0] in _COMMANDS):  # the parser prints help, or an error
        parser.parse_args(chosen)
    module = _COMMANDS[chosen[0]][0]
    try:
        return int(importlib.import_module(module).main(sys.argv[2:]))
    except ModuleNotFoundError as error:
        if error.name != "hvd_adpsgd_lab":
            raise
        print(
            f"{chosen[0]}: hvd_adpsgd_lab {__version__} is not installed. Install the laboratory: in a "
            "checkout python -m pip install ./lab, elsewhere its wheel (make wheel).",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
