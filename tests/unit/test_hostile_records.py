"""Records that are corrupt or of another program: read as far as they are one, never a traceback."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_adpsgd.errors import ConfigError
from hvd_adpsgd.tools import top
from hvd_adpsgd.tools.page import page
from hvd_adpsgd.watching.prometheus import RunCollector
from hvd_adpsgd.watching.record import Record, read
from hvd_adpsgd.watching.reports import Report

GOOD = Report(time_s=1e9, step=7, steps_per_s=10.0, scalars={"loss": 1.0})
NUMBERS = ("time_s", "step", "steps_per_s", "exchanges", "distance", "left_out", "offer")
BAD = *'"abc" [] {} 1e999 -1e999 NaN 1e300 -1 null "\\ud800"'.split(), "1" + "0" * 400
FOREIGN = [
    *(
        f'{{"kind":"report","time_s":1e9,"step":1,"{name}":{bad}}}'
        for name in NUMBERS
        for bad in BAD
    ),
    *(f'{{"kind":"report","time_s":1e9,"super_learner":{bad}}}' for bad in BAD),
    *(f'{{"kind":"report","time_s":1e9,"scalars":{{"loss":{bad}}}}}' for bad in BAD),
    *(
        f'{{"kind":"report","time_s":1e9,"{table}":{bad}}}'
        for table in ("peers", "staleness", "states")
        for bad in BAD
    ),
    *(f'{{"kind":"report","time_s":1e9,"peers":{{"0":{bad}}}}}' for bad in BAD),
    *(f'{{"kind":"event","time_s":{bad},"event":"failed","about":0}}' for bad in BAD),
    *(f'{{"kind":"event","time_s":1e9,"event":{bad},"about":{bad},"text":{bad}}}' for bad in BAD),
    *(
        f'{{"kind":"start","time_s":1e9,"name":{bad},"script":{bad},"super_size":{bad}}}'
        for bad in BAD
    ),
    *(f'{{"kind":"start","time_s":1e9,"every_s":{bad}}}' for bad in BAD),
    '{"kind":"report","time_s":1e9,"scalars":{"\\ud800":1,"loss":1}}',
    "[" * 10_000,
    '{"kind":' + "[" * 10_000 + "]" * 10_000 + "}",
    "1" * 5000,
    "\x00\xff",
]


def written(folder: Path) -> Path:
    """A record of one report, and the path of its file."""
    record = Record(folder, 0)
    record.write("start", time_s=1e9, name="host0", super_size=1)
    record.report(0, GOOD)
    record.close()
    return record.path


def seen(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What top prints, once all other views have been made as well."""
    collector = RunCollector()
    collector.run = read(folder)
    assert list(collector.collect())
    assert top.main(["--once", str(folder)]) == 0
    capsys.readouterr()
    assert top.main(["--json", str(folder)]) == 0
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads(out, parse_constant=lambda text: pytest.fail(text))
    return found


@pytest.mark.parametrize("chunk", range(4))
def test_lines_of_another_hand_are_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chunk: int
) -> None:
    for line in [*FOREIGN[chunk::4], "\n".join(FOREIGN)]:
        path = written(tmp_path)
        with path.open("a", encoding="latin-1") as file:
            file.write(line + "\n")
        try:
            (row, *_) = seen(tmp_path, capsys)["super_learners"]
        except Exception as error:
            pytest.fail(f"{line[:100]}: {error!r}")
        assert row["super_learner"] == 0, line[:100]
        assert "\n" not in line or page(read(tmp_path), 1e9, "/plotly.js")
        path.unlink()


def test_only_files_with_the_number_of_a_super_learner_are_read(tmp_path: Path) -> None:
    text = written(tmp_path).read_text()
    (tmp_path / "1.jsonl").mkdir()
    os.mkfifo(tmp_path / "2.jsonl")
    (tmp_path / "3.jsonl").symlink_to(tmp_path / "nothing")
    for name in ("²", "٣", "-1", "04", "1" * 200, "x"):
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert list(read(tmp_path).tracks) == [0]
    (tmp_path / "0.jsonl").unlink()
    with pytest.raises(ConfigError, match="there is no file"):
        read(tmp_path)


def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        (1e308, -1e308),
        (sys.float_info.max, sys.float_info.max),
        (5e-324, 0.0),
        (-5e-324, sys.float_info.max),
        (1e-310, 1e308),
        (1.0, 1.0 + 2**-52),
    ],
)
def test_numbers_that_cannot_be_drawn_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: tuple[float, float]
) -> None:
    record = Record(tmp_path, 0)
    for k in range(30):
        value = values[k % 2]
        record.report(
            0,
            replace(
                GOOD,
                time_s=1e9 + k,
                step=2**62 + k,
                distance=abs(value),
                steps_per_s=abs(value),
                scalars={"loss": value, "lr": 0.1},
            ),
        )
    record.close()
    seen(tmp_path, capsys)
    text = page(read(tmp_path), 1e9, "/plotly.js")
    assert "NaN" not in text and "Infinity" not in text and '"text":"lr"' in text


def test_a_pipe_in_the_place_of_a_record_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.jsonl")
    with pytest.raises(ConfigError, match="no record"):
        Record(tmp_path, 0)  # opening it would wait for a reader
    reader = os.open(tmp_path / "0.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="no regular file"):
        Record(tmp_path, 0)
    os.close(reader)
