"""The figure of the demo. Colours: Okabe and Ito."""

from __future__ import annotations

from pathlib import Path

from .problem import require

_SCHEMES = {"ssgd": ("plain Horovod", "#d55e00"), "hadpsgd": ("H-ADPSGD", "#0072b2")}
_SITUATIONS = {
    "even": "4 even\nlearners",
    "slow": "1 of 4 is\n3 times slower",
    "killed": "1 of 4 is killed\n(short run)",
}


def draw_times(rows: dict[str, dict], path: Path) -> None:
    """Draw how long each training of the demo took: a bar per scheme and situation.

    Args:
        rows: per scheme and situation ("ssgd-even"), what demo.row() returns.
        path: PNG to write.
    """
    require("matplotlib", "matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    situations = list(dict.fromkeys(name.partition("-")[2] for name in rows if "-" in name))
    figure, axis = plt.subplots(figsize=(8, 0.6 + 1.1 * len(situations)), layout="constrained")
    longest = max(row["seconds"] for row in rows.values())
    for place, situation in enumerate(situations):
        for offset, scheme in enumerate(_SCHEMES):
            row = rows[f"{scheme}-{situation}"]
            _bar(axis, place + 0.38 * (offset - 0.5), row, scheme, longest)
    axis.set_yticks(range(len(situations)), [_SITUATIONS[s] for s in situations])
    axis.invert_yaxis()
    axis.set(xlabel="training time in s; all see equally many samples", xlim=(0, 1.6 * longest))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bar(axis, y: float, row: dict, scheme: str, longest: float) -> None:
    """Draw a bar, its end, and what was reached there."""
    label, colour = _SCHEMES[scheme]
    seconds, fails = row["seconds"], row["part"] < 1
    axis.barh(y, seconds, height=0.34, color=colour)
    end = "\u2717 the job ends" if fails else "\u2713 finished"
    if "wer" in row:
        end = f"{100 * row['wer']:.1f} % word errors"
    axis.text(
        seconds + 0.01 * longest, y, f"{label}: {seconds:.0f} s, {end}", va="center", fontsize=9,
        color="#b00000" if fails else "black",
    )  # fmt: skip
