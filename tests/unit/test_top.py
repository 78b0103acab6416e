"""The table in the terminal: readable at any width, keys, and names that cannot steer the terminal."""

import errno
import io
import os
import pty
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from hvd_adpsgd.tools import top
from hvd_adpsgd.tools.top import printable
from hvd_adpsgd.watching.record import Record
from hvd_adpsgd.watching.reports import Report
from hvd_adpsgd.watching.table import COLUMNS

HOST = "gpu-node-0123.rack-7.cluster.example.org, learner 128"


def recorded(folder: Path, host: str = HOST, text: str = "gone") -> None:
    """Three super learners that report until now; the last one has failed 6 s ago."""
    now_s = time.time()
    for i in range(3):
        record = Record(folder, i)
        record.write("start", time_s=now_s - 50, super_learner=i, name=host, every_s=1.0)
        for s in range(20 if i < 2 else 12):
            loss = {"loss": float("nan") if i == 1 else 2.125 + i}
            report = Report(
                time_s=now_s - 20 + s, step=1234567 + i, steps_per_s=123.0, scalars=loss
            )
            record.report(i, report)
        if i == 2:
            record.write("event", time_s=now_s - 6, event="failed", about=2, text=text)
        record.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    recorded(tmp_path)
    return str(tmp_path)


def table(text: str) -> list[list[str]]:
    """The cells of the printed table, the heading first."""
    lines = [line for line in text.splitlines() if line[:1] in "┃│" and line]
    return [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines]


@pytest.mark.parametrize("columns", ["60", "80", "100", "150"])
def test_the_table_is_readable(
    folder: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert top.main(["--once", folder]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= int(columns)
    heading, *found = table(text)
    shown = [dict(zip(heading, row, strict=True)) for row in found]
    assert [row["#"] for row in shown] == ["0", "1", "2"]
    assert {row["step"] for row in shown} == {"1234567", "1234568", "1234569"}
    assert {row["steps/s"] for row in shown} == {"123"}
    assert [row["loss"] for row in shown] == ["2.12", "–", "4.12"]
    assert shown[2]["state"].startswith("FAILED ") and shown[2]["state"].endswith(" s")
    assert not any("…" in row[name] for row in shown for name in row if name != "host")
    if int(columns) >= 80:
        assert shown[0]["host"].startswith("gpu-node-01")
    if columns == "150":
        assert heading == ["#", "host", "state", "step", "steps/s", "stale", "distance", "exch/s",
                           "share", "MB/s", "loss", ""]  # fmt: skip


def test_a_pipe_gets_all_columns(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert top.main(["--once", folder]) == 0
    heading, *found = table(capsys.readouterr().out)
    assert heading == [column.title for column in COLUMNS]
    assert not any("…" in cell for row in found for cell in row[:1] + row[2:])


def test_names_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, host="\x1b[2Jh\x07\ud800\u202e", text="\x1b]0;t\x07")
    assert top.main(["--once", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "?[2Jh???" in text and "failed: ?]0;t?" in text
    assert text.replace("\n", "").isprintable()
    assert printable("näme 3·1") == "näme 3·1"


@pytest.mark.parametrize("every", ["nan", "inf", "-1", "0"])
def test_a_pause_that_is_none(folder: str, every: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([folder, f"--every={every}"]) == 2
    assert "allowed are 0.1 to 86400" in capsys.readouterr().err


class Gone(io.StringIO):
    """Standard output whose reader has gone."""

    def __init__(self, handle: int) -> None:
        super().__init__()
        self.handle = handle

    def fileno(self) -> int:
        return self.handle

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_reader_that_has_gone(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", Gone(file.fileno()))
        assert top.main(["--json", folder]) == 1
        assert os.fstat(file.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_a_file_gets_one_table_after_the_other(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert capsys.readouterr().out.count("3 super learners") == 1
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    assert top.main([folder, "--every", "7"]) == 0
    assert pauses == [7.0] * 3


@pytest.mark.parametrize(
    ("by", "order"),
    [("loss", ["0", "2", "1"]), ("step", ["0", "1", "2"]), ("state", ["2", "0", "1"])],
)
def test_the_order_of_rows(
    folder: str, by: str, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert top.main(["--once", folder, "--sort", by]) == 0
    assert [row[0] for row in table(capsys.readouterr().out)[1:]] == order, "NaN comes last"


@pytest.mark.timeout(120)
def test_a_terminal_shows_the_table_in_place(folder: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "hvd_adpsgd", "top", folder, "--every", "600"]
    env = {**variables, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        text = b""
        while b"FAILED" not in text:
            text += os.read(ours, 65536)
        process.kill()
    assert b"\x1b[?1049h" in text, "on the alternate screen"
    os.close(ours)
    os.close(theirs)
