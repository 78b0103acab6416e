"""What the README says must be so."""

from pathlib import Path

from hvd_adpsgd.config import Config

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_options_table_is_that_of_the_configuration():
    for row in Config.table():
        values = f"{row.range} {row.unit}".strip().replace(" | ", ", ")  # | parts the columns
        line = f"| `{row.env}` | {row.default} | {values} | {row.meaning} |"
        assert line in README


def test_the_example_of_one_screen_is_one_screen():
    example = Path(__file__).parents[2] / "examples" / "quadratic.py"
    assert len(example.read_text().splitlines()) <= 80
