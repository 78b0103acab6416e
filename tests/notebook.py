"""Runs a notebook without Jupyter: cells of Python, and lines !COMMAND.

    python -m tests.notebook   runs examples/tutorial.ipynb, keeps its output, writes docs/tutorial.md

In the root of the repository. Commands run in bash; one that fails ends the run.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
PAGE = ROOT / "docs" / "tutorial.md"
COMMAND_S = 600.0  # longest command

Cell = dict[str, Any]


def execute(cells: list[Cell], folder: Path) -> list[str]:
    """What each cell prints; "" for text.

    Args:
        cells: of a notebook.
        folder: the working directory; this process comes back to its own.

    Raises:
        Exception: what a cell raises; CalledProcessError for a command that fails.
    """
    names: dict[str, Any] = {"__name__": "__main__", "_run": run}
    environment, before = dict(os.environ), os.getcwd()
    os.chdir(folder)
    try:
        return [_printed(cell, names) for cell in cells]
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def _printed(cell: Cell, names: dict[str, Any]) -> str:
    if cell["cell_type"] != "code":
        return ""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(translated(source(cell)), "a cell", "exec"), names)
    return out.getvalue()


def source(cell: Cell) -> str:
    return "".join(cell["source"])


def translated(code: str) -> str:
    """Python for a cell: lines !COMMAND become calls."""
    return re.sub(r"(?m)^( *)!(.+)$", lambda found: f"{found[1]}_run({found[2]!r})", code)


def run(command: str) -> None:
    """Run a command and print what it prints on either stream."""
    done = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    print(done.stdout, end="")
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)


def page(cells: list[Cell]) -> str:
    """The notebook as a page of the documentation, with what the cells have printed."""
    parts = []
    for cell in cells:
        text = source(cell).strip()
        if cell["cell_type"] == "markdown":
            parts.append(text.replace("](../docs/", "]("))
            continue
        is_command = text.startswith("!")
        shown = re.sub(r"(?m)^!", "", text) if is_command else text
        parts.append(f"```{'bash' if is_command else 'python'}\n{shown}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"]).rstrip()
        if printed:
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    notebook = json.loads(NOTEBOOK.read_text())
    printed = execute(notebook["cells"], ROOT)
    for number, (cell, text) in enumerate(zip(notebook["cells"], printed, strict=True)):
        if cell["cell_type"] == "code":
            lines = [line.rstrip() + "\n" for line in text.splitlines()]
            output = {"name": "stdout", "output_type": "stream", "text": lines}
            cell["outputs"] = [output] if lines else []
            cell["execution_count"] = number
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(notebook["cells"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
